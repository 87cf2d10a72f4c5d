"""The EAGLE-3 network (arXiv 2503.01840, section 3): one decoder layer over pairs of inputs.

Row i pairs the token x_{i+1} with h_i, what is known of the target at position i, and tells what
x_{i+2} is. For committed tokens h_i is made of the target's features; a drafted token has none, so
there h is the layer's own output of the row before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.drafters.networks.layers import MLP, Attention
from dflash_mlx.drafters.networks.quantized import Quantization
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.sequence import SequenceCache

USUAL_TAPS = 3


@dataclass(frozen=True)
class EagleConfig:
    """Shapes of an EAGLE-3 drafter; names as in its config.json.

    target_hidden_size: width of the features. target_layer_ids: target layers (0-based) whose
    outputs they are, None for `formats.usual_taps`. num_target_layers: None where the folder does
    not say. window: how many rows a row sees, itself included, None for all.

    head_norms: whether queries and keys are normalised, as in Qwen3. norm_before_residual: whether
    the layer adds to the normed h, and not to h. norm_before_fc, fc_norm: whether features are
    normed, all at once or layer by layer. norm_output: whether a drafted row's h is normed, too
    (EAGLE-3.1). draft_vocab_size: tokens that its own head knows, None for all of the target's.
    own_embedding, own_head: whether it brings these itself. notes: what reading had to assume.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict[str, Any]
    max_position_embeddings: int
    attention_bias: bool
    block_size: int
    target_hidden_size: int
    target_layer_ids: tuple[int, ...] | None
    num_target_layers: int | None
    vocab_size: int
    window: int | None = None
    head_norms: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    quantization: Quantization | None = None
    notes: tuple[str, ...] = ()

    @property
    def aux_layers(self) -> tuple[int, ...] | None:
        """`target_layer_ids`, by the name that all families have for it."""
        return self.target_layer_ids

    @property
    def features(self) -> int:
        """Layers that it reads."""
        return USUAL_TAPS if self.target_layer_ids is None else len(self.target_layer_ids)


class Layer(nn.Module):
    """Pre-norm decoder layer whose queries, keys and values see two inputs side by side."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, 2 * d, config.head_norms)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(d, eps)
        self.hidden_norm = nn.RMSNorm(d, eps)
        self.post_attention_layernorm = nn.RMSNorm(d, eps)
        self._norm_before_residual = config.norm_before_residual

    def pair(self, x: mx.array, h: mx.array) -> mx.array:
        """[..., 2d], what attention sees of rows."""
        return mx.concatenate([self.input_layernorm(x), self.hidden_norm(h)], axis=-1)

    def __call__(
        self, x: mx.array, h: mx.array, mask: mx.array | str | None, cache: LayerCache
    ) -> mx.array:
        """[1, n, d] from rows with the embeddings x and the states h, [1, n, d] each."""
        residual = self.hidden_norm(h) if self._norm_before_residual else h
        y = residual + self.self_attn(self.pair(x, h), mask, cache)
        return y + self.mlp(self.post_attention_layernorm(y))


class Network(nn.Module):
    """Its parameters have the names of the tensors in a raw folder.

    embed_tokens, lm_head, d2t (what to add to a draft id for the target's), input_norm and fc_norm:
    only where the config asks for them.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        d, width, eps = config.hidden_size, config.target_hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.features * width, d, bias=False)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(d, eps)
        self._norm_output = config.norm_output
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.features * width, eps)
        if config.fc_norm:
            self.fc_norm = [nn.RMSNorm(width, eps) for _ in range(config.features)]
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, d)
        if config.own_head:
            self.lm_head = nn.Linear(d, config.draft_vocab_size or config.vocab_size, bias=False)
        if config.draft_vocab_size is not None:
            self.d2t = mx.zeros(config.draft_vocab_size, mx.int64)

    def fuse(self, features: mx.array) -> mx.array:
        """States h [..., d] from the target's features [..., m*D]."""
        features = features.astype(self.norm.weight.dtype)
        if "input_norm" in self:
            features = self.input_norm(features)
        if "fc_norm" in self:
            parts = mx.split(features, len(self.fc_norm), axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = mx.concatenate(normed, axis=-1)
        return self.fc(features)

    def append(self, x: mx.array, h: mx.array, cache: SequenceCache) -> None:
        """Commit the rows with embeddings x and states h, [n, d] each, to `cache`.

        Nobody asks what a committed row says of the next token: its keys and values are enough.
        """
        cache.begin(Block(len(h)))
        rows = self.midlayer.pair(x.astype(h.dtype)[None], h[None])
        self.midlayer.self_attn.remember(rows, cache.layers[0])
        cache.commit(range(len(h)))

    def __call__(
        self, x: mx.array, h: mx.array, mask: mx.array | str | None, cache: LayerCache
    ) -> tuple[mx.array, mx.array]:
        """Final states of rows, and their h for the rows behind them; all [..., n, d]."""
        out = self.midlayer(x.astype(h.dtype), h, mask, cache)
        final = self.norm(out)
        return final, final if self._norm_output else out
