"""The layers of an assistant, and its two heads, as Google's transformers module has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.core.config import MOST_ROWS
from dflash_mlx.drafters.growth.grow import Ranked
from dflash_mlx.drafters.networks.fields import FULL
from dflash_mlx.drafters.networks.files import DraftConfig, too_large
from dflash_mlx.drafters.networks.layers import GemmaLayer
from dflash_mlx.drafters.networks.model import ActiveVocabulary, DraftHead
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.routing import Kernels


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(DraftConfig):
    """The config.json of an assistant; the network's part is its `text_config`.

    `head_dim` and `num_key_value_heads` are those of sliding layers; `rope` is by kind of layer.
    """

    backbone_hidden_size: int  # the target's
    layer_types: tuple[str, ...]
    full_head_dim: int
    full_kv_heads: int
    centroids: int | None  # of the ordered head, None for the embedding as a head
    chosen: int  # centroids whose tokens are scored

    @property
    def target_width(self) -> int:
        return self.backbone_hidden_size

    def layers_read(self, layers: int) -> tuple[int, ...]:
        return (layers - 1,)

    def heads(self, kind: str) -> tuple[int, int]:
        """The width of a head, and how many have keys, in layers of this kind."""
        if kind == FULL:
            return self.full_head_dim, self.full_kv_heads
        return self.head_dim, self.num_key_value_heads

    def problems(self) -> dict[str, Any]:
        heads, full, width = self.num_attention_heads, self.full_kv_heads, self.full_head_dim
        vocabulary, centroids = self.vocab_size, self.centroids or 1
        shortest = min((window for window in self.layer_windows if window is not None), default=2)
        divided = f"{heads} attention heads do not divide by {full} heads of full attention"
        return {
            **super().problems(),
            **self.block_problems(most=MOST_ROWS),
            divided: heads % full,
            f"sliding_window is {shortest}, so that nothing is seen": shortest < 2,
            f"num_centroids is {centroids}, which {vocabulary} tokens do not divide by":
                vocabulary % centroids,
            f"centroid_intermediate_top_k is {self.chosen} of {centroids} centroids":
                self.centroids is not None and self.chosen > centroids,
            **too_large({
                f"{heads} attention heads of {width}": heads * width,
                f"two inputs of backbone_hidden_size {self.backbone_hidden_size}":
                    2 * self.backbone_hidden_size,
            }),
        }  # fmt: skip


class Seen(NamedTuple):
    """What a layer attends to: keys and values [1, heads, n, D] of the target's committed tokens.

    Rows of a draft are all at the position of its anchor, and do not see each other.
    """

    layer: LayerCache  # the target's that these are from
    keys: mx.array
    values: mx.array
    position: int


class Attention(nn.Module):
    """Attention without keys and values of its own, whose products are not scaled."""

    def __init__(self, config: AssistantConfig, kind: str) -> None:
        from mlx_lm.models.rope_utils import initialize_rope  # takes a second

        super().__init__()
        d, (dim, _), rope = config.hidden_size, config.heads(kind), config.rope[kind]
        self._dim, wide = dim, config.num_attention_heads * dim
        self.q_proj = nn.Linear(d, wide, bias=config.attention_bias)
        self.o_proj = nn.Linear(wide, d, bias=config.attention_bias)
        self.q_norm = nn.RMSNorm(dim, config.rms_norm_eps)
        longest = config.max_position_embeddings
        self.rope = initialize_rope(dim, rope["rope_theta"], False, rope, longest)

    def __call__(self, x: mx.array, seen: Seen) -> mx.array:
        """[n, d] -> [n, d]."""
        queries = self.q_norm(mx.unflatten(self.q_proj(x), -1, (-1, 1, self._dim)))
        queries = self.rope(queries, offset=seen.position)  # [n, H, 1, D]: each row by itself
        out = seen.layer.attend(queries.swapaxes(0, 2), seen.keys, seen.values, scale=1.0)
        return self.o_proj(out[0].swapaxes(0, 1).flatten(1))


class Decoder(nn.Module):
    """The layers, their last norm, and the embedding, which is a head here and nothing else."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [GemmaLayer(config, Attention(config, kind)) for kind in config.layer_types]
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Ordering(nn.Module):
    """Centroids, and the tokens of each, one centroid's after the other's."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.centroids = nn.Linear(config.hidden_size, config.centroids or 1, bias=False)
        self.token_ordering = mx.arange(config.vocab_size, dtype=mx.int64)


class Network(nn.Module):
    """Its parameters have the names of the tensors in Google's files."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        d, width = config.hidden_size, config.backbone_hidden_size
        self.model = Decoder(config)
        self.pre_projection = nn.Linear(2 * width, d, bias=False)
        self.post_projection = nn.Linear(d, width, bias=False)
        if config.centroids is not None:
            self.masked_embedding = Ordering(config)

    def __call__(self, x: mx.array, h: mx.array, seen: Sequence[Seen]) -> tuple[mx.array, mx.array]:
        """Final states [n, d] of rows, and their h [n, D] for the rows behind them.

        x, h: [n, D] embeddings, and states behind the target's last norm. seen: by each layer.
        """
        out = self.pre_projection(mx.concatenate([x, h], axis=-1))
        for layer, each in zip(self.model.layers, seen, strict=True):
            out = layer(out, each)
        final = self.model.norm(out)
        return final, self.post_projection(final)


class OrderedHead(DraftHead):
    """Logits of the tokens of the likeliest centroids alone; each row has other ones."""

    def __init__(self, network: Network, config: AssistantConfig, kernels: Kernels) -> None:
        embedding = network.model.embed_tokens
        super().__init__(embedding.as_linear, config.vocab_size, kernels)
        self._embed, self._chosen = embedding, config.chosen
        self._ordering = network.masked_embedding

    def scored(self, states: mx.array) -> tuple[mx.array, mx.array]:
        """[n, v] from final states [n, d], and the tokens [n, v] that they are for."""
        near = self._ordering.centroids(states)
        best = mx.argpartition(-near, self._chosen - 1, axis=-1)[:, : self._chosen]
        by_centroid = self._ordering.token_ordering.reshape(near.shape[-1], -1)
        tokens = by_centroid[best].flatten(1)
        return (self._embed(tokens) @ states[..., None])[..., 0], tokens

    def whole(self, states: mx.array, words: ActiveVocabulary | None) -> mx.array:
        logits, tokens = self.scored(states)
        whole = mx.full((len(states), self._vocabulary), -mx.inf, dtype=logits.dtype)
        return mx.put_along_axis(whole, tokens, logits, axis=-1)

    def likeliest(self, states: mx.array, words: ActiveVocabulary | None) -> mx.array:
        logits, tokens = self.scored(states)
        best = mx.argmax(logits, axis=-1, keepdims=True)
        return mx.take_along_axis(tokens, best, axis=-1)[:, 0]

    def ranked(self, states: mx.array, words: ActiveVocabulary | None, k: int) -> Ranked:
        logits, tokens = self.scored(states)
        ranked = self.rank(logits, None, k)
        found = mx.take_along_axis(tokens, mx.array(ranked.tokens), axis=-1)
        return replace(ranked, tokens=np.array(found))
