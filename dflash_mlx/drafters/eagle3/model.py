"""An EAGLE-3 network bound to its target, and a draft in the making."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.eagle3.context import EagleContext
from dflash_mlx.drafters.eagle3.network import EagleConfig, Network
from dflash_mlx.drafters.formats import aux_layers_of
from dflash_mlx.drafters.growth.grow import Array, Ranked
from dflash_mlx.drafters.networks.head import DraftHead
from dflash_mlx.engine.state import Context
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import SequenceCache

FAMILY = "eagle3"


class EagleModel:
    """An EAGLE-3 network with an embedding and a head: its own, or those of its target.

    Logits are always over the target's vocabulary, and so are ranked tokens. Embeddings are taken
    as they are stored: the norm behind them undoes any scale. Raises DFlashError for a target whose
    embedding cannot be found.
    """

    family = FAMILY

    def __init__(self, network: Network, config: EagleConfig, target: Target) -> None:
        self.config, self.module, self.kernels = config, network, target.kernels
        self.aux_layers = aux_layers_of(config, target.num_layers)
        self._kv_bits = target.kv_bits
        self._embed: Any = network.embed_tokens if config.own_embedding else target.embedding()
        self._head = DraftHead(
            network.lm_head if config.own_head else target.head(),
            config.vocab_size,
            target.kernels,
            network.d2t if config.draft_vocab_size is not None else None,
        )
        target.tap(self.aux_layers)

    @property
    def block_size(self) -> int:
        """Rows of its drafts, the anchor included."""
        return self.config.block_size

    def new_context(self) -> EagleContext:
        """An empty context for one sequence."""
        cache = SequenceCache([LayerCache(self.config.window, self.kernels, self._kv_bits)])
        return EagleContext(self.module, self._embed, cache, self._head.new_active())

    def limit_vocabulary(self, target: Target, tokens: Array, size: int) -> None:
        """Draft only `size` tokens, and those that a conversation has; not with a head of its own.

        tokens: [V] all of them, the likeliest first.
        """
        if not self.config.own_head:
            self._head.limit(target, tokens, size)

    def try_out(self, context: Context) -> mx.array:
        """Logits behind an anchor; tokens outside a draft vocabulary have 0."""
        assert isinstance(context, EagleContext)
        logits = self.begin(context).logits(mx.zeros(1, mx.int32), [-1])
        return logits if self._head.is_whole else mx.where(logits == -mx.inf, 0, logits)

    def begin(self, context: EagleContext) -> Draft:
        """A draft behind the context, with no row yet."""
        return Draft(self.module, self._embed, self._head, context)


class Draft:
    """Rows of one draft: each sees the context, the rows that it continues, and itself.

    The methods pass the next n rows: their tokens [n], and for each the number of the row that it
    continues. Row 0 is the anchor's and continues none, -1. Keys and values of earlier rows stay
    behind the context's until the next draft.
    """

    def __init__(
        self,
        network: Network,
        embed: Callable[[mx.array], mx.array],
        head: DraftHead,
        context: EagleContext,
    ) -> None:
        self._network, self._embed, self._head = network, embed, head
        self._cache, self._words = context.cache, context.words
        self._states = context.last  # [1 + N, d]: h of the last committed token, then of all rows
        self._parents: list[int] = []

    def logits(self, tokens: mx.array, parents: list[int]) -> mx.array:
        """[n, V] for what follows each row."""
        return self._head.whole(self._pass(tokens, parents), self._words)

    def likeliest(self, tokens: mx.array, parents: list[int]) -> mx.array:
        """[n] the likeliest token after each row; the pass may still be running."""
        return self._head.likeliest(self._pass(tokens, parents), self._words)

    def ranked(self, tokens: mx.array, parents: list[int], k: int) -> Ranked:
        """The k likeliest tokens after each row; waits for the pass."""
        return self._head.ranked(self._pass(tokens, parents), self._words, k)

    def _pass(self, tokens: mx.array, parents: list[int]) -> mx.array:
        """Final states [n, d]."""
        before = len(self._parents)
        self._parents += parents
        tree = Tree((0,) * (len(self._parents) - 1), tuple(self._parents))
        self._cache.begin(Block.of(tree, before))
        layer: LayerCache = self._cache.layers[0]
        x, h = self._embed(tokens), self._states[mx.array(parents) + 1]
        mask = layer.make_mask(len(parents))
        final, states = self._network(x[None], h[None], mask, layer)
        self._cache.discard()
        self._states = mx.concatenate([self._states, states[0]])
        return final[0].astype(x.dtype)  # the head's, where the network computes in another
