"""What modules of mlx-lm do in the place of their own calls, where kernels may be used.

Most families' MLPs, and the attention of Qwen3 and its like, are the same code. They are known by
it, so that no list of families has to be kept: another code keeps its own call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.forest import JoinedLayer
from dflash_mlx.verifier.fusion import Group
from dflash_mlx.verifier.routing import Kernels
from kernels_metal.norm_rope import MAX_ROWS, NORM_ROPE, HeadNorm, NormRope

Call = Callable[..., mx.array]


def scaled_dot_product_attention(  # noqa: PLR0913  # mlx-lm's name and signature
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's attention, which one of our caches computes itself."""
    how: dict[str, Any] = {"scale": scale, "mask": mask, "sinks": sinks}
    ours = isinstance(cache, LayerCache) and cache.kernels is not None
    if (ours and cache.kernels.mode != "off") or isinstance(cache, JoinedLayer):
        return cache.attend(queries, keys, values, **how)  # type: ignore[no-any-return]
    return stock_attention()(queries, keys, values, cache=cache, **how)


def stock_attention() -> Call:
    """mlx-lm's own."""
    from mlx_lm.models import base  # not before a model is loaded: it takes seconds

    return base.scaled_dot_product_attention


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether its call is down(swiglu(gate(x), up(x))), as Qwen3's."""
    from mlx_lm.models import activations, qwen3

    if not _same_code(module, qwen3.MLP):
        return False
    return type(module).__call__.__globals__["swiglu"] is activations.swiglu


def is_normed_attention(module: Any) -> bool:
    """Whether its call is Qwen3's, with plain norms and rope: queries and keys normed by head."""
    from mlx_lm.models import qwen3

    if not _same_code(module, qwen3.Attention):
        return False
    rope = module.rope
    plain = nn.RoPE in type(rope).__mro__[:2] and not rope.traditional  # a hooked one is a subclass
    norms = type(module.q_norm) is type(module.k_norm) is nn.RMSNorm
    norms = norms and module.q_norm.eps == module.k_norm.eps
    return norms and plain and rope.dims == module.q_norm["weight"].size


def _same_code(module: nn.Module, other: Any) -> bool:
    call: Any = type(module).__call__
    if not inspect.isfunction(call):
        return False
    ours, known = call.__code__, other.__call__.__code__
    parts = "co_code", "co_names", "co_consts"
    return all(getattr(ours, part) == getattr(known, part) for part in parts)


def gated_mlp(stock: Call, group: Group) -> Call:
    """The call of an MLP whose gate and up are `group`."""

    def mlp(self: Any, x: mx.array) -> mx.array:
        inner = group.gated(x)
        return stock(self, x) if inner is None else self.down_proj(inner)

    return mlp


def normed_attention(stock: Call, kernels: Kernels, group: Group | None) -> Call:
    """The call of one attention module, whose steps are mlx-lm's but for norms and rope.

    group: its queries, keys and values, where one product can give them.
    """
    heads = _Heads(kernels)

    def attend(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not heads.may_turn(self, x, cache):
            return stock(self, x, mask, cache)
        rows = x.shape[1]
        products = None if group is None else group.products(x)
        queries, keys, values = products or (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        turn = heads.turn(self, queries, keys, cache)
        if turn is None:
            return stock(self, x, mask, cache)
        queries, keys = turn(queries, keys, cache.places)
        values = values.reshape(1, rows, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
        keys, values = cache.update_and_fetch(keys, values)
        found = scaled_dot_product_attention(queries, keys, values, cache, self.scale, mask)
        return self.o_proj(found.transpose(0, 2, 1, 3).reshape(1, rows, -1))  # type: ignore[no-any-return]

    return attend


class _Heads:
    """What is chosen for norms and rope of one module, by shape, as long as it holds."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._known: object = None
        self._weights: tuple[Any, Any] = (None, None)  # with them their dtype
        self._chosen: dict[int, NormRope | None] = {}  # by the rows of a pass

    def may_turn(self, module: Any, x: mx.array, cache: Any) -> bool:
        """Whether rows x [1, R, d] of a pass can go through the kernel, by all that is known."""
        running = self._kernels.running()
        if running is None or x.shape[0] > 1 or x.shape[1] > MAX_ROWS:
            return False
        first, second = module.q_norm["weight"], module.k_norm["weight"]
        same = first is self._weights[0] and second is self._weights[1]
        if running is not self._known or not same:
            self._known, self._weights = running, (first, second)
            self._chosen.clear()
        ours = isinstance(cache, (LayerCache, JoinedLayer))
        return ours and self._chosen.get(x.shape[1], True) is not None

    def turn(self, module: Any, queries: mx.array, keys: mx.array, cache: Any) -> NormRope | None:
        """The kernel for queries and keys [1, R, heads * D], None where it is not chosen."""
        rows = queries.shape[1]
        if rows not in self._chosen:
            self._chosen[rows] = self._choose(module, queries, keys, cache.places[:rows])
        return self._chosen[rows]

    def _choose(
        self, module: Any, queries: mx.array, keys: mx.array, places: mx.array
    ) -> NormRope | None:
        rope, norm = module.rope, module.q_norm
        steps = mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims
        periods = rope.base**steps / rope.scale
        how = HeadNorm(norm["weight"], module.k_norm["weight"], periods, norm.eps)
        if self._kernels.chosen(NORM_ROPE, (queries, keys, places, how)) is None:
            return None
        return NormRope(queries, keys, how)
