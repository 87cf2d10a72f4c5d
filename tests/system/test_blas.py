"""OpenBLAS serves MLX, and gets the cores that nothing else uses.

`blas.preload` must run before MLX is imported, so each case is a fresh process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx.system.blas import Threads, _busy_seconds, threads

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the BLAS is only replaced on Linux; macOS has Accelerate"
)

# The module on its own: its package would import MLX and much else after it.
ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("blas", "dflash_mlx/system/blas.py")
sys.modules["blas"] = blas = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blas)
"""

CALL = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    status = blas.preload()
warned = [str(w.message) for w in caught if w.category is RuntimeWarning]
report = {"library": status.library, "warned": warned}
with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert blas.preload() is status, "there is one notice at most"
"""

PRODUCT = """
import mlx.core as mx, numpy as np
a, b = (np.random.default_rng(s).standard_normal((256, 256), dtype=np.float32) for s in (0, 1))
error = np.abs(np.array(mx.array(a) @ mx.array(b).T) - a.astype(np.float64) @ b.T).max()
assert error < 1e-3, error
"""

DIRECT_LOADING_FAILS = """
import ctypes
real, refused = ctypes.CDLL, []
def picky(name, *args, **keywords):
    if "libopenblas" in str(name) and not refused:
        refused.append(name)
        raise OSError("libgfortran.so.5: cannot open shared object file")
    return real(name, *args, **keywords)
ctypes.CDLL = picky
"""


def hidden(package: str) -> str:
    """The script that makes a package look as if it were not installed."""
    return f"""
import importlib.metadata as metadata
files = metadata.files
metadata.files = lambda name: files("no-such-package" if name == {package!r} else name)
"""


def run(before: str = ALONE, after: str = "", **environment: str) -> dict[str, Any]:
    """What preloading reports, in a process that does something before and after it."""
    inherited = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    process = subprocess.run(
        [sys.executable, "-c", before + CALL + after + "\nprint(json.dumps(report))"],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def test_mlx_binds_its_matrix_product_to_openblas(tmp_path: Path) -> None:
    """As the GNU loader says, with which all wheels of MLX for Linux run."""
    log = {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "bindings")}
    report = run("from dflash_mlx import blas", PRODUCT, **log)
    lines = "".join(p.read_text(errors="replace") for p in tmp_path.glob("bindings.*")).split("\n")
    bound = [line for line in lines if "libmlx" in line and "`cblas_sgemm'" in line]
    assert bound, "MLX never resolved cblas_sgemm"
    assert all(f" to {report['library']} " in line for line in bound), bound
    assert report["warned"] == []


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("import mlx.core\n", ["import dflash_mlx first"]),
        (hidden("cmeel-openblas"), ["50 times slower", "pip install 'cmeel-openblas<"]),
        (hidden("mlx-cpu") + DIRECT_LOADING_FAILS, ["libgfortran5"]),
    ],
    ids=["MLX comes first", "no package", "no libgfortran"],
)
def test_what_is_missing_gives_one_notice_that_names_it(before: str, words: list[str]) -> None:
    report = run(before + ALONE, PRODUCT)
    assert report["library"] is None
    (notice,) = report["warned"]
    assert all(word in notice for word in words)


def test_the_bundled_libgfortran_is_used_where_the_system_has_none() -> None:
    check = 'assert refused and "memfd:libgfortran" in open("/proc/self/maps").read()'
    report = run(DIRECT_LOADING_FAILS + ALONE, PRODUCT + check)
    assert report["warned"] == []
    assert report["library"].endswith("libopenblas.so")


def test_other_systems_are_left_alone() -> None:
    report = run(ALONE + "sys.platform = 'darwin'")
    assert report == {"library": None, "warned": []}


# Threads


class Machine:
    """Counters of a machine of several cores, which stand still unless it works."""

    def __init__(self, cores):
        self.now, self.ours, self.others, self.looks, self.used = 0.0, 0.0, 0.0, 0, []
        self.threads = Threads(cores, self.used.append, self.busy, lambda: self.now)

    def busy(self):
        self.looks += 1
        return self.ours + self.others, self.ours

    def work(self, seconds, others, ours=1.5):
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.ours += 0.1 * ours
            self.others += 0.1 * others
            self.threads.tick()
        return self.used


@pytest.mark.parametrize(("cores", "others", "left"), [(2, 0.95, 1), (8, 2.2, 6), (2, 6.0, 1)])
def test_within_a_second_threads_make_room_and_come_back(cores, others, left):
    machine = Machine(cores)
    assert machine.work(5, 0.1) == []
    assert machine.work(1, others)[-1] == left
    assert machine.work(1, 0.1)[-1] == cores
    assert machine.looks < 20
    alone = Machine(1)
    assert alone.work(3, 0.9) == [] and alone.looks == 0


def test_the_real_counters_grow_with_work():
    everybody, ours = _busy_seconds()
    sum(range(10**7))
    later, ours_later = _busy_seconds()
    assert later >= everybody and ours_later >= ours
    threads().tick()
