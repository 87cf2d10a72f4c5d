"""A masked diffusion drafter: a Llama, Qwen2 or Qwen3 that also looks ahead in its block.

Text runs causally, and its keys and values are kept. A block of the newest token and masks behind
it sees all of the text and all of itself (the layout of BD3-LM, arXiv 2503.09573). Nothing of the
target's is read but its embedding and head, where a drafter brings none itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from dflash_mlx.drafters.growth.grow import Ranked
from dflash_mlx.drafters.networks.fields import cap, flag, whole
from dflash_mlx.drafters.networks.files import DraftConfig, stored
from dflash_mlx.drafters.networks.layers import DraftNetwork, Layer
from dflash_mlx.drafters.networks.model import BoundModel
from dflash_mlx.drafters.networks.tokens import TokenContext
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.sequence import SequenceCache

Embed = Callable[[mx.array], mx.array]


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(DraftConfig):
    """What the config.json of a masked diffusion drafter says.

    Biases are of queries, keys and values, with head_norms of the output too.
    """

    mask_token_id: int = stored(whole)
    head_norms: bool = stored(flag)  # of queries and keys
    logits_shifted: bool = stored(flag)  # whether a row's logits are for the position behind it
    final_logit_softcapping: float | None = stored(cap, None)
    tied: bool = stored(
        lambda raw, _: flag(raw, "own_head") and flag(raw, "tie_word_embeddings"), False
    )

    @property
    def target_width(self) -> int | None:
        return None if self.own_embedding and self.own_head else self.hidden_size

    def problems(self) -> dict[str, Any]:
        untied = self.tied and not self.own_embedding
        return {
            **super().problems(),
            **self.block_problems(self.mask_token_id),
            "tie_word_embeddings is true, but own_embedding is false": untied,
        }


class Network(DraftNetwork):
    """Its parameters have the names of the tensors in a drafter folder."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config)
        self.layers = [Layer(config, config.head_norms) for _ in config.layer_windows]

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


class TextContext(TokenContext):
    """Keys and values of committed tokens."""

    def read(self, tokens: mx.array) -> None:
        self._network.read(self._model.embed(tokens)[None], self._cache)

    def run(self, block: mx.array) -> mx.array:
        """Final states [b, d] of a block [b] behind all tokens; what waited is then committed."""
        text = self.take_waiting()
        rows = mx.concatenate([text, block])
        x = self._model.embed(rows)[None]
        return self._network(x, self._cache, text.size)[0, text.size :]  # type: ignore[no-any-return]

    def way_back(self, length: int) -> int:
        length = min(length, self._cache.length)
        if self._cache.refill_from(length) == length:
            return length
        # The first token that rows at `length` see anything of, through all layers: each window
        # reaches a little further back. A layer without one sees all tokens, and what these are in
        # it comes of the windows before it, from the first token on.
        windows = [layer.window for layer in self._cache.layers]
        return 0 if None in windows else max(0, length - sum(windows) + len(windows))


class MaskedModel(BoundModel[TextContext]):
    """A masked diffusion network bound to its target.

    Blocks [b] begin with the anchor; places are positions in them, from 1 on.
    """

    family = "specdiff"
    context = TextContext

    def own_head(self, network: Any) -> Embed:
        return network.embed_tokens.as_linear if self.config.tied else super().own_head(network)

    @property
    def mask(self) -> int:
        return self.config.mask_token_id  # type: ignore[no-any-return]

    def tried(self, context: TextContext) -> mx.array:
        masks = mx.full(self.block_size, self.mask, mx.int32)
        return self.logits(context, masks, range(1, self.block_size))

    def logits(self, context: TextContext, block: mx.array, places: Sequence[int]) -> mx.array:
        """[n, V] of n places in a block [b]; -inf for tokens that are never drafted."""
        return self.head.whole(self._states(context, block, places), context.words)

    def ranked(
        self, context: TextContext, block: mx.array, places: Sequence[int], k: int
    ) -> Ranked:
        """The k likeliest tokens of n places in a block [b]; waits for the pass."""
        return self.head.ranked(self._states(context, block, places), context.words, k)

    def _states(self, context: TextContext, block: mx.array, places: Sequence[int]) -> mx.array:
        """[n, d] what logits of these places are computed from."""
        rows = [place - self.config.logits_shifted for place in places]
        states = context.run(block)[mx.array(rows)]
        if self.config.own_head:
            return states
        return states.astype(self.target.dtype)  # the head's, where the network has another
