"""The DFlash drafter network (arXiv 2602.06036, section 3), also of DFlash 2, DSpark and Domino.

A few decoder layers whose queries come from the block only. The target's features enter every
layer as extra keys and values and never pass through the residual stream. Embedding and output
head are the target's, except in drafters that bring their own.

DFlash 2 convolves the rows of a block: out[t, c] = sum_j (base[j, c] + delta[t, j, group(c)])
x[t - j, c], with zeros before a block's first row. Two convolutions stand around each sub-layer.
Both deltas are one projection of what goes into the first: [before | after], in each tap by tap, in
each tap group by group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.drafters.dflash.domino import DominoLinks, PrefixGRU, correction
from dflash_mlx.drafters.dflash.paths import (
    CandidateSelector,
    ConfidenceHead,
    MarkovHead,
    MarkovLinks,
)
from dflash_mlx.drafters.networks.fields import cap, factor, flag, listed, size_or_none, whole
from dflash_mlx.drafters.networks.files import DraftConfig, stored, too_large
from dflash_mlx.drafters.networks.layers import DraftNetwork, GemmaAttention, GemmaLayer, Layer
from dflash_mlx.verifier.block import Block, Forest
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.sequence import SequenceCache

Links = CandidateSelector | MarkovLinks | DominoLinks


class DynamicConvolution(nn.Module):
    """The convolutions before and after a sub-layer of width d.

    base_kernel: [2, taps, d], before and after. kernel_projection: d -> 2 * taps * groups.
    """

    def __init__(self, d: int, taps: int, group: int) -> None:
        super().__init__()
        self._kernel = 2, taps, d // group
        self.base_kernel = mx.zeros((2, taps, d))
        self.kernel_projection = nn.Linear(d, 2 * taps * self._kernel[2], bias=False)

    @property
    def is_identity(self) -> bool:
        """Whether what comes out is what goes in, whatever that is."""
        now, earlier = self.base_kernel[:, 0], self.base_kernel[:, 1:]
        if (mx.any(now != 1) | mx.any(earlier != 0)).item():
            return False
        deltas = self.kernel_projection(mx.eye(self.base_kernel.shape[-1]))  # packed or not
        return not mx.any(deltas != 0).item()

    def before(self, x: mx.array, branches: int) -> tuple[mx.array, mx.array]:
        """The sub-layer's input from x [1, n, d], and the deltas of the convolution after it.

        branches: how many blocks of n / branches rows x holds, side by side.
        """
        deltas = mx.unflatten(self.kernel_projection(x), -1, self._kernel)
        first, second = deltas[..., 0, :, :], deltas[..., 1, :, :]
        return convolve(x, first, self.base_kernel[0], branches), second

    def after(self, x: mx.array, deltas: mx.array, branches: int) -> mx.array:
        return convolve(x, deltas, self.base_kernel[1], branches)


def convolve(x: mx.array, deltas: mx.array, base: mx.array, branches: int = 1) -> mx.array:
    """The sum above of x [1, n, d], deltas [1, n, taps, groups] and base [taps, d]."""
    taps, groups = deltas.shape[-2:]
    channels = (groups, x.shape[-1] // groups)
    blocks = mx.unflatten(mx.unflatten(x, -1, channels), 1, (branches, -1))
    deltas = mx.unflatten(deltas, 1, (branches, -1))[..., None]
    kernel = mx.unflatten(base, -1, channels).astype(x.dtype)
    rows = blocks.shape[2]
    out = mx.zeros_like(blocks)
    for j in range(min(taps, rows)):
        shifted = mx.pad(blocks[:, :, : rows - j], [(0, 0), (0, 0), (j, 0), (0, 0), (0, 0)])
        out = out + (kernel[j] + deltas[:, :, :, j]) * shifted
    return out.reshape(x.shape)


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(DraftConfig):
    """What the config.json of a DFlash drafter says."""

    layer_causal: tuple[bool, ...]  # per layer, whether block rows see only rows before them
    mask_token_id: int = stored(whole)
    aux_layers: tuple[int, ...] = stored(
        lambda raw, _: listed(raw["target_layer_ids"], "target_layer_ids", int)
    )
    num_target_layers: int | None = stored(size_or_none, None)
    draft_vocab_size: int | None = stored(size_or_none, None)
    input_embedding_scale: float = stored(factor, 1.0)
    output_multiplier: float = stored(factor, 1.0)
    final_logit_softcapping: float | None = stored(cap, None)
    # Whether each row drafts the token behind it, so that the network's block has a row less; else
    # masks draft their own tokens.
    sample_from_anchor: bool = stored(flag, False)
    offset_norms: bool = stored(flag, False)  # whether files have w for norms that scale by 1 + w
    gemma_layers: bool = stored(flag, False)  # else Qwen3's or Qwen3.5's
    attention_k_eq_v: bool = stored(flag, False)  # of Gemma's: values are the keys' projection
    # Of DFlash 2; where it is of another kind, 0 taps, 0 tokens and so on
    conv_kernel_size: int = 0  # taps
    conv_group_size: int = 1  # neighbouring channels that share a delta
    selector_rank: int = 0  # of the codebooks
    selector_top_k: int = 0  # tokens that a position offers
    selector_vocab_size: int | None = None  # tokens that it may offer, the first ones; None for all
    # Of DSpark
    markov_rank: int = 0
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False  # whether that head knows the token before
    # Of Domino
    emb_dim: int = 0  # between W_1 and W_2
    gru_hidden_dim: int = 0
    pure_draft_prefix_len: int = 0  # positions that stay as they are

    def problems(self) -> dict[str, Any]:
        width, own, vocabulary = self.hidden_size, self.draft_vocab_size, self.vocab_size
        taps, group, top_k = self.conv_kernel_size, self.conv_group_size, self.selector_top_k
        state, pure = self.gru_hidden_dim, self.pure_draft_prefix_len
        read, offered = self.aux_layers, self.selector_vocab_size
        drafts = max(0, self.block_size - 1)
        layers = self.num_target_layers or max(*read, 0, 0) + 1
        groups = max(1, width // group)
        products = {
            f"{len(read)} tapped layers of hidden_size {width}": len(read) * width,
            f"two convolutions of conv_kernel_size {taps} over {groups} groups": 2 * taps * groups,
            f"three gates of gru_hidden_dim {state}": 3 * state,
            f"hidden_size {width} and gru_hidden_dim {state}": width + state,
        }
        return {
            **super().problems(),
            **self.block_problems(self.mask_token_id, extra=int(self.sample_from_anchor)),
            f"target_layer_ids are {list(read)}, outside the {layers} layers of the target":
                not read or not all(0 <= layer < layers for layer in read),
            f"draft_vocab_size is {own}, not less than the vocabulary of {vocabulary}":
                own is not None and own >= vocabulary,
            f"draft_vocab_size is {own}, but own_head is false":
                own is not None and not self.own_head,
            f"draft_vocab_size is {own}, but the selector needs the vocabulary of {vocabulary}":
                own is not None and self.selector_rank,
            f"draft_vocab_size is {own}, but Domino's head needs the vocabulary of {vocabulary}":
                own is not None and state,
            f"pure_draft_prefix_len is {pure}, more than the {drafts} drafts of a block":
                pure > drafts,
            f"hidden_size {width} does not divide by conv_group_size {group}": width % group,
            f"conv_kernel_size is {taps}, more than the block_size {self.block_size}":
                taps > self.block_size,
            f"selector_top_k is {top_k}, more than the vocabulary of {vocabulary}":
                top_k > vocabulary,
            f"selector_vocab_size is {offered}, not from {top_k} to the vocabulary of {vocabulary}":
                offered is not None and not top_k <= offered <= vocabulary,
            **too_large(products),
        }  # fmt: skip


class ConvolvedLayer(Layer):
    """DFlash 2's layer: both sub-layers between two convolutions over the block's rows.

    The context's rows are not convolved: they enter as keys and values only.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config)
        sizes = config.hidden_size, config.conv_kernel_size, config.conv_group_size
        self.attention_conv, self.mlp_conv = DynamicConvolution(*sizes), DynamicConvolution(*sizes)

    def __call__(self, x: mx.array, mask: mx.array | str | None, cache: LayerCache) -> mx.array:
        """[1, n, d] -> [1, n, d]."""
        branches = cache.block.branches
        inner, after = self.attention_conv.before(self.input_layernorm(x), branches)
        x = x + self.attention_conv.after(self.self_attn(inner, mask, cache), after, branches)
        inner, after = self.mlp_conv.before(self.post_attention_layernorm(x), branches)
        return x + self.mlp_conv.after(self.mlp(inner), after, branches)


def _layer(config: NetworkConfig) -> nn.Module:
    if config.gemma_layers:
        return GemmaLayer(config, GemmaAttention(config, config.attention_k_eq_v))
    return ConvolvedLayer(config) if config.conv_kernel_size else Layer(config)


class Network(DraftNetwork):
    """c = RMSNorm(W_fc [h_1; ...; h_m]) feeds keys and values of every layer.

    Its parameters have the names of the tensors in a drafter folder.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config)
        d = config.hidden_size
        self.fc = nn.Linear(len(config.aux_layers) * d, d, bias=False)
        self.hidden_norm = nn.RMSNorm(d, config.rms_norm_eps)
        self.layers = [_layer(config) for _ in config.layer_windows]
        self._causal = config.layer_causal
        if config.selector_rank:
            codebooks = config.vocab_size, d, config.selector_rank
            offers = config.selector_top_k, config.selector_vocab_size
            self.candidate_selector = CandidateSelector(*codebooks, *offers)
        if rank := config.markov_rank:
            self.markov_head = MarkovHead(config.vocab_size, config.drafted, rank)
            if config.enable_confidence_head:
                known = rank * config.confidence_head_with_markov
                self.confidence_head = ConfidenceHead(d + known)
        if state := config.gru_hidden_dim:
            self.prefix_gru = PrefixGRU(d, state)
            self.embed_proj = correction(d + state, config.emb_dim, config.vocab_size)
            self._pure = config.pure_draft_prefix_len

    def links(self, embed: Callable[[mx.array], mx.array]) -> Links | None:
        """What knows the token before each position, None where nothing does.

        embed: tokens [...] to [..., d].
        """
        if "prefix_gru" in self:
            return DominoLinks(self.prefix_gru, self.embed_proj, self._pure, embed)
        if "markov_head" in self:
            return MarkovLinks(self.markov_head, self.get("confidence_head"), self.get("d2t"))
        return self.get("candidate_selector")

    def add_one_to_norms(self) -> None:
        """Store norms as they scale, where files have them as offsets from 1."""
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.weight = module.weight + 1

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
