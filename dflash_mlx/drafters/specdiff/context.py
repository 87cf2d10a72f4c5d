"""What a masked diffusion drafter remembers of a sequence: keys and values of its tokens."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from dflash_mlx.drafters.networks.partial_head import Words
from dflash_mlx.drafters.specdiff.network import Network
from dflash_mlx.target.cache import LayerCache
from dflash_mlx.target.sequence import SequenceCache

MOST_WAITING = 64  # tokens
CHUNK = 512  # tokens of a pass over text alone

Embed = Callable[[mx.array], mx.array]


class TokenContext:
    """The drafter's keys and values of the committed tokens, per layer.

    Tokens wait until a draft needs them, and then take part in its first pass: rounds without a
    draft must not pay for its context. Many at once, as of a prompt, do not wait. embed: tokens [n]
    to [1, n, d]. words: the conversation's, where its drafter has a partial head.
    """

    def __init__(
        self,
        network: Network,
        embed: Embed,
        layers: list[LayerCache],
        words: Words | None = None,
    ) -> None:
        self.words = words
        self._network, self._embed = network, embed
        self._cache = SequenceCache(layers)
        self._waiting = mx.array([], mx.int32)
        # Earlier tokens cannot reach a row through all layers, if all of these have windows.
        self._reach = sum(layer.window - 1 for layer in layers if layer.window is not None)

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
        self._waiting = mx.concatenate([self._waiting, tokens.astype(mx.int32)])
        if self.words is not None:
            self.words.add(tokens)
        while self._waiting.size > MOST_WAITING:
            self._network.read(self._embed(self._waiting[:CHUNK]), self._cache)
            self._waiting = self._waiting[CHUNK:]

    def run(self, block: mx.array) -> mx.array:
        """Final states [b, d] of a block [b] behind all tokens; what waited is then committed."""
        rows, text = mx.concatenate([self._waiting, block]), self._waiting.size
        self._waiting = self._waiting[:0]
        return self._network(self._embed(rows), self._cache, text)[0, text:]

    def refill_from(self, length: int) -> int:
        """From where on tokens have to be appended again for drafts at `length`.

        Where a window has passed on, from where nothing earlier reaches it through all layers.
        """
        if length >= self._cache.length or self._cache.refill_from(length) == length:
            return length
        return max(0, length - self._reach)

    def trim(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        self._waiting = self._waiting[: max(0, length - self._cache.length)]
        self._cache.trim(length)
