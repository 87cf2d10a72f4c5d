"""Kernels that a machine uses for the first time: marked on disk until some passes went well.

A program that ends by itself takes its mark along. One that a dead process has left says that it,
or the machine, went down with them.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dflash_mlx.system.files import keep_text, kept_json

PASSES = 3  # that a new kernel is watched for
SLOW, TIMES = 5.0, 20.0  # seconds, and times the usual, of a pass that no kernel may cause


class InUse:
    """The mark of one process, for one model's file of choices."""

    def __init__(self, choices: Path) -> None:
        self._file = choices.parent / "in-use" / f"{choices.stem}-{os.getpid()}.json"
        self.cases: list[str] = []
        self._left = 0
        self._usual: dict[int, float] = {}
        atexit.register(self.clear)

    def begin(self, case: str) -> None:
        """Mark a case, before its kernel runs in this process for the first time."""
        self._mark([*self.cases, case])

    def drop(self, case: str) -> None:
        """Its kernel is not taken."""
        self._mark([each for each in self.cases if each != case])

    def _mark(self, cases: list[str]) -> None:
        self.cases, self._left = cases, PASSES
        if cases:
            keep_text(self._file, json.dumps(cases))
        else:
            self.clear()

    def passed(self, rows: int, seconds: float, expected: float | None) -> str:
        """A pass ended. What is wrong with its time, "" for nothing.

        expected: seconds of such a pass; by default the least of as many rows or more so far.
        """
        wider = [least for n, least in self._usual.items() if n >= rows]
        usual = expected or min(wider, default=None)
        if self.cases and usual and seconds > max(SLOW, TIMES * usual):
            return f"a pass with it took {seconds:.1f} s, where {usual:.2g} s are usual"
        self._usual[rows] = min(seconds, self._usual.get(rows, seconds))
        self._left -= 1
        if self.cases and self._left <= 0:
            self.clear()
        return ""

    def clear(self) -> None:
        """Nothing is watched any more."""
        self.cases = []
        with suppress(OSError):
            self._file.unlink()


def left_behind(choices: Path) -> Iterator[str]:
    """The cases that a process which is no more had in use; each is told once."""
    for file in (choices.parent / "in-use").glob(f"{choices.stem}-*.json"):
        try:
            os.kill(int(file.stem.rpartition("-")[2]), 0)
        except ProcessLookupError:
            yield from _read(file)
            with suppress(OSError):
                file.unlink()
        except (OSError, ValueError, OverflowError):  # another user's, or none of ours
            continue


def _read(file: Path) -> list[str]:
    try:
        cases = kept_json(file)
        return [case for case in cases if isinstance(case, str)]
    except (OSError, ValueError, TypeError):
        return []
