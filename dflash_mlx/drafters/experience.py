"""What rounds have cost and brought, and how the next one is to be spent."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any

import numpy as np

from dflash_mlx.core.tree import Accepted, Tree, accept
from dflash_mlx.drafters.growth.grow import FIRST
from dflash_mlx.drafters.growth.reliability import Reliability, Sizes
from dflash_mlx.drafters.method import FirstDraft
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.verifier.pass_times import ROWS, PassTimes, size_of

_PROBES = 0.01  # of the time may go into rounds that try what looks slower
GAIN = 0.5  # tokens that a second pass is first believed to bring where a draft fails
_NEXT = 0.7  # ... that one step more is, where all so far is right
_PAIRED = 64  # second passes that are remembered: most bring nothing, some a whole branch
GUESSED_ROWS = 8  # of a drafter that has not drafted yet
_MEMORY = 24  # rounds that an average remembers
_TRUST = 2.0  # rounds that the first guess weighs as much as
_FADED = 4.0  # rounds that what other answers taught weighs as much as
_HOPE = 1.0  # times that an arm may be better than one round of it has shown
_MACHINE_MEMORY = 6  # rounds: whatever else the machine does can change within a second
_RECENT = 16  # drafts and plain rounds whose time, or promise, is remembered
_DRAFTED = 64  # drafted rounds whose time is remembered; sizes that are not among them are new
_OUTLIER = 2.0  # a round that took so many times as long waited for something else
_ENOUGH = 3  # rounds of a size, or plain ones, for what they took to count
_LEAST = 1e-6  # seconds
SAFE = 4  # rows that cost little more than one wherever a draft pays at all
# What a pass takes, in passes over one row, where nothing was timed: rather too much.
GUESS = PassTimes(ROWS, tuple(1 + 0.1 * (rows - 1) for rows in ROWS))


class Average:
    """A mean that forgets; it starts at a guess."""

    def __init__(self, guess: float, memory: int = _MEMORY) -> None:
        self._total, self.weight = guess * _TRUST, _TRUST
        self._keep = 1 - 1 / memory

    @property
    def mean(self) -> float:
        return self._total / self.weight

    def add(self, value: float) -> None:
        self._total = self._total * self._keep + value
        self.weight = self.weight * self._keep + 1

    def fade(self, guess: float) -> None:
        self._total, self.weight = guess * _FADED, _FADED


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
        self.retime(timed)
        self._met: set[tuple[int, bool]] = set()

    def retime(self, timed: PassTimes | None) -> None:
        """Take other times of passes; None until a round tells, where none was timed."""
        self.timed = self.given = timed  # what rounds tell in place of None is `timed` alone
        self._seen = deque[tuple[int, float]](maxlen=_DRAFTED)  # sizes and seconds of passes
        # How many times as long as planned the latest rounds took
        self._longer = deque([1.0], maxlen=_MACHINE_MEMORY)
        self._plain = deque[float](maxlen=_RECENT)  # seconds beyond the pass
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
            size: max(median(of[-_RECENT:]), 0.0)
            for size, of in found.items()
            if len(of) >= _ENOUGH
        }
        if len(self._drafted) >= _ENOUGH:
            self._usual = max(median(beyond for _, beyond in [*self._drafted][-_RECENT:]), 0.0)


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


def of_further_steps(accepted: Accepted) -> int:
    """Accepted tokens of a draft model that its first step could not have drafted."""
    tree = accepted.tree
    return sum(tree.depths[node] > 1 and tree.sources[node] == FIRST for node in accepted.path)


def brought(tree: Tree, text: Sequence[int]) -> int:
    """Tokens of a round that verifies a tree where the target says `text`, of what is known."""
    known = (*text, -1)
    return len(accept(tree, lambda path: known[len(path) - 1]).path)


class Continued:
    """What going on with drafts has brought, by the probability that it would.

    Of a second pass counts what it brought beyond the first draft in the same text, as luck is the
    same for both trees, and its probabilities are posteriors of failing where it goes on. guess:
    tokens that it is first believed to bring at probability 1.
    """

    def __init__(self, guess: float) -> None:
        self.gain = Average(guess, _PAIRED)  # tokens that it brought, less its rows' cost
        self.mass = Average(1.0, _PAIRED)  # the probabilities by which it went on
        self.times = DraftTimes()
        self.waited = 0.0  # seconds since it last went on

    def saved(self, mass: Any, rate: float, seconds: Any) -> Any:
        """Seconds that it saves; rate: tokens per second that time brings otherwise."""
        return self.gain.mean / self.mass.mean * mass / rate - seconds

    def goes_on(self, saved: float) -> bool:
        """Whether it is worth that, or tried, as seldom as `Experience.choose` tries others."""
        if saved <= 0 and self.waited * _PROBES < -saved:
            return False
        self.waited = 0.0
        return True

    def learn(self, gain: float, mass: float) -> None:
        self.gain.add(gain)
        self.mass.add(mass)

    def branches(self, drafts: Sequence[FirstDraft], rate: float) -> tuple[list[int], float, bool]:
        """How many of each draft's branches to go on with, 0 where that is not worth its time.

        Those where the drafts are likeliest to fail, as many as save most seconds; and how likely
        they are to fail in one of these places. Where none saves any, or nobody knows, it is only
        tried; that is the last value. rate: tokens per second that time brings otherwise.
        """
        posteriors = [(r, i) for i, draft in enumerate(drafts) for r in draft.branches.values()]
        found = sorted(posteriors, reverse=True)
        chosen, likely, tried = [], 0.0, not self.times.known
        if found:
            mass = np.cumsum([posterior for posterior, _ in found])
            seconds = self.times.of(np.arange(1, len(found) + 1))
            saved = self.saved(mass, rate, seconds)
            most = int(saved.argmax())
            if self.goes_on(saved[most]):
                chosen, likely = [i for _, i in found[: most + 1]], float(mass[most])
                tried = tried or bool(saved[most] <= 0)
        return [chosen.count(i) for i in range(len(drafts))], likely, tried


class Arm:
    """One way to spend a round, and what it has been worth."""

    def __init__(self, name: str, tokens: float, planned: float) -> None:
        self.name = name
        self.drafts = DraftTimes()
        # What a round was expected to bring and to take, and times that it took longer than that,
        # beside what the machine did to all.
        self.tokens, self.planned, self.bias = Average(tokens), Average(planned), Average(1.0)
        self.waited = 0.0  # seconds of other rounds since the last one of this
        self._promises: deque[Sizes] = deque(maxlen=_RECENT)

    def expect(self, tokens: float, planned: float, sizes: Sizes) -> None:
        self.tokens.add(tokens)
        self.planned.add(planned)
        self._promises.append(sizes)

    def plan(self, seconds: Callable[[Any], Any]) -> None:
        """Expect of an answer what the last drafts would promise behind its context."""
        fixed = float(self.drafts.of())
        best = [(sizes, sizes.best(seconds, fixed)[0]) for sizes in self._promises]
        if best:
            self.tokens.fade(mean(float(sizes.expected[n - 1]) for sizes, n in best))
            self.planned.fade(mean(fixed + sizes.cost(seconds, n) for sizes, n in best))
        elif self.drafts.known:
            self.planned.fade(fixed + float(seconds(GUESSED_ROWS)))

    @property
    def seconds(self) -> float:
        return self.planned.mean * self.bias.mean

    @property
    def rate(self) -> float:
        return self.tokens.mean / self.seconds

    @property
    def hoped(self) -> float:
        """The rate that it may have: the less it was tried, the more."""
        return self.rate * (1 + _HOPE / math.sqrt(self.tokens.weight))

    def loss(self, rate: float) -> float:
        """Seconds that a round of this costs more than the same tokens at `rate`."""
        return self.seconds - self.tokens.mean / rate


@dataclass(frozen=True)
class Cut:
    """The parts of proposals that promise most tokens per second together."""

    parts: list[Proposal]  # one for each sequence
    tokens: float  # that a round with them should bring
    before: float  # seconds of their drafts
    seconds: float  # that the round should take
    sizes: Sizes  # what other numbers of nodes promise
    beside: int = 0  # rows of others that share the pass
    # Where a second pass was made: what would have been verified without it, how likely that was to
    # fail where the pass went on, and the tokens that further rows, if any, cost in time
    without: Sequence[Tree] = ()
    mass: float = 0.0
    further_rows: float = 0.0

    @property
    def drafts(self) -> bool:
        return self.rows > len(self.parts) + self.beside

    @property
    def rows(self) -> int:
        return sum(len(part.tree) for part in self.parts) + self.beside

    def gain(self, accepted: Sequence[Accepted]) -> float:
        """Tokens that a second pass brought, less those that its further rows cost."""
        pairs = zip(self.without, accepted, strict=True)
        more = sum(len(each.tokens) - brought(tree, each.tokens) for tree, each in pairs)
        return more - self.further_rows


@dataclass
class Experience:
    """What sessions with one pair and one method have learned, kept from one to the next."""

    arms: list[Arm]  # plain decoding first
    reliability: Reliability
    times: RoundTimes
    second: Continued = field(default_factory=lambda: Continued(GAIN))
    # Of drafts made step by step: what further steps brought, by the chances of what they continue
    further: Continued = field(default_factory=lambda: Continued(_NEXT))
    rounds: int = 0  # that it has learned from, with those of what it began with

    @property
    def best(self) -> Arm:
        return max(self.arms, key=lambda arm: arm.rate)

    def choose(self) -> tuple[Arm, tuple[tuple[str, float], ...], bool]:
        """The arm of this round, the rates that it was chosen by, and whether it is only tried."""
        machine, best = self.times.machine, self.best
        others = [arm for arm in self.arms if arm is not best]
        rates = tuple((arm.name, arm.rate / machine) for arm in (best, *others))
        for arm in others:
            if arm.waited * _PROBES >= arm.loss(best.rate) * machine:
                return arm, rates, True
        arm = max(self.arms, key=lambda arm: arm.hoped)
        return arm, rates, arm is not best

    def retime(self, timed: PassTimes | None) -> None:
        """Take times of passes that were measured since it took the last."""
        if timed is None or timed is self.times.given:
            return
        guessed = self.times.timed is None
        self.times.retime(timed)
        if guessed:
            self._plan_in_seconds()

    def _plan_in_seconds(self) -> None:
        """Until a pass is timed plans are in passes over one row, which is what `GUESS` tells."""
        one_row = self.times.plain(1, ())
        for arm in self.arms:
            drafts = float(arm.drafts.of())  # in seconds from the first
            arm.planned = Average(drafts + max(arm.planned.mean - drafts, 0.0) * one_row)

    def spent(self, arm: Arm, cut: Cut, took: float) -> None:
        self.rounds += 1
        guessed = self.times.timed is None
        drafted, machine = cut.drafts or arm is not self.arms[0], self.times.machine
        seconds = self.times.learn(cut.rows, drafted, cut.before, took, cut.seconds)
        if not guessed:
            arm.bias.add(seconds / (cut.seconds * machine))
        elif self.times.timed is not None:
            self._plan_in_seconds()
        for continued in (self.second, self.further):
            continued.waited += took
        for other in self.arms:
            other.waited = 0.0 if other is arm else other.waited + took
