"""A masked diffusion drafter's network: a Llama, Qwen2 or Qwen3 that also looks ahead in its block.

Text runs causally, and its keys and values are kept. A block of the newest token and masks behind
it sees all of the text and all of itself (the layout of BD3-LM, arXiv 2503.09573). Nothing of the
target's is read but its embedding and head, where a drafter brings none itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.drafters.networks.layers import Layer
from dflash_mlx.drafters.networks.quantized import Quantization
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.sequence import SequenceCache


@dataclass(frozen=True)
class NetworkConfig:
    """Shapes of a masked diffusion drafter; names as in its config.json.

    attention_bias: of queries, keys and values, with head_norms of the output too. head_norms:
    whether queries and keys of every head are normalised. layer_windows: sliding window per layer,
    None for full attention; a window of w reaches w - 1 positions back, and as many ahead inside
    the block. logits_shifted: whether a row's logits are for the position behind it. own_embedding,
    own_head: whether it brings these itself; tied: the head is its embedding. quantization: of the
    weights in its files. notes: what reading the folder had to assume. draft_vocab_size,
    aux_layers: it has no vocabulary of its own and reads no layer of the target.
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
    head_norms: bool
    layer_windows: tuple[int | None, ...]
    block_size: int
    mask_token_id: int
    vocab_size: int
    logits_shifted: bool = False
    final_logit_softcapping: float | None = None
    own_embedding: bool = False
    own_head: bool = False
    tied: bool = False
    quantization: Quantization | None = None
    notes: tuple[str, ...] = ()
    draft_vocab_size: int | None = None
    aux_layers: tuple[int, ...] = ()


class Network(nn.Module):
    """Its parameters have the names of the tensors in a drafter folder.

    embed_tokens, lm_head: only where the config asks for them.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        d, size = config.hidden_size, config.vocab_size
        self.layers = [Layer(config, config.head_norms) for _ in config.layer_windows]
        self.norm = nn.RMSNorm(d, config.rms_norm_eps)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(size, d)
        if config.own_head and not config.tied:
            self.lm_head = nn.Linear(d, size, bias=False)

    def read(self, x: mx.array, cache: SequenceCache) -> None:
        """Commit the text with embeddings x [1, n, d]; the last layer only has to remember it."""
        x = x.astype(self.norm.weight.dtype)
        cache.begin(Block(x.shape[1]))
        *before, (last, last_cache) = zip(self.layers, cache.layers, strict=True)
        for layer, layer_cache in before:
            x = layer(x, layer_cache.make_mask(x.shape[1]), layer_cache)
        last.self_attn.remember(last.input_layernorm(x), last_cache)
        cache.commit(range(x.shape[1]))

    def __call__(self, x: mx.array, cache: SequenceCache, text: int = 0) -> mx.array:
        """Final hidden states [1, n, d] of rows with embeddings x [1, n, d], behind the cache.

        text: the leading rows are text, which is committed and sees nothing behind itself. The
        others are a block, whose keys and values are used and discarded.
        """
        x = x.astype(self.norm.weight.dtype)  # another than the target's where that one overflows
        cache.begin(Block(x.shape[1]))
        masks: dict[int | None, mx.array | None] = {}
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            window = layer_cache.window
            if window not in masks:
                masks[window] = layer_cache.block_mask(text)
            x = layer(x, masks[window], layer_cache)
        if text:
            cache.commit(range(text))
        else:
            cache.discard()
        return self.norm(x)  # type: ignore[no-any-return]
