"""Decoder layers of draft networks, behind a cache of committed rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.drafters.networks.files import DraftConfig
from dflash_mlx.system import cpu_math
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.hooks import rotate_by_row


def limit_windows(windows: Iterable[int | None], most: int | None) -> tuple[int | None, ...]:
    """Sliding windows of layers, None for full attention; none is above `most`, where it is given.

    Full attention becomes a sliding window, which counts as in layers that have one anyway: from
    each row's own position, itself included. Positions stay those of the whole sequence.
    """
    return tuple(window if most is None else min(window or most, most) for window in windows)


def _rope(config: DraftConfig) -> nn.Module:
    dims, base = config.rotary_dims or config.head_dim, config.rope["rope_theta"]
    neighbours = config.rope.get("interleaved", False)  # turn together, as in LFM2
    if config.rope.get("type", config.rope["rope_type"]) == "default":
        return nn.RoPE(dims, neighbours, base)
    from mlx_lm.models.rope_utils import initialize_rope  # takes a second

    most = config.max_position_embeddings
    rope: nn.Module = initialize_rope(dims, base, neighbours, config.rope, most)
    return rope


class Attention(nn.Module):
    """Attention of a pass's rows to what is committed and to the pass itself."""

    scale: float | None = None  # of products of queries and keys; None for 1 over the root of D

    def __init__(
        self,
        config: DraftConfig,
        width: int | None = None,  # of its input, where that is not hidden_size
        head_norms: bool = True,  # of queries and keys, as in Qwen3
        output_bias: bool = True,  # where the others have one; not in Qwen2
    ) -> None:
        super().__init__()
        d, dim, bias = width or config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = dim
        queries = config.num_attention_heads * dim * (1 + config.gated)
        self.q_proj = nn.Linear(d, queries, bias=bias)
        self.k_proj = nn.Linear(d, config.num_key_value_heads * dim, bias=bias)
        self.v_proj = nn.Linear(d, config.num_key_value_heads * dim, bias=bias)
        outputs = config.num_attention_heads * dim, config.hidden_size
        self.o_proj = nn.Linear(*outputs, bias=bias and output_bias)
        if head_norms:
            self.q_norm = nn.RMSNorm(dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(dim, config.rms_norm_eps)
        self._head_norms, self._gated = head_norms, config.gated
        self.rope = _rope(config)
        rotate_by_row(self.rope)

    def _heads(self, x: mx.array) -> mx.array:
        return mx.unflatten(x, -1, (-1, self.head_dim)).swapaxes(1, 2)

    def remember(self, rows: mx.array, cache: LayerCache) -> tuple[mx.array, mx.array]:
        """Write keys and values of `rows` [1, n, d] into `cache`; return all that are visible."""
        keys = self._heads(self.k_proj(rows))
        keys = self.rope(self.k_norm(keys) if self._head_norms else keys, offset=cache.offset)
        return cache.update_and_fetch(keys, self._heads(self.v_proj(rows)))

    def __call__(self, x: mx.array, mask: mx.array | str | None, cache: LayerCache) -> mx.array:
        """Attend from rows x [1, n, d]; returns [1, n, hidden_size]."""
        queries, gate = self._queries(x)
        queries = self.q_norm(queries) if self._head_norms else queries
        queries = self.rope(queries, offset=cache.offset)
        keys, values = self.remember(x, cache)
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        out = cache.attend(queries, keys, values, scale=scale, mask=mask)
        out = out.swapaxes(1, 2).flatten(2)
        return self.o_proj(out if gate is None else out * mx.sigmoid(gate))

    def _queries(self, x: mx.array) -> tuple[mx.array, mx.array | None]:
        """[1, H, n, D] of rows, and what gates their output [1, n, H * D]; None without a gate.

        A head's gate stands behind its query.
        """
        rows: mx.array = self.q_proj(x)
        if not self._gated:
            return self._heads(rows), None
        heads = mx.unflatten(rows, -1, (-1, 2, self.head_dim))
        return heads[..., 0, :].swapaxes(1, 2), heads[..., 1, :].flatten(2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        d, hidden = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, hidden, bias=False)
        self.up_proj = nn.Linear(d, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, d, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """[..., d] -> [..., d]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if cpu_math.pays(gate.size):
            return self.down_proj(cpu_math.swiglu(gate, up))
        return self.down_proj(nn.silu(gate) * up)


class DraftNetwork(nn.Module):
    """What every draft network has: its last norm, and what it brings in its target's place."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.norm = nn.RMSNorm(d, config.rms_norm_eps)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, d)
        if config.own_head and not config.tied:
            self.lm_head = nn.Linear(d, config.drafted, bias=False)
        if config.draft_vocab_size is not None:
            self.d2t = mx.zeros(config.draft_vocab_size, mx.int64)  # to add to a draft id


class Layer(nn.Module):
    """Pre-norm decoder layer: Qwen3's with head_norms, Llama's and Qwen2's without."""

    def __init__(
        self, config: DraftConfig, head_norms: bool = True, output_bias: bool | None = None
    ) -> None:
        """output_bias: of attention, None for as Qwen3 and Qwen2 have it."""
        super().__init__()
        biased = head_norms if output_bias is None else output_bias
        self.self_attn = Attention(config, head_norms=head_norms, output_bias=biased)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, x: mx.array, mask: mx.array | str | None, cache: LayerCache) -> mx.array:
        """[1, n, d] -> [1, n, d]."""
        x = x + self.self_attn(self.input_layernorm(x), mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class GemmaMLP(MLP):
    """GeGLU, as in Gemma 4."""

    def __call__(self, x: mx.array) -> mx.array:
        """[..., d] -> [..., d]."""
        return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


class GemmaLayer(nn.Module):
    """Gemma 4's: norms before and behind each sub-layer, around any attention, and a factor."""

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
