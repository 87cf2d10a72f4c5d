"""Draws of a block, position by position and independently, merged to a tree."""

from __future__ import annotations

import numpy as np

from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.growth.grow import FIRST, Array


def log_softmax(logits: Array) -> Array:
    """[n, V] log-probabilities of each row."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    normal = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    result: Array = shifted - normal
    return result


def merge_samples(
    logprobs: Array, samples: int, generator: np.random.Generator, ids: Array | None = None
) -> Tree:
    """The argmax of every position and `samples` independent draws, equal prefixes merged.

    logprobs: [n, k] of the n drafted positions; only their proportions are drawn by. ids: [n, k]
    the tokens that they are for, None for 0 to k - 1.
    """
    positions, chains = np.arange(len(logprobs)), []
    cumulative = np.cumsum(np.exp(logprobs, dtype=np.float64), axis=-1)
    for uniform in (None, *generator.random((samples, len(logprobs)))):
        drawn = np.argmax(logprobs, axis=-1) if uniform is None else _draw(cumulative, uniform)
        tokens = drawn if ids is None else ids[positions, drawn]
        chains.append((tokens.tolist(), logprobs[positions, drawn].tolist(), FIRST))
    return Tree.of_chains(chains)


def _draw(cumulative: Array, uniform: Array) -> Array:
    """[n] a token per row by the inverse of its cumulative distribution [n, V]; uniform: [n]."""
    at = uniform * cumulative[:, -1]
    rows = zip(cumulative, at, strict=True)
    tokens = np.array([np.searchsorted(row, value, side="right") for row, value in rows])
    result: Array = np.minimum(tokens, cumulative.shape[1] - 1)  # rounding can reach the end
    return result
