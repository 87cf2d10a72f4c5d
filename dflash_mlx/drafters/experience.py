"""What rounds have brought and taken, by how they were spent."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any

import numpy as np

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.growth.reliability import Reliability, Sizes
from dflash_mlx.drafters.two_pass import FirstDraft
from dflash_mlx.verifier.pass_times import ROWS, PassTimes, size_of

_MEMORY = 24  # rounds that an average remembers
_TRUST = 2.0  # rounds that the first guess weighs as much as
_FADED = 4.0  # rounds that what other answers taught weighs as much as
_MACHINE_MEMORY = 6  # rounds: whatever else the machine does can change within a second
_PROBES = 0.01  # of the time may go into rounds that try what looks slower
_RECENT = 16  # drafts whose time and whose promises are remembered
_GAIN = 0.5  # tokens that a second pass is first believed to bring where a draft fails
_PAIRED = 64  # second passes that are remembered: most bring nothing, some a whole branch
_OUTLIER = 2.0  # a round that took so many times as long waited for something else
_ENOUGH = 3  # plain rounds, for what they took to count
GUESSED_ROWS = 8  # of a drafter that has not drafted yet
SAFE = 4  # rows that cost little more than one wherever a draft pays at all
# What a pass takes, in passes over one row, where nothing was timed: rather too much.
GUESS = PassTimes(ROWS, tuple(1 + 0.1 * (rows - 1) for rows in ROWS))
_LEAST = 1e-6  # seconds


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
    """Seconds of drafts, the median of the latest, by how many branches they go on with."""

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}
        self._begun: set[int] = set()

    @property
    def known(self) -> bool:
        """Whether there was one."""
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
        latest = self._latest.setdefault(branches, deque(maxlen=_RECENT))
        if len(latest) == 1 and branches not in self._begun:
            self._begun.add(branches)
            latest.clear()
        latest.append(max(seconds, _LEAST))


class RoundTimes:
    """Seconds of rounds by the size of their passes: as timed, and as the latest ones were.

    Beside the pass a round takes what it takes to grow, send and commit its tree.
    """

    def __init__(self, timed: PassTimes | None) -> None:
        self.timed = timed  # None until a round tells, where no pass was timed
        self.machine = Average(1.0, _MACHINE_MEMORY)  # times that all rounds take longer of late
        self.planned = defaultdict[int, float](float)  # seconds of all rounds, by size
        self.took = defaultdict[int, float](float)
        self._met: set[tuple[int, bool]] = set()
        self._beyond: dict[int, deque[float]] = {}  # seconds by size; 0 for plain rounds
        self._drafted: deque[float] = deque(maxlen=_RECENT)  # the same of any size

    def of(self, rows: Any, contexts: Sequence[float] = ()) -> Any:
        """Of a drafted round without its drafts, over the next size that passes come in."""
        sizes = size_of(rows)
        seconds = (self.timed or GUESS).of(sizes, contexts)
        beyond = [self._extra(int(size)) for size in np.atleast_1d(sizes)]
        return np.maximum(seconds + np.reshape(beyond, np.shape(sizes)), _LEAST)

    def plain(self, rows: int, contexts: Sequence[float]) -> float:
        """Of a plain round of so many sequences, on a machine that does nothing else."""
        one = float((self.timed or GUESS).of(rows, contexts))
        return max(one + self._extra(0), _LEAST)

    def plain_now(self, rows: int, contexts: Sequence[float]) -> float | None:
        """The same as the machine is, None where nothing tells.

        Without plain rounds nobody knows whether it is the machine or the drafts that take longer
        than planned, so nothing is added for it.
        """
        if self.timed is None:
            return None
        machine = self.machine.mean
        measured = len(self._beyond.get(0, ())) >= _ENOUGH
        return self.plain(rows, contexts) * (machine if measured else min(machine, 1.0))

    def learn(self, rows: int, drafted: bool, before: float, took: float, planned: float) -> float:
        """Take in a round, and return the seconds that it counts for.

        before: seconds of its drafts. planned: of all. The first with so many rows builds what the
        others use, so it tells nothing; no round tells more than `_OUTLIER` allows.
        """
        size = int(size_of(rows)) if drafted else 0
        machine = self.machine.mean
        if (rows, drafted) not in self._met:
            self._met.add((rows, drafted))
            return planned * machine
        if self.timed is None:
            scale = max(took - before, _LEAST) / float(GUESS.of(size_of(rows)))
            self.timed = replace(GUESS, seconds=tuple(scale * each for each in GUESS.seconds))
            return took
        self.planned[size] += planned * machine
        self.took[size] += took
        expected = planned * machine
        seconds = min(max(took, expected / _OUTLIER), expected * _OUTLIER)
        beyond = seconds / machine - (planned - self._extra(size))
        self.machine.add(seconds / planned)
        self._beyond.setdefault(size, deque(maxlen=_RECENT)).append(beyond)
        if drafted:
            self._drafted.append(beyond)
        return seconds

    def retime(self, timed: PassTimes) -> None:
        """Passes were timed since."""
        self.timed = timed
        self.machine = Average(1.0, _MACHINE_MEMORY)
        self._beyond.clear()
        self._drafted.clear()

    def _extra(self, size: int) -> float:
        """Beyond the pass, of this size where enough is known of it, else of any drafted round."""
        found = self._beyond.get(size, ())
        if len(found) >= _ENOUGH:
            return median(found)
        return max(median(self._drafted), 0.0) if size and self._drafted else 0.0


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

    def branches(self, drafts: Sequence[FirstDraft], rate: float) -> tuple[list[int], bool]:
        """How many of each draft's branches to go on with, 0 where that is not worth its time.

        Those where the drafts are likeliest to fail, as many as save most seconds. Where none saves
        any, or nobody knows, it is only tried, as seldom as `Experience.choose` tries what looks
        slower; that is the second value. rate: tokens per second that time brings otherwise.
        """
        posteriors = [(r, i) for i, draft in enumerate(drafts) for r in draft.branches.values()]
        found = sorted(posteriors, reverse=True)
        chosen, tried = [], not self.times.known
        if found:
            mass = np.cumsum([posterior for posterior, _ in found])
            seconds = self.times.of(np.arange(1, len(found) + 1))
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
    other rounds since the last one of this.
    """

    def __init__(self, name: str, tokens: float, planned: float) -> None:
        self.name = name
        self.drafts = DraftTimes()
        self.tokens, self.planned, self.bias = Average(tokens), Average(planned), Average(1.0)
        self.waited = 0.0
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
        elif self.drafts.known:
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
    """What sessions with one pair and one method have learned, kept from one to the next."""

    arms: list[Arm]
    reliability: Reliability
    times: RoundTimes
    second: SecondPass = field(default_factory=SecondPass)

    @property
    def rate(self) -> float:
        """Expected tokens per second of the best arm, on a machine that does nothing else."""
        return max(arm.rate for arm in self.arms)

    def choose(self) -> tuple[Arm, tuple[tuple[str, float], ...], bool]:
        """The arm of this round, the rates that it was chosen by, and whether it is only tried."""
        machine = self.times.machine.mean
        rated = [(arm.rate, arm) for arm in self.arms]
        rate, best = max(rated, key=lambda pair: pair[0])
        others = [(r, arm) for r, arm in rated if arm is not best]
        rates = tuple((arm.name, r / machine) for r, arm in [(rate, best), *others])
        for _, arm in others:
            if arm.waited * _PROBES >= arm.loss(rate) * machine:
                return arm, rates, True
        return best, rates, False

    def spent(
        self, arm: Arm, rows: int, before: float, planned: float, took: float, checked: bool
    ) -> None:
        """Take in the seconds of a round. before: of its drafts. checked: whether any were."""
        drafted, machine = checked or arm is not self.arms[0], self.times.machine.mean
        seconds = self.times.learn(rows, drafted, before, took, planned)
        arm.bias.add(seconds / (planned * machine))
        self.second.waited += took
        for other in self.arms:
            other.waited = 0.0 if other is arm else other.waited + took
