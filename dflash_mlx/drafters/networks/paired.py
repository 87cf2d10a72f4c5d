"""Draft networks whose rows pair a token with a state of the target at the token before.

Row i, of the token x_{i+1} and the state h_i, tells what x_{i+2} is. EAGLE-3 (arXiv 2503.01840,
section 3) and heads for multi-token prediction are such. For committed tokens h_i is made of the
target's features; a drafted token has none, so there h is what the network made of the row before.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import mlx.core as mx

from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.networks.model import BoundModel, Draft, DraftContext
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.block import Block, Saved, join, split
from dflash_mlx.verifier.sequence import SequenceCache


class PairedNetwork(Protocol):
    """What the network of such a drafter does; its own keys and values are in a cache."""

    def fuse(self, features: mx.array) -> mx.array:
        """States h [..., d] from the target's features [..., m*D]."""

    def append(self, x: mx.array, h: mx.array, cache: SequenceCache) -> None:
        """Commit the rows with embeddings x and states h, [n, d] each, to `cache`."""

    def step(self, x: mx.array, h: mx.array, cache: SequenceCache) -> tuple[mx.array, mx.array]:
        """Final states of the next rows of a draft, and their h for the rows behind; [n, d] each.

        x, h: [n, d] each. `cache` has begun the pass.
        """


class PairedContext(DraftContext):
    """Rows 0 to L - 2 of a sequence of L committed tokens; row L - 1 waits for the token behind it.

    The states h of all rows are kept as well, a few percent of what the target keeps: wherever the
    sequence is cut, the last row left has to wait again, and its features are gone.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
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

    def fork(self) -> PairedContext:
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
            self._network.append(self._model.embed(tokens), rows, self._cache)
        self._states.append(states)
        while len(self._states) > 1 and len(self._states[-2]) <= len(self._states[-1]):
            self._states[-2:] = [mx.concatenate(self._states[-2:])]  # so that few arrays are many


class PairedModel(BoundModel[PairedContext]):
    """Such a network bound to its target."""

    context = PairedContext

    def tried(self, context: PairedContext) -> mx.array:
        return PairedDraft(self, context).logits(mx.zeros(1, mx.int32), [-1])

    def begin(self, state: State) -> Draft:
        return PairedDraft(self, cast(PairedContext, state.context))


class PairedDraft(Draft):
    """Keys and values of earlier rows stay behind the context's until the next draft."""

    def __init__(self, model: PairedModel, context: PairedContext) -> None:
        super().__init__(model.head, context.words)
        self._network: PairedNetwork = model.module
        self._embed, self._cache = model.embed, context.cache
        self._states = context.last  # [1 + N, d]: h of the last committed token, then of all rows
        self._parents: list[int] = []

    def states(self, tokens: mx.array, parents: list[int]) -> mx.array:
        before = len(self._parents)
        self._parents += parents
        tree = Tree((0,) * (len(self._parents) - 1), tuple(self._parents))
        self._cache.begin(Block.of(tree, before))
        x, h = self._embed(tokens), self._states[mx.array(parents) + 1]
        final, states = self._network.step(x, h, self._cache)
        self._cache.discard()
        self._states = mx.concatenate([self._states, states])
        return final.astype(x.dtype)  # the head's, where the network has another
