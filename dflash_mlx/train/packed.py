"""The drafter over many blocks at once: every block sees its own context prefix and itself.

The same arithmetic as `drafters.network`, which runs one block after a cache. Here the context's
keys and values are computed once per sequence and shared by all of its blocks.
"""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.drafters.dflash.network import Attention, Network, NetworkConfig
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
    context = network.hidden_norm(network.fc(features))
    masks = {
        kind: _mask(anchors, x.shape[2], features.shape[1], *kind)
        for kind in set(zip(config.layer_windows, config.layer_causal, strict=True))
    }
    for i, layer in enumerate(network.layers):
        mask = masks[config.layer_windows[i], config.layer_causal[i]]
        x = x + _attend(layer.self_attn, layer.input_layernorm(x), context, anchors, mask)
        y = layer.post_attention_layernorm(x)
        x = x + layer.mlp.down_proj(cpu_math.swiglu(layer.mlp.gate_proj(y), layer.mlp.up_proj(y)))
    return network.norm(x)  # type: ignore[no-any-return]


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


def _attend(
    attention: Attention, x: mx.array, context: mx.array, anchors: mx.array, mask: mx.array
) -> mx.array:
    """Attention of block rows x [S, A, B, d] to context [S, T, d] and to their own block."""
    (S, A, B, _), T = x.shape, context.shape[1]
    D, groups = attention.head_dim, _groups(attention)
    block_rows = x.reshape(S * A, B, -1)
    at = anchors.flatten()
    q = _rotated(attention, attention.q_norm(_heads(attention.q_proj(block_rows), D)), at)
    k = _rotated(attention, attention.k_norm(_heads(attention.k_proj(block_rows), D)), at)
    v = _heads(attention.v_proj(block_rows), D)
    context_k = _rotated(attention, attention.k_norm(_heads(attention.k_proj(context), D)), 0)
    context_v = _heads(attention.v_proj(context), D)

    q = mx.unflatten(q * D**-0.5, 1, (-1, groups)).flatten(2, 3)  # [S*A, Hkv, g*B, D]
    shared = mx.unflatten(q, 0, (S, A)).swapaxes(1, 2).flatten(2, 3)  # [S, Hkv, A*g*B, D]
    outside = mx.unflatten(shared @ context_k.swapaxes(-1, -2), 2, (A, groups, B))
    own = mx.unflatten(q @ k.swapaxes(-1, -2), 0, (S, A)).swapaxes(1, 2)
    own = mx.unflatten(own, 3, (groups, B))
    scores = mx.where(mask, mx.concatenate([outside, own], axis=-1), _HIDDEN)
    weights = cpu_math.softmax(scores)  # [S, Hkv, A, g, B, T + B]
    outside, own = weights[..., :T].flatten(2, 4), weights[..., T:].flatten(3, 4)
    from_context = mx.unflatten(outside @ context_v, 2, (A, groups, B))
    from_block = own.swapaxes(1, 2).flatten(0, 1) @ v  # [S*A, Hkv, g*B, D]
    from_block = mx.unflatten(from_block, 0, (S, A)).swapaxes(1, 2)
    out = from_context + mx.unflatten(from_block, 3, (groups, B))
    out = out.transpose(0, 2, 4, 1, 3, 5)  # [S, A, B, Hkv, g, D]
    return attention.o_proj(out.flatten(3))


def _groups(attention: Attention) -> int:
    return int(attention.q_proj.weight.shape[0] // attention.k_proj.weight.shape[0])


def _heads(x: mx.array, D: int) -> mx.array:
    return mx.unflatten(x, -1, (-1, D)).swapaxes(1, 2)


def _rotated(attention: Attention, x: mx.array, offset: mx.array | int) -> mx.array:
    return attention.rope(x, offset=offset)  # type: ignore[no-any-return]
