"""What this machine's GPU is, and whether kernels may use its 8x8 matrices."""

from __future__ import annotations

import functools
import re

import mlx.core as mx

from kernels_metal.factory import executor, metal

_FIRST, _LAST = 13, 16  # generations of Apple's GPUs, M1 to M4; later ones were seen to hang


@functools.cache
def gpu_family() -> str:
    """The GPU's architecture as MLX names it, "none" without Metal."""
    return str(mx.device_info()["architecture"]) if mx.metal.is_available() else "none"


def has_matrices(family: str) -> bool:
    """Whether `simdgroup_matrix` is there and safe on a GPU of this name."""
    found = re.fullmatch(r"applegpu_g(\d+)\w*", family)
    return found is not None and _FIRST <= int(found[1]) <= _LAST


def may_use_matrices() -> bool:
    """The same of what runs kernels here; another executor than Metal has them."""
    return executor() is not metal or has_matrices(gpu_family())
