"""A prompt: tokens, and pieces among them that are no text, such as images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx


@dataclass(frozen=True)
class Piece:
    """Places of a prompt that stand for more than their token ids say, such as an image."""

    start: int  # its first place
    length: int
    digest: str  # of what it is and of how it was read; equal digests are equal pieces
    # [length, d] in place of the tokens' own; None where the tokens are what is read
    embeddings: Callable[[], mx.array] | None = field(default=None, compare=False)
    whole: bool = field(default=False, compare=False)  # its places see each other: read in one pass

    def key_at(self, place: int) -> int:
        """A negative number that no other piece has at this place of a prompt, and no token."""
        told = f"{self.digest} {place - self.start}".encode()
        return -1 - int.from_bytes(hashlib.sha256(told).digest()[:7], "little")


@dataclass(frozen=True)
class Prompt:
    """The whole conversation so far, as the model gets it."""

    tokens: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()  # in order, apart from each other but for a salt's

    @classmethod
    def of(cls, given: Prompt | Iterable[int]) -> Prompt:
        """A prompt as it is, or of token ids alone."""
        return given if isinstance(given, Prompt) else cls(tuple(given))

    def __len__(self) -> int:
        return len(self.tokens)

    def salted(self, salt: str) -> Prompt:
        """One that begins like none with another salt, so that they share no prefix; "" for none.

        As vLLM's `cache_salt`: how fast a prompt is read does not tell what others have asked.
        """
        if not (salt and self.tokens):
            return self
        return Prompt(self.tokens, (Piece(0, 1, f"{salt} {self.tokens[0]}"), *self.pieces))

    def key_at(self, place: int) -> int:
        """What prefixes are compared by: the token, or a number that tells pieces apart."""
        return self.keys[place]

    @property
    def keys(self) -> Sequence[int]:
        """The key at every place; of a text its tokens."""
        if not self.pieces:
            return self.tokens
        keys = [*self.tokens]
        for piece in reversed(self.pieces):  # where two overlap, a salt's own comes first
            for place in range(piece.start, min(piece.start + piece.length, len(keys))):
                keys[place] = piece.key_at(place)
        return keys

    def uncut(self, end: int) -> int:
        """`end`, or the end of the piece that it would cut and that is read in one pass."""
        ends = {p.start + p.length for p in self.pieces if p.whole and p.start < end}
        return min((piece_end for piece_end in ends if piece_end > end), default=end)

    def embed(
        self, embedding: Callable[[mx.array], mx.array], first: int, last: int
    ) -> mx.array | None:
        """Input embeddings [last - first, d] of these places; None where all of them are text.

        embedding: the model's own, of tokens [n].
        """
        there = [p for p in self.pieces if p.start < last and first < p.start + p.length]
        pieces = [(piece, read) for piece in there if (read := piece.embeddings) is not None]
        if not pieces:
            return None
        rows = embedding(mx.array(self.tokens[first:last]))
        for piece, read in pieces:
            begin, end = max(first, piece.start), min(last, piece.start + piece.length)
            own = read()[begin - piece.start : end - piece.start]
            rows[begin - first : end - first] = own.astype(rows.dtype)
        return rows


def shared_length(some: Sequence[int], others: Sequence[int]) -> int:
    """How many keys, or tokens, both begin with."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(some), len(others)))
