"""What EAGLE-3 remembers of a sequence: keys, values and states of its committed tokens."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import mlx.core as mx

from dflash_mlx.drafters.eagle3.network import Network
from dflash_mlx.drafters.networks.active_vocabulary import ActiveVocabulary
from dflash_mlx.engine.state import Kind
from dflash_mlx.verifier.saved import Saved, join, split
from dflash_mlx.verifier.sequence import SequenceCache

_MOST_WAITING = 64  # rows of features


class EagleContext:
    """Rows 0 to L - 2 of a sequence of L committed tokens; row L - 1 waits for the token behind it.

    The states h of all rows are kept as well, a few percent of what the target keeps: wherever the
    sequence is cut, the last row left has to wait again, and its features are gone. Features wait
    until a draft needs them: rounds without one must not pay for its context.

    embed: of tokens [n], [n, d]. cache: of one layer. words: the conversation's, where its drafter
    has a partial head.
    """

    def __init__(
        self,
        network: Network,
        embed: Callable[[mx.array], mx.array],
        cache: SequenceCache,
        words: ActiveVocabulary | None = None,
    ) -> None:
        self.words = words
        self._network, self._embed, self._cache = network, embed, cache
        self._waiting: list[tuple[mx.array, mx.array]] = []  # tokens and their features
        self._states: list[mx.array] = []  # h of consecutive tokens, [n, d] each

    @property
    def cache(self) -> SequenceCache:
        """Keys and values of all rows but the last, up to date."""
        if self._waiting:
            self._take_in()
        return self._cache

    @property
    def last(self) -> mx.array:
        """H of the last committed token, [1, d]."""
        _ = self.cache
        return self._states[-1][-1:]

    @property
    def length(self) -> int:
        """Committed tokens."""
        return sum(map(len, self._states)) + self._rows

    @property
    def arrays(self) -> list[mx.array]:
        """Keys, values and states."""
        return [*self.cache.arrays, *self._states]

    def append(self, tokens: mx.array, features: mx.array | None) -> None:
        """Take in the next n committed tokens [n] and their features [n, m*D]."""
        if features is None:
            raise ValueError("no features of tokens, though the drafter reads them")
        self._waiting.append((tokens, features))
        if self.words is not None:
            self.words.add(tokens)
        if self._rows >= _MOST_WAITING:
            self._take_in()

    def refill_from(self, length: int) -> int:
        """From where on tokens have to be appended again for drafts behind `length` of them."""
        return self.cache.refill_from(length - 1) + 1 if length else 0

    def trim(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        self.cache.rewind(max(length - 1, 0))
        pieces, self._states = self._states, []
        for piece in pieces:
            if length > 0:
                self._states.append(piece[:length])
            length -= len(piece)

    @property
    def kind(self) -> Kind:
        """The network, and what is kept of its keys and values."""
        return (self._network,), self._cache.kind

    def fork(self) -> EagleContext:
        """A copy that goes on by itself."""
        other = copy(self)
        other._cache, other._waiting = self._cache.fork(), list(self._waiting)
        other._states, other.words = list(self._states), self.words and self.words.fork()
        return other

    def saved(self) -> Saved:
        """Keys and values, and the states."""
        return join([self.cache.saved(), (list(self._states), None)])

    def restore(self, saved: Saved, tokens: mx.array) -> None:
        """Hold what another has saved of `tokens` [n]."""
        cache, (self._states, _) = split(saved)
        self._cache.restore(cache)
        if self.words is not None:
            self.words.add(tokens)

    def _take_in(self) -> None:
        """Make rows of what waits."""
        tokens = mx.concatenate([tokens for tokens, _ in self._waiting])
        features = mx.concatenate([features for _, features in self._waiting])
        self._waiting.clear()
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

    @property
    def _rows(self) -> int:
        return sum(len(tokens) for tokens, _ in self._waiting)
