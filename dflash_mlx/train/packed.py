"""The drafter over many blocks at once: every block sees its own context prefix and itself.

`Network.__call__` runs one block behind a cache. Here the layers' own attention and MLP run over A
blocks in each of S sequences, and the context's keys and values, computed once per sequence, are
shared by all of its blocks.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dflash_mlx.drafters.dflash.network import Network, NetworkConfig
from dflash_mlx.system import cpu_math

_HIDDEN = -1e9  # an attention score that leaves no weight


def hidden_states(
    network: Network, config: NetworkConfig, features: mx.array, anchors: mx.array, x: mx.array
) -> mx.array:
    """Final hidden states [S, A, B, d] of A blocks in each of S sequences.

    features: [S, T, m*d] of the target, padded at the end. anchors: [S, A], the blocks' first
    positions; a block sees the features before its anchor. x: [S, A, B, d], the blocks'
    embeddings.
    """
    shape, rows = x.shape, x.flatten(0, 1)
    context = network.hidden_norm(network.fc(features))
    kinds = list(zip(config.layer_windows, config.layer_causal, strict=True))
    masks = {kind: _mask(anchors, shape[2], features.shape[1], *kind) for kind in set(kinds)}
    for layer, kind in zip(network.layers, kinds, strict=True):
        at_start: Any = _ContextCache()
        cache: Any = _BlockCache(anchors, layer.self_attn.remember(context, at_start))
        rows = rows + layer.self_attn(layer.input_layernorm(rows), masks[kind], cache)
        y, mlp = layer.post_attention_layernorm(rows), layer.mlp
        # As `MLP.__call__`, with an exponential that is fast on Linux, too.
        rows = rows + mlp.down_proj(cpu_math.swiglu(mlp.gate_proj(y), mlp.up_proj(y)))
    return network.norm(rows).reshape(shape)  # type: ignore[no-any-return]


def _mask(anchors: mx.array, B: int, T: int, window: int | None, causal: bool) -> mx.array:
    """[S, 1, A, 1, B, T + B]: which context tokens and which of its block's rows a row sees."""
    rows, tokens = mx.arange(B), mx.arange(T)
    apart = rows[:, None] - rows[None]
    inside = mx.abs(apart) < (window or B)
    if causal:
        inside = inside & (apart >= 0)
    starts = anchors[:, :, None, None]
    before = mx.broadcast_to(tokens < starts, (*anchors.shape, B, T))
    if window is not None:
        before = before & (starts + rows[:, None] - tokens < window)
    inside = mx.broadcast_to(inside, (*anchors.shape, B, B))
    return mx.concatenate([before, inside], axis=-1)[:, None, :, None]


class _ContextCache:
    """The part of a `LayerCache` that `Attention.remember` needs, for rows from position 0 on."""

    offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


class _BlockCache(_ContextCache):
    """... and the part that `Attention.__call__` needs, for all blocks [S*A, Hkv, B, D].

    anchors: [S, A]. context: keys and values [S, Hkv, T, D] of the sequences.
    """

    def __init__(self, anchors: mx.array, context: tuple[mx.array, mx.array]) -> None:
        self.offset: Any = anchors.flatten()
        self._shape, self._context = anchors.shape, context

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: mx.array
    ) -> mx.array:
        """[S*A, H, B, D] for queries of that shape; mask: of `_mask`."""
        (S, A), (keys, values) = self._shape, self._context
        groups, B, T = q.shape[1] // k.shape[1], q.shape[2], keys.shape[2]
        q = mx.unflatten(q * scale, 1, (-1, groups)).flatten(2, 3)  # [S*A, Hkv, g*B, D]
        shared = mx.unflatten(q, 0, (S, A)).swapaxes(1, 2).flatten(2, 3)  # [S, Hkv, A*g*B, D]
        outside = mx.unflatten(shared @ keys.swapaxes(-1, -2), 2, (A, groups, B))
        own = mx.unflatten(q @ k.swapaxes(-1, -2), 0, (S, A)).swapaxes(1, 2)
        own = mx.unflatten(own, 3, (groups, B))
        scores = mx.where(mask, mx.concatenate([outside, own], axis=-1), _HIDDEN)
        weights = cpu_math.softmax(scores)  # [S, Hkv, A, g, B, T + B]
        outside, own = weights[..., :T].flatten(2, 4), weights[..., T:].flatten(3, 4)
        from_block = mx.unflatten(own.swapaxes(1, 2).flatten(0, 1) @ v, 2, (groups, B))
        from_context = mx.unflatten(outside @ values, 2, (A, groups, B)).swapaxes(1, 2)
        out = from_context.flatten(0, 1) + from_block  # [S*A, Hkv, g, B, D]
        return out.flatten(1, 2)
