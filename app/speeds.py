"""How fast an answer was over its time, and how fast the last answers on this machine were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dflash_chat.figures import Figures
from dflash_mlx.client import replace_text

FILE = ".speeds.json"  # in the folder of the conversations, which lists do not show
_MOST_POINTS = 2048
_KEPT = 5  # answers of a model and method
_LEAST_TOKENS = 16  # of an answer whose speed says something


class Speeds:
    """The speed of one answer over its time, from how many tokens it had when."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._tokens: list[int] = []

    def add(self, seconds: float, tokens: int) -> None:
        """Tokens so far after so many seconds of decoding; what is not later says nothing."""
        if self._seconds and seconds <= self._seconds[-1]:
            return
        if len(self._seconds) >= _MOST_POINTS:
            del self._seconds[1:-1:2], self._tokens[1:-1:2]
        self._seconds.append(seconds)
        self._tokens.append(tokens)

    def over_time(self, width: int) -> list[float]:
        """Tokens per second in equal parts of the answer: `width`, or fewer where few are known."""
        parts = min(width, len(self._seconds) - 1)
        if parts < 1:
            return []
        edges = np.linspace(self._seconds[0], self._seconds[-1], parts + 1)
        tokens = np.interp(edges, self._seconds, self._tokens)
        return [float(speed) for speed in np.diff(tokens) / np.diff(edges)]


@dataclass(frozen=True)
class Earlier:
    """What the last answers showed, as medians.

    times_plain: 0 where nothing tells. day: of the newest of them, as in "2026-11-22".
    """

    tokens_per_second: float
    times_plain: float
    answers: int
    day: str


@dataclass(frozen=True)
class Timing:
    """What passes over one token take here.

    plain: tokens per second that they allow, 0 where that is not known. day: when they were timed,
    as in "2026-11-22", "" where that is not known.
    """

    plain: float = 0.0
    day: str = ""


class SpeedLog:
    """The speeds of the last answers by model and method, in a small file.

    folder: of the conversations. A file that cannot be read or written is done without: it is only
    for the first screen. The methods take time on a slow disk, so not for the screen's thread.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE

    def add(self, model: str, figures: Figures) -> None:
        """Keep the speed of an answer, unless it was too short to say anything."""
        if figures["generated_tokens"] < _LEAST_TOKENS:
            return
        known, key = self._read(), f"{model} {figures['method']}"
        row = [date.today().isoformat(), figures["tokens_per_second"], figures["times_plain"]]
        rows = known.get(key)
        known[key] = [*(rows if isinstance(rows, list) else []), row][-_KEPT:]
        with suppress(OSError):
            replace_text(self._file, json.dumps(known, indent=1))

    def earlier(self, model: str, method: str) -> Earlier | None:
        """What the last answers of a model with a method showed; None where there are none."""
        try:
            rows = self._read().get(f"{model} {method}", ())
            speeds, ratios = [float(s) for _, s, _ in rows], [float(r) for *_, r in rows]
            days = [date.fromisoformat(day).isoformat() for day, *_ in rows]
        except (ValueError, TypeError, OverflowError):  # somebody else wrote it
            return None
        if not speeds or not all(0 < speed < float("inf") for speed in speeds):
            return None
        told = [ratio for ratio in ratios if 0 < ratio < float("inf")]
        return Earlier(median(speeds), median(told) if told else 0.0, len(speeds), days[-1])

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return dict(known) if isinstance(known, Mapping) else {}
