"""Decoder layers of Gemma 4: sub-layers between two norms, and a factor behind each layer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.drafters.networks.files import DraftConfig
from dflash_mlx.drafters.networks.layers import MLP, Attention
from dflash_mlx.verifier.cache import LayerCache


class GemmaMLP(MLP):
    """GeGLU."""

    def __call__(self, x: mx.array) -> mx.array:
        """[..., d] -> [..., d]."""
        return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


class GemmaLayer(nn.Module):
    """Decoder layer with norms before and behind each sub-layer, around any attention."""

    def __init__(self, config: DraftConfig, attention: nn.Module) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = attention
        self.mlp = GemmaMLP(config)
        self.input_layernorm = nn.RMSNorm(d, eps)
        self.post_attention_layernorm = nn.RMSNorm(d, eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(d, eps)
        self.post_feedforward_layernorm = nn.RMSNorm(d, eps)
        self.layer_scalar = mx.ones(1)

    def __call__(self, x: mx.array, *seen: Any) -> mx.array:
        """[..., n, d] -> [..., n, d]; seen: what attention takes beside the rows."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), *seen))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class GemmaAttention(Attention):
    """The target's full attention, as DeepSpec's drafters have it.

    Values are normed without a weight, and products of queries and keys are not scaled. shares:
    whether values are the keys' own projection.
    """

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
