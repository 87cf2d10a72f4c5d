"""What a measurement was made on."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system import blas
from dflash_mlx.system.files import kept_json
from kernels_metal.gpu import said

UNKNOWN = "unknown model"
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_CACHED = ("inactive_file", "active_file")

_PACKAGES = ("dflash-chat", "mlx", "mlx-lm", "numpy", "transformers", "cmeel-openblas")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, system, MLX's device, and the BLAS in use on Linux."""
    served = blas.preload()
    threads = f"{served.library}, {served.threads} threads"
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": installed_memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": str(mx.default_device()),
        "blas": threads if served.library else "as built into mlx",
    }


def installed_memory() -> int:
    """Bytes of memory that this machine has, free or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_limit() -> int:
    """Bytes that this process may take: all, or what a GPU, a container or a shell allows it."""
    return min(installed_memory(), *(limit for limit, _ in _limits()))


def available_memory() -> int:
    """Bytes that can be had: what Linux calls available, elsewhere all; less where limits do."""
    found = _in_bytes(Path("/proc/meminfo"), "MemAvailable") or installed_memory()
    return max(0, min(found, *(limit - taken for limit, taken in _limits())))


def _limits() -> Iterator[tuple[int, int]]:
    """Limits for this process in bytes, and what is taken of each."""
    yield sys.maxsize, 0
    if mx.metal.is_available():
        yield int(mx.device_info()["max_recommended_working_set_size"]), 0
    for kind, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
            yield limit, _in_bytes(Path("/proc/self/status"), name)
    for folder, (most, used) in product(_cgroups(), _CGROUP_FILES):
        with suppress(OSError, ValueError):  # as "max" is no number
            limit, taken = (int((folder / name).read_text()) for name in (most, used))
            yield limit, taken - _cached_files(folder)


def _cgroups() -> Iterator[Path]:
    """The folders of this process's memory cgroups, of either version, up to their root."""
    with suppress(OSError, ValueError):
        for line in OWN_CGROUPS.read_text(encoding="utf-8").splitlines():
            _, kinds, place = line.split(":", 2)
            if kinds in ("", "memory"):
                folder = CGROUPS / kinds / place.strip("/")
                yield from (each for each in (folder, *folder.parents) if CGROUPS in each.parents)
                yield CGROUPS


def _cached_files(cgroup: Path) -> int:
    """Bytes of files that count as taken and are given up when memory is short."""
    lines = (cgroup / "memory.stat").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in _CACHED)


def _in_bytes(file: Path, name: str) -> int:
    """A figure of a file of /proc, 0 where it is not there."""
    try:
        found = dict(line.split(":", 1) for line in file.read_text(encoding="utf-8").splitlines())
        return int(found[name].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return 0


def free_memory() -> int:
    """`available_memory` without what MLX takes, where that counts all that is installed."""
    taken = 0 if os.path.exists("/proc/meminfo") else mx.get_active_memory()
    return max(available_memory() - taken, 0)


def read_speed() -> float:
    """Bytes per second at which a matrix is read for its product with a vector.

    Decoding reads all weights of a model for each token, so this says how fast it can be.
    """
    matrix, seconds = mx.arange(2**25, dtype=mx.float32).reshape(8192, 4096), []
    for _ in range(4):  # the first makes it
        start = time.perf_counter()
        mx.eval(matrix @ matrix[0])
        seconds.append(time.perf_counter() - start)
    return matrix.nbytes / min(seconds)


def describe_versions() -> dict[str, str]:
    """Python and the packages that matter."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def namesakes() -> list[str]:
    """Other packages that are installed with the import name `dflash_mlx`, with their versions."""
    found = {*packages_distributions().get("dflash_mlx", ())} - {"dflash-chat"}
    return [f"{name} {version(name)}" for name in sorted(found)]


def check_own_package() -> None:
    """DFlashError where an `__init__` that is not ours lies in our folder, or none does."""
    if not hasattr(sys.modules["dflash_mlx"], "blas"):
        others = ", ".join(namesakes()) or "a package that is gone again"
        what = f"{others} has the import name dflash_mlx, too, and its files replaced some of ours"
        raise DFlashError(what, "install dflash-chat alone, with uv tool or pipx")


def model_key(name: str, parameters: Iterable[tuple[str, mx.array]], *settings: object) -> str:
    """A name for what was measured of a model on this machine, with these versions and settings."""
    weights = [(path, array.shape, str(array.dtype)) for path, array in parameters]
    about = (describe_machine(), describe_versions(), name, weights, *settings)
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def model_of(file: Path) -> str:
    """Which model a JSON file is of that goes by a `model_key`; older ones do not say."""
    try:
        return str(kept_json(file)["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return UNKNOWN


def _processor() -> str:
    if platform.system() == "Darwin":
        return said("sysctl -n machdep.cpu.brand_string").strip()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
