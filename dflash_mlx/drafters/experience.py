"""What rounds have brought, by how they were spent, and how the next one is to be spent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.costs import Average, DraftTimes, RoundTimes
from dflash_mlx.drafters.growth.reliability import Reliability, Sizes
from dflash_mlx.drafters.two_pass import FirstDraft
from dflash_mlx.engine.drafter import Proposal

_PROBES = 0.01  # of the time may go into rounds that try what looks slower
_RECENT = 16  # drafts whose promises are remembered
_GAIN = 0.5  # tokens that a second pass is first believed to bring where a draft fails
_PAIRED = 64  # second passes that are remembered: most bring nothing, some a whole branch
GUESSED_ROWS = 8  # of a drafter that has not drafted yet


@dataclass(frozen=True)
class Instead:
    """What would have been verified without the second pass that was made."""

    trees: Sequence[Tree]  # of each sequence
    mass: float  # the posterior of failing where the pass went on
    rows: float  # tokens that its tree's further rows, if any, cost in time

    @classmethod
    def of(
        cls, trees: Sequence[Tree], drafts: Sequence[FirstDraft], counts: Sequence[int], rows: float
    ) -> Instead:
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

    What was brought counts here, as luck is the same for both trees.
    """

    def __init__(self) -> None:
        self.times = DraftTimes()
        self.gain = Average(_GAIN, _PAIRED)  # tokens beyond the first drafts', less its rows' cost
        self.mass = Average(1.0, _PAIRED)  # the posterior of failing where it went on
        self.waited = 0.0  # seconds since the last one

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
        self.gain.add(instead.gain(accepted) - instead.rows)
        self.mass.add(instead.mass)


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
        """Remember what a round promised, and what other numbers of nodes would have."""
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
    instead: Instead | None = None  # without the second pass, where there was one

    @property
    def drafts(self) -> bool:
        """Whether anything is verified beside the target's own tokens."""
        return self.rows > len(self.parts)

    @property
    def rows(self) -> int:
        return sum(len(part.tree) for part in self.parts)


@dataclass
class Experience:
    """What sessions with one pair and one method have learned, kept from one to the next."""

    arms: list[Arm]  # plain decoding first
    reliability: Reliability
    times: RoundTimes
    second: SecondPass = field(default_factory=SecondPass)

    @property
    def best(self) -> Arm:
        return max(self.arms, key=lambda arm: arm.rate)

    def choose(self) -> tuple[Arm, tuple[tuple[str, float], ...], bool]:
        """The arm of this round, the rates that it was chosen by, and whether it is only tried."""
        machine, best = self.times.machine.mean, self.best
        others = [arm for arm in self.arms if arm is not best]
        rates = tuple((arm.name, arm.rate / machine) for arm in (best, *others))
        for arm in others:
            if arm.waited * _PROBES >= arm.loss(best.rate) * machine:
                return arm, rates, True
        return best, rates, False

    def spent(self, arm: Arm, cut: Cut, took: float) -> None:
        drafted, machine = cut.drafts or arm is not self.arms[0], self.times.machine.mean
        seconds = self.times.learn(cut.rows, drafted, cut.before, took, cut.seconds)
        arm.bias.add(seconds / (cut.seconds * machine))
        self.second.waited += took
        for other in self.arms:
            other.waited = 0.0 if other is arm else other.waited + took
