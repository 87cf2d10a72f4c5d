"""Attention of Gemma 4, as DeepSpec's drafters for it have it.

It is the target's full attention: values that are normed without a weight and may be the keys' own
projection, and products of queries and keys that are not scaled.
"""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.drafters.networks.files import DraftConfig
from dflash_mlx.drafters.networks.layers import Attention
from dflash_mlx.verifier.cache import LayerCache


class GemmaAttention(Attention):
    """Attention whose values are normed. shares: whether they are the keys' projection."""

    scale = 1.0

    def __init__(self, config: DraftConfig, shares: bool) -> None:
        super().__init__(config)
        self._eps = config.rms_norm_eps
        if shares:
            del self.v_proj

    def remember(self, rows: mx.array, cache: LayerCache) -> tuple[mx.array, mx.array]:
        projected = self._heads(self.k_proj(rows))
        values = self._heads(self.v_proj(rows)) if "v_proj" in self else projected
        keys = self.rope(self.k_norm(projected), offset=cache.offset)
        return cache.update_and_fetch(keys, mx.fast.rms_norm(values, None, self._eps))
