"""What rounds have brought and taken, by how they were spent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from dflash_mlx.drafters.growth.reliability import Reliability, Sizes
from dflash_mlx.target.pass_times import PassTimes

_MEMORY = 24  # rounds that an average remembers
_TRUST = 2.0  # rounds that the first guess weighs as much as
_FADED = 4.0  # rounds that what other answers taught weighs as much as
_MACHINE_MEMORY = 6  # rounds: whatever else the machine does can change within a second
_PROBES = 0.01  # of the time may go into rounds that try what looks slower
_RECENT = 16  # drafts whose time and whose promises are remembered
_OUTLIER = 2.0  # a round that took so many times as long waited for something else
_CONTRADICTION = 1.5  # times that plain and drafted rounds may differ in how wrong their times are
_ENOUGH = 16  # rounds of each, to say so
GUESSED_ROWS = 8  # of a drafter that has not drafted yet
_LEAST = 1e-6  # seconds, so that ratios are finite


class Average:
    """A mean that forgets; it starts at a guess."""

    def __init__(self, guess: float, memory: int = _MEMORY) -> None:
        self._total, self._weight = guess * _TRUST, _TRUST
        self._keep = 1 - 1 / memory

    @property
    def mean(self) -> float:
        """Of the last values that it remembers."""
        return self._total / self._weight

    def add(self, value: float) -> None:
        """Take in one more."""
        self._total = self._total * self._keep + value
        self._weight = self._weight * self._keep + 1

    def fade(self, guess: float) -> None:
        """Start again at another guess, which the next values change soon."""
        self._total, self._weight = guess * _FADED, _FADED


class Arm:
    """One way to spend a round, and what it has been worth.

    times: of its drafts, behind contexts; None before the first. tokens, planned: what a round
    was expected to bring and to take. bias: times that it took longer than planned, beside what the
    machine did to all. waited: seconds of other rounds since the last one of this. rounds: so far.
    """

    def __init__(self, name: str, tokens: float, planned: float) -> None:
        self.name = name
        self.times: PassTimes | None = None
        self.tokens, self.planned, self.bias = Average(tokens), Average(planned), Average(1.0)
        self.waited, self.rounds = 0.0, 0
        self._slower: deque[float] = deque(maxlen=_RECENT)
        self._promises: deque[Sizes] = deque(maxlen=_RECENT)

    def draft_seconds(self, position: int) -> float:
        """Of one draft behind so many tokens, as the latest ones were; 0 where there is none."""
        if self.times is None:
            return 0.0
        return float(self.times.of(1, (position,))) * (median(self._slower) if self._slower else 1)

    def drafted(self, position: int, seconds: float) -> None:
        """Remember what a draft took."""
        if self.times is None:
            self.times = PassTimes((1,), (max(seconds, _LEAST),))
        self._slower.append(seconds / float(self.times.of(1, (position,))))

    def expect(self, tokens: float, planned: float, sizes: Sizes) -> None:
        """Remember what a round promised, and what other numbers of nodes would have."""
        self.tokens.add(tokens)
        self.planned.add(planned)
        self._promises.append(sizes)

    def plan(self, seconds: Callable[[Any], Any], fixed: float) -> None:
        """Expect of an answer what the last drafts would promise behind its context."""
        best = [(sizes, sizes.best(seconds, fixed)) for sizes in self._promises]
        if best:
            self.tokens.fade(mean(float(sizes.expected[n - 1]) for sizes, n in best))
            self.planned.fade(mean(fixed + sizes.cost(seconds, n) for sizes, n in best))
        elif self.times is not None:
            self.planned.fade(fixed + float(seconds(GUESSED_ROWS)))

    @property
    def seconds(self) -> float:
        """Expected per round, on a machine that does nothing else."""
        return self.planned.mean * self.bias.mean

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens.mean / self.seconds

    def loss(self, rate: float) -> float:
        """Seconds that a round of this costs more than the same tokens at `rate`."""
        return self.seconds - self.tokens.mean / rate


@dataclass
class Experience:
    """What sessions with one pair and one method have learned, kept from one to the next.

    machine: times that all rounds took longer than planned of late. beyond: seconds that drafted
    rounds take beyond what was planned. timed_again: whether passes were timed again for it; what
    rounds cost beside passes is in no times.
    """

    arms: list[Arm]
    reliability: Reliability
    machine: Average = field(default_factory=lambda: Average(1.0, _MACHINE_MEMORY))
    beyond: Average = field(default_factory=lambda: Average(0.0))
    timed_again: bool = False

    @property
    def contradicts_times(self) -> bool:
        """Whether plain and drafted rounds cannot both take what was measured."""
        plain, *drafts = self.arms
        known = [arm for arm in drafts if min(arm.rounds, plain.rounds) >= _ENOUGH]
        ratios = [arm.bias.mean / plain.bias.mean for arm in known]
        wrong = any(not 1 / _CONTRADICTION < ratio < _CONTRADICTION for ratio in ratios)
        return wrong and not self.timed_again

    def choose(self) -> tuple[Arm, tuple[tuple[str, float], ...], bool]:
        """The arm of this round, the rates that it was chosen by, and whether it is only tried."""
        machine = self.machine.mean
        rated = [(arm.rate, arm) for arm in self.arms]
        rate, best = max(rated, key=lambda pair: pair[0])
        others = [(r, arm) for r, arm in rated if arm is not best]
        rates = tuple((arm.name, r / machine) for r, arm in [(rate, best), *others])
        for _, arm in others:
            if arm.waited * _PROBES >= arm.loss(rate) * machine:
                return arm, rates, True
        return best, rates, False

    def spent(self, arm: Arm, planned: float, took: float, drafted: bool) -> None:
        """Take in the seconds of a round. drafted: whether drafts were verified."""
        machine = self.machine.mean
        expected = planned * arm.bias.mean * machine
        seconds = min(max(took, expected / _OUTLIER), expected * _OUTLIER)
        if drafted:
            self.beyond.add(seconds / machine - planned)
        self.machine.add(seconds / (planned * arm.bias.mean))
        arm.bias.add(seconds / (planned * machine))
        arm.rounds += 1
        for other in self.arms:
            other.waited = 0.0 if other is arm else other.waited + took
