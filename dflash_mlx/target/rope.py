"""Rotary position embeddings with one position per row, which trees and forests need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


def rotate(
    rope: Callable[..., mx.array], x: mx.array, offset: int | mx.array, **kwargs: Any
) -> mx.array:
    """Rotate x [1, H, N, D] at one offset, or row by row when `offset` holds N positions.

    rope: called as `rope(x, offset=...)`. `mx.fast.rope` takes one offset per batch row, so the
    rows become the batch. A batch of sequences, as mlx-lm's own generators run, has one each.
    """
    if not isinstance(offset, mx.array) or offset.size == 1 or x.shape[0] > 1:
        return rope(x, offset=offset, **kwargs)
    return rope(x.swapaxes(0, 2), offset=offset, **kwargs).swapaxes(0, 2)
