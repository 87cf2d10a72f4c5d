"""Decoder layers of draft networks, behind a cache of committed rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.system import cpu_math
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.hooks import rotate_by_row


class Shape(Protocol):
    """Of a decoder layer; names as in a config.json. attention_bias: of all projections."""

    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def num_attention_heads(self) -> int: ...  # noqa: D102
    @property
    def num_key_value_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102
    @property
    def rms_norm_eps(self) -> float: ...  # noqa: D102
    @property
    def rope(self) -> dict[str, Any]: ...  # noqa: D102
    @property
    def max_position_embeddings(self) -> int: ...  # noqa: D102
    @property
    def attention_bias(self) -> bool: ...  # noqa: D102


def limit_windows(windows: Iterable[int | None], most: int | None) -> tuple[int | None, ...]:
    """Sliding windows of layers, None for full attention; none is above `most`, where it is given.

    Full attention becomes a sliding window, which counts as in layers that have one anyway: from
    each row's own position, itself included. Positions stay those of the whole sequence.
    """
    return tuple(window if most is None else min(window or most, most) for window in windows)


class Attention(nn.Module):
    """Attention of a pass's rows to what is committed and to the pass itself.

    width: of its input, where that is not hidden_size. head_norms: whether queries and keys of
    every head are normalised, as in Qwen3. output_bias: whether the output has a bias where the
    others have one; not in Qwen2.
    """

    def __init__(
        self,
        shape: Shape,
        width: int | None = None,
        head_norms: bool = True,
        output_bias: bool = True,
    ) -> None:
        from mlx_lm.models.rope_utils import initialize_rope

        super().__init__()
        d, dim, bias = width or shape.hidden_size, shape.head_dim, shape.attention_bias
        self.head_dim = dim
        self.q_proj = nn.Linear(d, shape.num_attention_heads * dim, bias=bias)
        self.k_proj = nn.Linear(d, shape.num_key_value_heads * dim, bias=bias)
        self.v_proj = nn.Linear(d, shape.num_key_value_heads * dim, bias=bias)
        outputs = shape.num_attention_heads * dim, shape.hidden_size
        self.o_proj = nn.Linear(*outputs, bias=bias and output_bias)
        if head_norms:
            self.q_norm = nn.RMSNorm(dim, shape.rms_norm_eps)
            self.k_norm = nn.RMSNorm(dim, shape.rms_norm_eps)
        self._head_norms = head_norms
        self.rope = initialize_rope(
            dim,
            shape.rope["rope_theta"],
            shape.rope.get("interleaved", False),  # neighbours turn together, as in LFM2
            shape.rope,
            shape.max_position_embeddings,
        )
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
        queries = self._heads(self.q_proj(x))
        queries = self.q_norm(queries) if self._head_norms else queries
        queries = self.rope(queries, offset=cache.offset)
        keys, values = self.remember(x, cache)
        out = cache.attend(queries, keys, values, scale=self.head_dim**-0.5, mask=mask)
        return self.o_proj(out.swapaxes(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, hidden = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(d, hidden, bias=False)
        self.up_proj = nn.Linear(d, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, d, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """[..., d] -> [..., d]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if cpu_math.pays(gate.size):
            return self.down_proj(cpu_math.swiglu(gate, up))
        return self.down_proj(nn.silu(gate) * up)


class Layer(nn.Module):
    """Pre-norm decoder layer: Qwen3's with head_norms, Llama's and Qwen2's without."""

    def __init__(self, shape: Shape, head_norms: bool = True) -> None:
        super().__init__()
        self.self_attn = Attention(shape, head_norms=head_norms, output_bias=head_norms)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def __call__(self, x: mx.array, mask: mx.array | str | None, cache: LayerCache) -> mx.array:
        """[1, n, d] -> [1, n, d]."""
        x = x + self.self_attn(self.input_layernorm(x), mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))
