"""What a masked diffusion drafter remembers of a sequence: keys and values of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import mlx.core as mx

from dflash_mlx.drafters.networks.active_vocabulary import ActiveVocabulary
from dflash_mlx.drafters.specdiff.network import Network
from dflash_mlx.engine.state import Kind
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.saved import Saved
from dflash_mlx.verifier.sequence import SequenceCache

MOST_WAITING = 64  # tokens
CHUNK = 512  # tokens of a pass over text alone

Embed = Callable[[mx.array], mx.array]


class TokenContext:
    """The drafter's keys and values of the committed tokens, per layer.

    Tokens wait until a draft needs them, and then take part in its first pass: rounds without a
    draft must not pay for its context. Many at once, as of a prompt, do not wait. All tokens are
    remembered: where a window has passed on, they are read again without the target. embed: tokens
    [n] to [1, n, d]. words: the conversation's, where its drafter has a partial head.
    """

    def __init__(
        self,
        network: Network,
        embed: Embed,
        layers: list[LayerCache],
        words: ActiveVocabulary | None = None,
    ) -> None:
        self.words = words
        self._network, self._embed = network, embed
        self._cache = SequenceCache(layers)
        self._waiting = mx.array([], mx.int32)
        self._tokens: list[mx.array] = []  # all of them, part by part
        self._windows = [layer.window for layer in layers]

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._cache.length + self._waiting.size

    @property
    def arrays(self) -> list[mx.array]:
        """Keys and values of all layers, and the tokens that wait."""
        return [*self._cache.arrays, self._waiting]

    def append(self, tokens: mx.array, features: mx.array | None) -> None:
        """Take in the next n committed tokens [n]; nobody reads their features."""
        tokens = tokens.astype(mx.int32)
        self._tokens.append(tokens)
        if self.words is not None:
            self.words.add(tokens)
        self._take_in(tokens)

    def _take_in(self, tokens: mx.array) -> None:
        """Read the next n tokens [n], or let them wait."""
        self._waiting = mx.concatenate([self._waiting, tokens])
        while self._waiting.size > MOST_WAITING:
            self._network.read(self._embed(self._waiting[:CHUNK]), self._cache)
            self._waiting = self._waiting[CHUNK:]

    def run(self, block: mx.array) -> mx.array:
        """Final states [b, d] of a block [b] behind all tokens; what waited is then committed."""
        rows, text = mx.concatenate([self._waiting, block]), self._waiting.size
        self._waiting = self._waiting[:0]
        return self._network(self._embed(rows), self._cache, text)[0, text:]

    def refill_from(self, length: int) -> int:
        """`length`: no token has to be appended again."""
        return length

    def trim(self, length: int) -> None:
        """Forget the tokens from `length` on, and read again what a window no longer has."""
        tokens = mx.concatenate([self._waiting[:0], *self._tokens])[:length]
        mx.eval(tokens)  # or it would hold on to all parts
        self._tokens = [tokens]
        if length >= self._cache.length or self._cache.refill_from(length) == length:
            self._waiting = self._waiting[: max(0, length - self._cache.length)]
            self._cache.rewind(length)
        else:
            start = self._reached_from(length)
            self._waiting = self._waiting[:0]
            self._cache.rewind(start)
            self._take_in(tokens[start:])

    @property
    def kind(self) -> Kind:
        """The network, and what is kept of its keys and values."""
        return (self._network,), self._cache.kind

    def fork(self) -> TokenContext:
        """A copy that goes on by itself."""
        other = copy(self)
        other._cache, other._tokens = self._cache.fork(), list(self._tokens)
        other.words = self.words and self.words.fork()
        return other

    def saved(self) -> Saved:
        """Keys and values; what waits is among the tokens."""
        return self._cache.saved()

    def restore(self, saved: Saved, tokens: mx.array) -> None:
        """Hold what another has saved of `tokens` [n]."""
        self._cache.restore(saved)
        self._tokens, self._waiting = [tokens], tokens[self._cache.length :]
        if self.words is not None:
            self.words.add(tokens)

    def _reached_from(self, length: int) -> int:
        """The first token that rows at `length` see anything of, through all layers.

        Each window reaches a little further back. A layer without one sees all tokens, and what
        these are in it comes of the windows before it, from the first token on.
        """
        reach = 0
        for window in self._windows:
            if window is None:
                return 0
            reach += window - 1
        return max(0, length - reach)
