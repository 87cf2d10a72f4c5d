"""How a cache stores keys and values that are quantised, along the head dimension.

Every row of every head is quantised by itself, so what is stored of a row depends on that row
alone: it is the same in passes of any width, and moving a row to another slot is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError

_GROUPS = (64, 32)  # numbers that share a scale and a bias


def pack(rows: mx.array, bits: int) -> list[mx.array]:
    """MLX's affine triple of `rows` [1, heads, n, D]: arrays of the same first three dimensions.

    bits: 4 or 8. Raises DFlashError for a D that no group size divides.
    """
    width = rows.shape[-1]
    for size in _GROUPS:
        if width % size == 0:
            return list(mx.quantize(rows, group_size=size, bits=bits))
    raise DFlashError(
        f"keys or values of this model are {width} numbers wide, which is no multiple of "
        f"{_GROUPS[-1]}, so they cannot be quantised",
        "leave out --kv-bits",
    )


def unpack(stored: Sequence[mx.array], bits: int) -> mx.array:
    """The rows [1, heads, n, D] that `stored`, of `pack` with the same `bits`, stands for."""
    packed, scales, biases = stored
    groups = scales.shape[-1]
    width = packed.shape[-1] * 32 // bits
    return mx.dequantize(packed, scales, biases, group_size=width // groups, bits=bits)
