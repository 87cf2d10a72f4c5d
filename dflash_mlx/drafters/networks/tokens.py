"""What draft models that read tokens alone, and nothing of the target's, keep of a sequence."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import mlx.core as mx

from dflash_mlx.drafters.networks.model import MOST_WAITING, DraftContext
from dflash_mlx.verifier.block import Saved

CHUNK = 512  # tokens of a pass over text alone


class TokenContext(DraftContext):
    """A cache behind committed tokens, of which no features are read.

    Tokens that wait take part in the first pass of a draft; many at once, as of a prompt, do not
    wait. All tokens are remembered: where the cache has no way back, they are read again without
    the target.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._text = mx.array([], mx.int32)  # what waits
        self._tokens: list[mx.array] = []  # all of them, part by part

    @abstractmethod
    def read(self, tokens: mx.array) -> None:
        """Commit these tokens [n] to the cache."""

    @abstractmethod
    def way_back(self, length: int) -> int:
        """Where the cache goes back to, at most `length`; from there on tokens are read again."""

    @property
    def _rows(self) -> int:
        return int(self._text.size)

    @property
    def arrays(self) -> list[mx.array]:
        return [*self._cache.arrays, self._text]

    def append(self, tokens: mx.array, features: mx.array | None) -> None:
        tokens = tokens.astype(mx.int32)
        self._tokens.append(tokens)
        self._note(tokens)
        self.take_in(tokens)

    def take_in(self, tokens: mx.array, features: mx.array | None = None) -> None:
        self._text = mx.concatenate([self._text, tokens])
        while self._text.size > MOST_WAITING:
            self.read(self._text[:CHUNK])
            self._text = self._text[CHUNK:]

    def take_waiting(self) -> mx.array:
        """[n] what waited; whoever asks commits it to the cache."""
        text, self._text = self._text, self._text[:0]
        return text

    def refill_from(self, length: int) -> int:
        return length  # no token has to be appended again

    def trim(self, length: int) -> None:
        tokens = mx.concatenate([self._text[:0], *self._tokens])[:length]
        mx.eval(tokens)  # or it would hold on to all parts
        self._tokens = [tokens]
        start = self.way_back(len(tokens))
        self._cache.rewind(start)
        self._text = self._text[:0]
        self.take_in(tokens[start:])

    def fork(self) -> TokenContext:
        other = super().fork()
        other._tokens = list(self._tokens)
        return other

    def restore(self, saved: Saved, tokens: mx.array) -> None:
        super().restore(saved, tokens)
        self._tokens, self._text = [tokens], tokens[self._cache.length :]
