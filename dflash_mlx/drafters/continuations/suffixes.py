"""A suffix array of texts: the places where they read as another text does at its end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LONGEST = 16  # tokens before a place that are compared
PER_TOKEN = 2  # tokens that may be drafted for each that matched
AHEAD = PER_TOKEN * LONGEST
NEAREST = 24  # places that one array finds, those with the longest matches
_END = 2**32 - 1  # between texts; no token
CODE = np.dtype(">u4")  # whose bytes are in the order of the tokens

Codes = npt.NDArray[Any]  # tokens as CODE


class Text(NamedTuple):
    """Tokens of one conversation, and when they were said."""

    tokens: Codes
    said: float  # Unix seconds


class Match(NamedTuple):
    """A place where a text reads as another does at its end."""

    length: int  # tokens that are the same, up to LONGEST
    ahead: Sequence[int]  # what followed there, up to AHEAD tokens
    said: float  # Unix seconds; 0 in the same conversation


class SuffixArray:
    """Texts, each backwards, and every place in them in the order of the tokens before it.

    8 bytes a token. A look-up is one binary search, which compares bytes (Manber and Myers, 1990).
    """

    def __init__(self, texts: Sequence[Text]) -> None:
        gap = np.full(AHEAD, _END, CODE)
        parts = [gap, *(part for text in texts for part in (text.tokens[::-1], gap[:1]))]
        self._bytes = np.concatenate([*parts, gap], dtype=CODE).tobytes()
        self._codes = np.frombuffer(self._bytes, CODE)
        # Of texts, and of the last gap.
        self._starts = np.cumsum([AHEAD, *(len(text.tokens) + 1 for text in texts)])
        self._said = np.array([text.said for text in texts])
        self._places = _sorted(self._codes)[: self.size]
        self._view = memoryview(self._places.data)

    @property
    def size(self) -> int:
        """Tokens."""
        return len(self._codes) - 2 * AHEAD - len(self._said)

    def texts(self) -> Iterator[Text]:
        for start, end, said in zip(self._starts, self._starts[1:], self._said, strict=False):
            yield Text(self._codes[start : end - 1][::-1], float(said))

    def find(self, suffix: Codes) -> list[Match]:
        """The places that match most of a text's last tokens, the newest first [1 to LONGEST]."""
        wanted = suffix.tobytes()
        middle = bisect_left(self._view, wanted, key=self._behind)
        places = self._places[max(0, middle - NEAREST // 2) : middle + NEAREST // 2]
        if not places.size:
            return []
        same = self._codes[places[:, None] + np.arange(len(suffix))] == suffix
        lengths = np.where(same.all(axis=1), len(suffix), same.argmin(axis=1))
        places, lengths = places[lengths > 0], lengths[lengths > 0]
        most = min(AHEAD, PER_TOKEN * int(lengths.max(initial=0)))
        ahead = self._codes[places[:, None] - np.arange(1, most + 1)].tolist()
        said = self._said[self._starts.searchsorted(places, side="right") - 1].tolist()
        rows = [row[: row.index(_END)] if _END in row else row for row in ahead]
        return [*map(Match, lengths.tolist(), rows, said)]

    def has(self, tokens: Codes) -> bool:
        """Whether up to LONGEST tokens, the newest first, occur one after the other."""
        wanted = tokens.tobytes()
        place = bisect_left(self._view, wanted, key=self._behind)
        return place < self.size and self._behind(self._view[place]).startswith(wanted)

    def _behind(self, place: int) -> bytes:
        return self._bytes[4 * place : 4 * (place + LONGEST)]


def _sorted(codes: Codes) -> npt.NDArray[np.int32]:
    """Places in the order of the LONGEST codes from each on, by prefix doubling."""
    rank, order = codes.astype(np.uint32), np.zeros(0, np.int64)
    for length in (1, 2, 4, 8):
        key = rank.astype(np.uint64)
        key <<= np.uint64(32)
        key[:-length] |= rank[length:]
        order = np.argsort(key)
        key = key[order]
        rank[order] = np.cumsum(np.append(False, key[1:] != key[:-1]), dtype=np.uint32)
    return order.astype(np.int32)
