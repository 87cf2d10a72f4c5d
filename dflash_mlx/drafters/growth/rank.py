"""From a draft's logits to its likeliest tokens with their log-probabilities, on the host."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.growth.grow import Array, Ranked
from dflash_mlx.system import cpu_math
from dflash_mlx.verifier.routing import Kernels
from kernels_metal.draft_head import DRAFT_HEAD, DraftHead, draft_head_reference

TOP_K = 8  # tokens that a position can offer


def rank(logits: mx.array, k: int, kernels: Kernels | None = None) -> Ranked:
    """The k likeliest tokens of each row of logits [n, V]; waits for the pass."""
    k = min(k, logits.shape[-1])
    head: DraftHead | None = None if kernels is None else kernels.run(DRAFT_HEAD, logits, k)
    if head is None and cpu_math.applies():
        return _rank_on_host(np.asarray(logits.astype(mx.float32)), k)
    head = head or draft_head_reference(logits, k)
    mx.eval(head.ids, head.logprobs)
    return Ranked(np.array(head.ids).astype(np.int64), np.array(head.logprobs))


def _rank_on_host(logits: Array, k: int) -> Ranked:
    """As above; NumPy selects and exponentiates much faster than MLX's CPU backend."""
    top = np.argpartition(logits, -k, axis=-1)[:, -k:]
    values = np.take_along_axis(logits, top, axis=-1)
    order = np.argsort(-values, axis=-1, kind="stable")
    peak = values.max(axis=-1, keepdims=True)
    shifted = logits - peak
    normal = np.log(np.exp(shifted, out=shifted).sum(axis=-1, keepdims=True)) + peak
    tokens = np.take_along_axis(top, order, axis=-1)
    return Ranked(tokens, np.take_along_axis(values, order, axis=-1) - normal)
