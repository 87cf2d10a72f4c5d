"""What this machine's GPU is, and whether kernels may use its 8x8 matrices."""

from __future__ import annotations

import functools
import re
import subprocess

import mlx.core as mx

from kernels_metal.factory import executor, metal

_FIRST, _LAST = 13, 16  # generations of Apple's GPUs, M1 to M4; later ones were seen to hang
_CORES = {"p": 6, "g": 10, "s": 20, "c": 40, "d": 80}  # a phone's, a plain M, Pro, Max, Ultra
_SECONDS = 10.0  # that a program may take to answer
_TILED = 14  # an M2's: up to here MLX multiplies 6 to 32 rows as if they were 32


@functools.cache
def gpu_family() -> str:
    """The GPU's architecture as MLX names it, "none" without Metal."""
    return str(mx.device_info()["architecture"]) if mx.metal.is_available() else "none"


def said(command: str) -> str:
    """What a program of the system prints, "" where there is none, it fails or hangs."""
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


@functools.cache
def macos() -> str:
    """Version and build of macOS, "" on other systems."""
    return said("sw_vers")


@functools.cache
def power_mode() -> str:
    """Which power mode a Mac is in, as `pmset` has it, "" where it says nothing.

    Taken once: a program that runs on would find its choices gone with every change of it.
    """
    found = re.findall(r"(\w*powermode)\s+(\d+)", said("pmset -g"))
    return " ".join(" ".join(each) for each in found)


def generation(family: str) -> int:
    """Of Apple's GPU of this name, 13 an M1's and 16 an M4's; 0 for another."""
    found = re.fullmatch(r"applegpu_g(\d+)\w*", family)
    return 0 if found is None else int(found[1])


def has_matrices(family: str) -> bool:
    """Whether `simdgroup_matrix` is there and safe on a GPU of this name."""
    return _FIRST <= generation(family) <= _LAST


def few_rows() -> int:
    """Rows up to which our products of few rows can beat MLX's own on what runs kernels here.

    MLX multiplies tiles of 32 rows from 6 rows on before an M3, and cheaper from 13 on since then;
    on later GPUs than an M4 it has better ones for all.
    """
    if executor() is not metal:
        return 32
    found = generation(gpu_family())
    return 32 if _FIRST <= found <= _TILED else 24 if _TILED < found <= _LAST else 0


def fewest_unpacked() -> int:
    """Rows from which our products by weights that are not packed can beat MLX's own.

    MLX multiplies 2 to 32 rows as if they were 64 before an M3. Since then it reads weights once
    for a few rows, and again for each few more of up to 15 (its `GemvWide`).
    """
    if executor() is not metal:
        return 1
    return 6 if generation(gpu_family()) > _TILED else 2


def cores() -> int:
    """About how many cores the GPU has that runs kernels here, by the letter of its name.

    MLX does not tell. Of chips of one name that have more or fewer the larger is meant, and
    another executor than Metal is as an M4 Max.
    """
    return _cores(gpu_family() if executor() is metal else "")


@functools.cache
def _cores(family: str) -> int:
    found = re.fullmatch(r"applegpu_g\d+(\w)", family)
    return _CORES.get(found[1] if found else "", 40)


def may_use_matrices() -> bool:
    """Whether what runs kernels here has 8x8 matrices; an executor other than Metal has them."""
    return executor() is not metal or has_matrices(gpu_family())
