"""The DFlash drafter network (arXiv 2602.06036, section 3), also of DFlash 2 and of DSpark.

A few decoder layers whose queries come from the block only. The target's features enter every
layer as extra keys and values and never pass through the residual stream. Embedding and output
head are the target's, except in drafters that bring their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.drafters.dflash.convolution import ConvolutionConfig, DynamicConvolution
from dflash_mlx.drafters.dflash.markov import (
    ConfidenceHead,
    MarkovConfig,
    MarkovHead,
    MarkovLinks,
)
from dflash_mlx.drafters.dflash.paths import Links
from dflash_mlx.drafters.dflash.selector import CandidateSelector, SelectorConfig
from dflash_mlx.drafters.networks.layers import Layer
from dflash_mlx.drafters.networks.quantized import Quantization
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.sequence import Forest, SequenceCache


@dataclass(frozen=True)
class NetworkConfig:
    """Shapes of a DFlash drafter; names as in its config.json.

    layer_windows: sliding window per layer, None for full attention; a window of w reaches w - 1
    positions back, and as many ahead inside the block. layer_causal: whether the layer's block
    rows see only rows before them. target_layer_ids: target layers (0-based) whose outputs are the
    features. num_target_layers: None where the folder does not say. The scales and the cap are 1, 1
    and None in most drafters.

    block_size: the anchor and the tokens that it drafts. sample_from_anchor: whether each row
    drafts the token behind it, so that the network's block has a row less; else masks draft their
    own. draft_vocab_size: tokens that its own head knows, None for all of the target's.
    own_embedding, own_head: whether it brings these itself. convolution, selector: of DFlash 2.
    markov: of DSpark. quantization: of the weights in its files. notes: what reading the folder had
    to assume.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict[str, Any]
    max_position_embeddings: int
    layer_windows: tuple[int | None, ...]
    layer_causal: tuple[bool, ...]
    attention_bias: bool
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    vocab_size: int
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    convolution: ConvolutionConfig | None = None
    selector: SelectorConfig | None = None
    sample_from_anchor: bool = False
    markov: MarkovConfig | None = None
    quantization: Quantization | None = None
    notes: tuple[str, ...] = ()

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """`target_layer_ids`, by the name that all families have for it."""
        return self.target_layer_ids


class ConvolvedLayer(Layer):
    """DFlash 2's layer: both sub-layers between two convolutions over the block's rows.

    The context's rows are not convolved: they enter as keys and values only.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config)
        assert config.convolution is not None
        self.attention_conv = DynamicConvolution(config.hidden_size, config.convolution)
        self.mlp_conv = DynamicConvolution(config.hidden_size, config.convolution)

    def __call__(self, x: mx.array, mask: mx.array | str | None, cache: LayerCache) -> mx.array:
        """[1, n, d] -> [1, n, d]."""
        branches = cache.block.branches
        inner, after = self.attention_conv.before(self.input_layernorm(x), branches)
        x = x + self.attention_conv.after(self.self_attn(inner, mask, cache), after, branches)
        inner, after = self.mlp_conv.before(self.post_attention_layernorm(x), branches)
        return x + self.mlp_conv.after(self.mlp(inner), after, branches)


class Network(nn.Module):
    """c = RMSNorm(W_fc [h_1; ...; h_m]) feeds keys and values of every layer.

    Its parameters have the names of the tensors in a drafter folder. embed_tokens, lm_head, d2t
    (what to add to a draft id for the target's), candidate_selector, markov_head, confidence_head:
    only where the config asks for them.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * d, d, bias=False)
        self.hidden_norm = nn.RMSNorm(d, config.rms_norm_eps)
        layer = Layer if config.convolution is None else ConvolvedLayer
        self.layers = [layer(config) for _ in config.layer_windows]
        self.norm = nn.RMSNorm(d, config.rms_norm_eps)
        self._causal = config.layer_causal
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, d)
        if config.own_head:
            self.lm_head = nn.Linear(d, config.draft_vocab_size or config.vocab_size, bias=False)
        if config.draft_vocab_size is not None:
            self.d2t = mx.zeros(config.draft_vocab_size, mx.int64)
        if config.selector is not None:
            self.candidate_selector = CandidateSelector(config.vocab_size, d, config.selector)
        if (markov := config.markov) is not None:
            drafted = config.draft_vocab_size or config.vocab_size
            self.markov_head = MarkovHead(config.vocab_size, drafted, markov)
            if markov.confidence:
                self.confidence_head = ConfidenceHead(d, markov)

    @property
    def links(self) -> Links | None:
        """What knows the token before each position, None where nothing does."""
        if "markov_head" in self:
            return MarkovLinks(self.markov_head, self.get("confidence_head"), self.get("d2t"))
        return self.get("candidate_selector")

    def drop_idle_convolutions(self, config: NetworkConfig) -> None:
        """Leave out convolutions that change nothing; see `train/selector.py`."""
        for i, layer in enumerate(self.layers):
            idle = isinstance(layer, ConvolvedLayer) and layer.attention_conv.is_identity
            if idle and layer.mlp_conv.is_identity:
                self.layers[i] = plain = Layer(config)
                for name in plain.children():
                    plain[name] = layer[name]

    def append(self, features: mx.array, cache: SequenceCache) -> None:
        """Commit the context rows of `features` [n, m*d] to `cache`."""
        rows = self.hidden_norm(self.fc(features[None].astype(self.norm.weight.dtype)))
        cache.begin(Block(features.shape[0]))
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            layer.self_attn.remember(rows, layer_cache)
        cache.commit(range(features.shape[0]))

    def __call__(self, x: mx.array, blocks: Sequence[tuple[SequenceCache, Block]]) -> mx.array:
        """Final hidden states [1, n, d] of the blocks of one sequence, or of several sequences.

        x: [1, n, d], the embeddings of all rows. The branches of a block all begin behind what its
        cache holds, share it, and do not see each other. The blocks' keys and values are used and
        discarded.
        """
        x = x.astype(self.norm.weight.dtype)  # another than the target's where that one overflows
        if len(blocks) > 1:
            layers = Forest(blocks).layers
        else:
            ((cache, block),) = blocks
            cache.begin(block)
            layers = cache.layers
        masks: dict[tuple[bool, int | None], mx.array | str | None] = {}
        rows = x.shape[1]
        for layer, causal, layer_cache in zip(self.layers, self._causal, layers, strict=True):
            kind = causal, layer_cache.window
            if kind not in masks:
                masks[kind] = layer_cache.make_mask(rows) if causal else layer_cache.block_mask()
            x = layer(x, masks[kind], layer_cache)
        for cache, _ in blocks:
            cache.discard()
        return self.norm(x)  # type: ignore[no-any-return]

    @property
    def joins(self) -> bool:
        """Whether it takes blocks of several sequences: convolutions run along one."""
        return not any(isinstance(layer, ConvolvedLayer) for layer in self.layers)
