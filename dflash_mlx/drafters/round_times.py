"""What drafts and rounds take, as the latest ones did."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from dflash_mlx.verifier.pass_times import ROWS, PassTimes, size_of

RECENT = 16  # drafts and plain rounds whose time, or promise, is remembered
_MACHINE_MEMORY = 6  # rounds: whatever else the machine does can change within a second
_DRAFTED = 64  # drafted rounds whose time is remembered; sizes that are not among them are new
_OUTLIER = 2.0  # a round that took so many times as long waited for something else
_ENOUGH = 3  # rounds of a size, or plain ones, for what they took to count
_LEAST = 1e-6  # seconds
# What a pass takes, in passes over one row, where nothing was timed: rather too much.
GUESS = PassTimes(ROWS, tuple(1 + 0.1 * (rows - 1) for rows in ROWS))


class DraftTimes:
    """Seconds of drafts, the median of the latest, by how many branches they go on with."""

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}
        self._begun: set[int] = set()

    @property
    def known(self) -> bool:
        return bool(self._latest)

    def of(self, branches: Any = 1) -> Any:
        """Of one draft; between two numbers of branches on a line, 0 where nothing is known.

        Where only one number is known, half of its time is taken to be for its branches.
        """
        if not self._latest:
            return 0.0 * branches
        counts = sorted(self._latest)
        seconds = [median(self._latest[count]) for count in counts]
        if len(counts) == 1:
            return seconds[0] * (0.5 + 0.5 * branches / counts[0])
        return np.interp(branches, counts, seconds)

    def took(self, seconds: float, branches: int = 1) -> None:
        """Remember what a draft took; the first of a kind also builds what the others use."""
        latest = self._latest.setdefault(branches, deque(maxlen=RECENT))
        if len(latest) == 1 and branches not in self._begun:
            self._begun.add(branches)
            latest.clear()
        latest.append(max(seconds, _LEAST))


class RoundTimes:
    """Seconds of rounds by the size of their passes: as timed, and as the latest ones were.

    Beside the pass a round takes what it takes to grow, send and commit its tree.
    """

    def __init__(self, timed: PassTimes | None) -> None:
        self.retime(timed)
        self._met: set[tuple[int, bool]] = set()

    def retime(self, timed: PassTimes | None) -> None:
        """Take other times of passes; None until a round tells, where none was timed."""
        self.timed = self.given = timed  # what rounds tell in place of None is `timed` alone
        self._seen = deque[tuple[int, float]](maxlen=_DRAFTED)  # sizes and seconds of passes
        # How many times as long as planned the latest rounds took
        self._longer = deque([1.0], maxlen=_MACHINE_MEMORY)
        self._plain = deque[float](maxlen=RECENT)  # seconds beyond the pass
        self._of_plain: float | None = None  # their median, where there are enough
        self._drafted = deque[tuple[int, float]](maxlen=_DRAFTED)  # sizes, and the same
        self._usual, self._beyond = 0.0, dict[int, float]()  # their medians: of all, by size

    @property
    def machine(self) -> float:
        """Times that all rounds take longer of late: a median, as of each size, or they drift."""
        return median(self._longer)

    def of(self, rows: Any, contexts: Sequence[float] = ()) -> Any:
        """Of a drafted round without its drafts, over the next size that passes come in."""
        sizes = size_of(rows)
        seconds = (self.timed or GUESS).of(sizes, contexts)
        beyond = [self._beyond.get(int(size), self._usual) for size in np.atleast_1d(sizes)]
        return np.maximum(seconds + np.reshape(beyond, np.shape(sizes)), _LEAST)

    def plain(self, rows: int, contexts: Sequence[float]) -> float:
        """Of a plain round of so many sequences, on a machine that does nothing else."""
        one = float((self.timed or GUESS).of(rows, contexts))
        return max(one + (self._of_plain or 0.0), _LEAST)

    def plain_now(self, rows: int, contexts: Sequence[float]) -> float | None:
        """Seconds of a plain round on the machine as busy as it is; None where nothing tells.

        Without plain rounds nobody knows whether it is the machine or the drafts that take longer
        than planned, so nothing is added for it.
        """
        if self.timed is None:
            return None
        machine = self.machine
        if self._of_plain is None:
            machine = min(machine, 1.0)
        return self.plain(rows, contexts) * machine

    def learn(self, rows: int, drafted: bool, before: float, took: float, planned: float) -> float:
        """Take in a round, and return the seconds that it counts for.

        before: seconds of its drafts. planned: of all. The first with so many rows builds what the
        others use, so it tells nothing; no round tells more than `_OUTLIER` allows.
        """
        expected = planned * self.machine
        if (rows, drafted) not in self._met:
            self._met.add((rows, drafted))
            return expected
        if self.timed is None:
            scale = max(took - before, _LEAST) / float(GUESS.of(size_of(rows)))
            self.timed = replace(GUESS, seconds=tuple(scale * each for each in GUESS.seconds))
            return took
        seconds = min(max(took, expected / _OUTLIER), expected * _OUTLIER)
        unplanned = seconds / self.machine - planned
        if self.given is None:
            self._seen.append((int(size_of(rows)), seconds / self.machine - before))
            self.timed = _line(self._seen)
        self._longer.append(seconds / planned)
        if drafted:
            size = int(size_of(rows))
            self._drafted.append((size, unplanned + self._beyond.get(size, self._usual)))
            self._sum_up()
        else:
            self._plain.append(unplanned + (self._of_plain or 0.0))
            self._of_plain = median(self._plain) if len(self._plain) >= _ENOUGH else None
        return seconds

    def _sum_up(self) -> None:
        found = defaultdict[int, list[float]](list)
        for size, beyond in self._drafted:
            found[size].append(beyond)
        self._beyond = {
            size: max(median(of[-RECENT:]), 0.0) for size, of in found.items() if len(of) >= _ENOUGH
        }
        if len(self._drafted) >= _ENOUGH:
            self._usual = max(median(beyond for _, beyond in [*self._drafted][-RECENT:]), 0.0)


def _line(passes: Iterable[tuple[int, float]]) -> PassTimes:
    """Times on a line through the medians of passes by their rows, drawn a little to `GUESS`."""
    found = defaultdict[int, list[float]](list)
    for rows, seconds in passes:
        found[rows].append(seconds)
    points = [(len(of) ** 0.5, rows - 1, median(of)) for rows, of in found.items()]
    guess = (0.2, -2.0, 0.0)  # as if a slope of a tenth had been seen, give or take half of it
    x = np.array([guess[:2], *((weight, weight * rows) for weight, rows, _ in points)])
    y = np.array([guess[2], *(weight * seconds for weight, _, seconds in points)])
    one, more = np.maximum(np.linalg.lstsq(x, y)[0], (_LEAST, 0.0))
    return replace(GUESS, seconds=tuple(float(one + more * (rows - 1)) for rows in ROWS))
