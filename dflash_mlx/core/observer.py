"""Watching a decode without changing it."""

from __future__ import annotations

import time
from collections import defaultdict


class Observer:
    """Does nothing; the default. Subclasses must not touch what they are shown."""

    def start(self) -> None:
        """Decoding begins."""

    def mark(self, term: str) -> None:
        """The time since the last mark went into `term` of a round."""

    def fell_back(self, error: Exception) -> None:
        """What failed for several sequences together is done for one after the other."""

    def prefilled(self, tokens: int, total: int) -> None:
        """`tokens` of the `total` prompt tokens are in the caches."""


class RoundTimer(Observer):
    """Adds up the seconds that rounds spend in "draft", "verify" and "commit"."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def start(self) -> None:
        self._last = time.perf_counter()

    def mark(self, term: str) -> None:
        now = time.perf_counter()
        self.seconds[term] += now - self._last
        self._last = now
