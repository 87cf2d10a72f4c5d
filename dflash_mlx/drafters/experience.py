"""What rounds have cost and brought, and how the next one is to be spent."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import numpy as np

from dflash_mlx.core.tree import Accepted, Tree, accept
from dflash_mlx.drafters.growth.grow import FIRST
from dflash_mlx.drafters.growth.reliability import Reliability, Sizes
from dflash_mlx.drafters.method import FirstDraft
from dflash_mlx.drafters.round_times import RECENT, DraftTimes, RoundTimes
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.verifier.pass_times import PassTimes

_PROBES = 0.01  # of the time may go into rounds that try what looks slower
GAIN = 0.5  # tokens that a second pass is first believed to bring where a draft fails
_NEXT = 0.7  # ... that one step more is, where all so far is right
_PAIRED = 64  # second passes that are remembered: most bring nothing, some a whole branch
GUESSED_ROWS = 8  # of a drafter that has not drafted yet
_MEMORY = 24  # rounds that an average remembers
_TRUST = 2.0  # rounds that the first guess weighs as much as
_FADED = 4.0  # rounds that what other answers taught weighs as much as
_SHARED = 0.5  # tokens that a draft brings less where lookups promise one less than usual
SAFE = 4  # rows that cost little more than one wherever a draft pays at all


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


def of_further_steps(accepted: Accepted) -> int:
    """Accepted tokens of a draft model that its first step could not have drafted."""
    tree = accepted.tree
    return sum(tree.depths[node] > 1 and tree.sources[node] == FIRST for node in accepted.path)


def along(tree: Tree, text: Sequence[int]) -> Accepted:
    """What a round that verifies a tree accepts where the target says `text`, of what is known."""
    known = (*text, -1)
    found = accept(tree, lambda path: known[len(path) - 1])
    return replace(found, ends=len(found.path) > len(text))


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
        self.looked_up = Average(0.0)  # tokens that lookups alone promised beside its drafts
        self.waited = 0.0  # seconds of other rounds since the last one of this
        self._promises: deque[Sizes] = deque(maxlen=RECENT)

    def expect(self, cut: Cut, lookups: float = 0.0) -> None:
        """lookups: tokens that these alone promised of the same round, 0 where no draft is made."""
        self.tokens.add(cut.tokens)
        self.planned.add(cut.seconds)
        self.looked_up.add(lookups)
        self._promises.append(cut.sizes)

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

    def beside(self, lookups: float) -> float:
        """Tokens of a round where lookups promise so many: less, where that is less than usual."""
        tokens = self.tokens.mean
        return tokens - _SHARED * min(max(self.looked_up.mean - lookups, 0.0), tokens)

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
        more = sum(len(each.tokens) - len(along(tree, each.tokens).path) for tree, each in pairs)
        return more - self.further_rows


@dataclass
class Experience:
    """What sessions with one pair and one method have learned, kept from one to the next."""

    arms: list[Arm]  # plain decoding first
    reliability: Reliability
    lookups: Reliability  # of lookups by themselves, in all rounds that looked
    times: RoundTimes
    second: Continued = field(default_factory=lambda: Continued(GAIN))
    # Of drafts made step by step: what further steps brought, by the chances of what they continue
    further: Continued = field(default_factory=lambda: Continued(_NEXT))
    rounds: int = 0  # that it has learned from, with those of what it began with

    @property
    def best(self) -> Arm:
        return max(self.arms, key=lambda arm: arm.rate)

    def choose(self, alone: Cut | None = None) -> tuple[Arm, tuple[tuple[str, float], ...], bool]:
        """The arm of this round, the rates that it was chosen by, and whether it is only tried.

        alone: what lookups promise of this very round, which counts where it is less than what they
        did of late, as what they promise too much shows in the mean alone. None: not looked.
        """
        machine, plain = self.times.machine, self.arms[0]
        lookups = math.inf if alone is None else alone.tokens
        worth = {arm: (arm.beside(lookups), arm.seconds) for arm in self.arms}
        if alone is not None:
            now = alone.tokens, alone.seconds * plain.bias.mean
            worth[plain] = min(worth[plain], now, key=lambda each: each[0] / each[1])
        rate = {arm: tokens / seconds for arm, (tokens, seconds) in worth.items()}
        best, *others = sorted(self.arms, key=rate.__getitem__, reverse=True)
        rates = tuple((arm.name, rate[arm] / machine) for arm in (best, *others))
        for arm in others:
            tokens, seconds = worth[arm]  # and what they cost more than at the best rate
            if arm.waited * _PROBES >= (seconds - tokens / rate[best]) * machine:
                return arm, rates, True
        return best, rates, False

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
