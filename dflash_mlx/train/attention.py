"""Attention of many blocks to the texts that they continue, for training."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dflash_mlx.system import cpu_math

HIDDEN = -1e9  # an attention score that leaves no weight


def block_mask(anchors: mx.array, B: int, T: int, window: int | None, causal: bool) -> mx.array:
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


class TextCache:
    """The part of a `LayerCache` that `Attention` needs, for whole texts [S, Hkv, T, D]."""

    offset: Any = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.context = keys, values
        return keys, values

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: mx.array
    ) -> mx.array:
        """[S, H, T, D] for queries of that shape; mask: of `text_mask`."""
        return cpu_math.attention(q, k, v, scale=scale, mask=mask)


class BlockCache(TextCache):
    """Keys and values of blocks [S*A, Hkv, B, D], which attend to their texts and to themselves.

    anchors: [S, A]. context: keys and values [S, Hkv, T, D] of the sequences.
    """

    def __init__(self, anchors: mx.array, context: tuple[mx.array, mx.array]) -> None:
        self.offset = anchors.flatten()
        self._shape, self._text = anchors.shape, context

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: mx.array, **_: Any
    ) -> mx.array:
        """[S*A, H, B, D] for queries of that shape; mask: of `block_mask`."""
        (S, A), (keys, values) = self._shape, self._text
        groups, B, T = q.shape[1] // k.shape[1], q.shape[2], keys.shape[2]
        q = mx.unflatten(q * scale, 1, (-1, groups)).flatten(2, 3)  # [S*A, Hkv, g*B, D]
        shared = mx.unflatten(q, 0, (S, A)).swapaxes(1, 2).flatten(2, 3)  # [S, Hkv, A*g*B, D]
        outside = mx.unflatten(shared @ keys.swapaxes(-1, -2), 2, (A, groups, B))
        own = mx.unflatten(q @ k.swapaxes(-1, -2), 0, (S, A)).swapaxes(1, 2)
        own = mx.unflatten(own, 3, (groups, B))
        scores = mx.where(mask, mx.concatenate([outside, own], axis=-1), HIDDEN)
        weights = cpu_math.softmax(scores)  # [S, Hkv, A, g, B, T + B]
        outside, own = weights[..., :T].flatten(2, 4), weights[..., T:].flatten(3, 4)
        from_block = mx.unflatten(own.swapaxes(1, 2).flatten(0, 1) @ v, 2, (groups, B))
        from_context = mx.unflatten(outside @ values, 2, (A, groups, B)).swapaxes(1, 2)
        out = from_context.flatten(0, 1) + from_block  # [S*A, Hkv, g, B, D]
        return out.flatten(1, 2)


def text_mask(T: int, window: int | None) -> mx.array:
    """[T, T] which tokens of a text each of them sees."""
    apart = mx.arange(T)[:, None] - mx.arange(T)
    return (apart >= 0) & (apart < (window or T))
