"""What a measurement was made on."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system import blas
from dflash_mlx.system.files import kept_json
from kernels_metal.gpu import said

UNKNOWN = "unknown model"

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


def available_memory() -> int:
    """Bytes that can be had: what Linux calls available, elsewhere all that is installed."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return installed_memory()


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
