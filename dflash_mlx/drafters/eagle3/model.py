"""An EAGLE-3 network bound to its target: what it remembers, and a draft in the making."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.growth.grow import Ranked
from dflash_mlx.drafters.networks.context import DraftContext
from dflash_mlx.drafters.networks.model import BoundModel
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.saved import Saved, join, split

FAMILY = "eagle3"


class EagleContext(DraftContext):
    """Rows 0 to L - 2 of a sequence of L committed tokens; row L - 1 waits for the token behind it.

    The states h of all rows are kept as well, a few percent of what the target keeps: wherever the
    sequence is cut, the last row left has to wait again, and its features are gone.
    """

    def __init__(self, embed: Callable[[mx.array], mx.array], *parts: Any) -> None:
        super().__init__(*parts)
        self._embed = embed  # tokens [n] to [n, d]
        self._states: list[mx.array] = []  # h of consecutive tokens, [n, d] each

    @property
    def last(self) -> mx.array:
        """H of the last committed token, [1, d]."""
        _ = self.cache
        return self._states[-1][-1:]

    @property
    def length(self) -> int:
        return sum(map(len, self._states)) + self._rows

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.cache.arrays, *self._states]

    def refill_from(self, length: int) -> int:
        return super().refill_from(length - 1) + 1 if length else 0

    def trim(self, length: int) -> None:
        super().trim(max(length - 1, 0))
        pieces, self._states = self._states, []
        for piece in pieces:
            if length > 0:
                self._states.append(piece[:length])
            length -= len(piece)

    def fork(self) -> EagleContext:
        other = super().fork()
        other._states = list(self._states)
        return other

    def saved(self) -> Saved:
        return join([super().saved(), (list(self._states), None)])

    def restore(self, saved: Saved, tokens: mx.array) -> None:
        cache, (self._states, _) = split(saved)
        super().restore(cache, tokens)

    def take_in(self, tokens: mx.array, features: mx.array) -> None:
        states = self._network.fuse(features)
        if self._states:
            rows = mx.concatenate([self._states[-1][-1:], states[:-1]])
        else:
            rows, tokens = states[:-1], tokens[1:]
        if len(rows):
            self._network.append(self._embed(tokens), rows, self._cache)
        self._states.append(states)
        while len(self._states) > 1 and len(self._states[-2]) <= len(self._states[-1]):
            self._states[-2:] = [mx.concatenate(self._states[-2:])]  # so that few arrays are many


class EagleModel(BoundModel[EagleContext]):
    """An EAGLE-3 network bound to its target."""

    family = FAMILY
    scales_embeddings = False  # the norm behind them undoes any scale

    def context(self, *parts: Any) -> EagleContext:
        return EagleContext(self._table, *parts)

    def tried(self, context: EagleContext) -> mx.array:
        return self.begin(context).logits(mx.zeros(1, mx.int32), [-1])

    def begin(self, context: EagleContext) -> Draft:
        return Draft(self, context)


class Draft:
    """Rows of one draft: each sees the context, the rows that it continues, and itself.

    The methods pass the next n rows: their tokens [n], and for each the number of the row that it
    continues. Row 0 is the anchor's and continues none, -1. Keys and values of earlier rows stay
    behind the context's until the next draft.
    """

    def __init__(self, model: EagleModel, context: EagleContext) -> None:
        self._network, self._embed, self._head = model.module, model._table, model._head
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
        logits_of: mx.array = final[0].astype(x.dtype)  # the head's, where the network has another
        return logits_of
