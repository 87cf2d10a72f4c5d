"""The likeliest tokens of many positions at once."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.growth.grow import Ranked
from dflash_mlx.drafters.growth.rank import rank

_ROWS = 256  # logits ranked at once


def rank_in_parts(logits: Callable[[mx.array], mx.array], states: mx.array, k: int) -> Ranked:
    """The k likeliest tokens of final states [N, d]; a part of their logits at a time."""
    parts = [
        rank(logits(states[start : start + _ROWS]), k) for start in range(0, len(states), _ROWS)
    ]
    tokens = np.concatenate([part.tokens for part in parts])
    return Ranked(tokens, np.concatenate([part.logprobs for part in parts]))
