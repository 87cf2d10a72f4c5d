"""What rounds have brought and taken, by how they were spent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import numpy as np

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.growth.reliability import Reliability, Sizes
from dflash_mlx.drafters.two_pass import FirstDraft
from dflash_mlx.verifier.pass_times import PassTimes

_MEMORY = 24  # rounds that an average remembers
_TRUST = 2.0  # rounds that the first guess weighs as much as
_FADED = 4.0  # rounds that what other answers taught weighs as much as
_MACHINE_MEMORY = 6  # rounds: whatever else the machine does can change within a second
_PROBES = 0.01  # of the time may go into rounds that try what looks slower
_RECENT = 16  # drafts whose time and whose promises are remembered
_GAIN = 0.5  # tokens that a second pass is first believed to bring where a draft fails
_PAIRED = 64  # second passes that are remembered: most bring nothing, some a whole branch
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


class DraftTimes:
    """Seconds of drafts: as they were timed, and how the latest ones compare.

    timed: by branches, behind contexts; None before the first.
    """

    def __init__(self) -> None:
        self.timed: PassTimes | None = None
        self._slower: deque[float] = deque(maxlen=_RECENT)

    def of(self, position: int, branches: Any = 1) -> Any:
        """Of one draft behind so many tokens, as the latest ones were; 0 where there is none."""
        if self.timed is None:
            return 0.0 * branches
        return self.timed.of(branches, (position,)) * (median(self._slower) if self._slower else 1)

    def took(self, seconds: float, position: int, branches: int = 1) -> None:
        """Remember what a draft took."""
        if self.timed is None:
            self.timed = PassTimes((1,), (max(seconds, _LEAST),))
        self._slower.append(seconds / float(self.timed.of(branches, (position,))))


@dataclass(frozen=True)
class Instead:
    """What would have been verified without the second pass that was made.

    trees: of each sequence. mass: the posterior of failing where the pass went on. rows: tokens
    that its tree's further rows, if any, cost in time.
    """

    trees: Sequence[Tree]
    mass: float
    rows: float

    @classmethod
    def of(
        cls, trees: Sequence[Tree], drafts: Sequence[FirstDraft], counts: Sequence[int], rows: float
    ) -> Instead:
        """Where so many branches of each draft were gone on with."""
        pairs = zip(drafts, counts, strict=True)
        mass = sum(sum([*draft.branches.values()][:count]) for draft, count in pairs)
        return cls(trees, mass, rows)

    def gain(self, accepted: Sequence[Accepted]) -> float:
        """Tokens that were accepted beyond those of these trees, as far as the text is known."""
        pairs = zip(self.trees, accepted, strict=True)
        return sum(len(each.tokens) - brought(tree, each.tokens) for tree, each in pairs)


def brought(tree: Tree, text: Sequence[int]) -> int:
    """Tokens of a round that verifies a tree where the target says `text`, of what is known."""
    node: int | None = 0
    for count, token in enumerate(text):
        assert node is not None
        if (node := tree.child(node, token)) is None:
            return count + 1
    return len(text) + 1


class SecondPass:
    """What a second draft pass has brought, and whether it pays behind a first draft.

    times: of such passes. gain, mass: tokens that a pass brought, beyond those that the first
    drafts would have had in the same place and what more rows cost, and the posterior of failing
    where it went on; so what it brings of one unit is a ratio of means. What was brought counts
    here, as luck is the same for both trees. waited: seconds since the last one.
    """

    def __init__(self) -> None:
        self.times = DraftTimes()
        self.gain, self.mass = Average(_GAIN, _PAIRED), Average(1.0, _PAIRED)
        self.waited = 0.0

    def branches(
        self, drafts: Sequence[FirstDraft], rate: float, position: int
    ) -> tuple[list[int], bool]:
        """How many of each draft's branches to go on with, 0 where that is not worth its time.

        Those where the drafts are likeliest to fail, as many as save most seconds. Where none saves
        any, or nobody knows, it is only tried, as seldom as `Experience.choose` tries what looks
        slower; that is the second value. rate: tokens per second that time brings otherwise.
        """
        posteriors = [(r, i) for i, draft in enumerate(drafts) for r in draft.branches.values()]
        found = sorted(posteriors, reverse=True)
        chosen, tried = [], self.times.timed is None
        if found:
            mass = np.cumsum([posterior for posterior, _ in found])
            seconds = self.times.of(position, np.arange(1, len(found) + 1))
            saved = self.gain.mean / self.mass.mean * mass / rate - seconds
            most = int(saved.argmax())
            if saved[most] > 0 or self.waited * _PROBES >= -saved[most]:
                self.waited = 0.0
                chosen, tried = [i for _, i in found[: most + 1]], tried or bool(saved[most] <= 0)
        return [chosen.count(i) for i in range(len(drafts))], tried

    def learn(self, instead: Instead, accepted: Sequence[Accepted]) -> None:
        """Take in what a pass has brought."""
        self.gain.add(instead.gain(accepted) - instead.rows)
        self.mass.add(instead.mass)


class Arm:
    """One way to spend a round, and what it has been worth.

    drafts: their times. tokens, planned: what a round was expected to bring and to take. bias:
    times that it took longer than planned, beside what the machine did to all. waited: seconds of
    other rounds since the last one of this. rounds: so far.
    """

    def __init__(self, name: str, tokens: float, planned: float) -> None:
        self.name = name
        self.drafts = DraftTimes()
        self.tokens, self.planned, self.bias = Average(tokens), Average(planned), Average(1.0)
        self.waited, self.rounds = 0.0, 0
        self._promises: deque[Sizes] = deque(maxlen=_RECENT)

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
        elif self.drafts.timed is not None:
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

    second: what second passes bring. machine: times that all rounds took longer than planned of
    late. beyond: seconds that drafted rounds take beyond what was planned. timed_again: whether
    passes were timed again for it; what rounds cost beside passes is in no times.
    """

    arms: list[Arm]
    reliability: Reliability
    second: SecondPass = field(default_factory=SecondPass)
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

    @property
    def rate(self) -> float:
        """Expected tokens per second of the best arm, on a machine that does nothing else."""
        return max(arm.rate for arm in self.arms)

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
        self.second.waited += took
        for other in self.arms:
            other.waited = 0.0 if other is arm else other.waited + took
