"""Several sequences, one budget: drafts for all or for none, and the best nodes of all trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.experience import Arm, Experience, Instead
from dflash_mlx.drafters.growth.reliability import Seconds, Sizes, reach
from dflash_mlx.engine.drafter import Proposal, Reason
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.pass_times import PassTimes


@dataclass(frozen=True)
class Cut:
    """The parts of proposals, one for each sequence, that promise most tokens per second together.

    tokens, seconds: that a round with them should bring and take. sizes: what other numbers of
    nodes promise. instead: what would be verified without the second pass, where there was one.
    """

    parts: list[Proposal]
    tokens: float
    seconds: float
    sizes: Sizes
    instead: Instead | None = None

    @property
    def drafts(self) -> bool:
        """Whether anything is verified beside the target's own tokens."""
        return any(len(part.tree) > 1 for part in self.parts)


Cutting = Callable[[Sequence[Proposal], float], Cut]  # of proposals that took so many seconds


class Chooser(Protocol):
    """What `Adaptive` knows and does for one sequence, and for several as well.

    branching_cost: what branches add to a pass, None for nothing. only_chains: whether nothing else
    is verified.
    """

    experience: Experience
    times: PassTimes
    clock: Callable[[], float]
    only_chains: bool
    branching_cost: Seconds | None

    def draft(
        self, arm: Arm, states: Sequence[State], share: int, rate: float, cut: Cutting
    ) -> Cut:
        """The best part of what the arm proposes for all sequences, with what was looked up."""


class Crowd:
    """What `Adaptive` does for one sequence, for a number of them that step together.

    Tokens and seconds of an arm are of all of them in one round. experience: begins with what one
    sequence has taught, and is of this number alone; how far drafts can be trusted is common.
    """

    def __init__(self, chooser: Chooser, count: int) -> None:
        self._chooser, self._count = chooser, count
        one = chooser.experience
        arms = [self._arm_like(arm) for arm in one.arms]
        self.experience = Experience(arms, one.reliability, one.second)
        self._last: WeakKeyDictionary[State, Tree] = WeakKeyDictionary()
        self._asked: tuple[Arm, Cut, float] | None = None  # and when

    def _arm_like(self, arm: Arm) -> Arm:
        one_row = float(self._chooser.times.of(1))
        planned = float(self._chooser.times.of(self._count)) + max(arm.seconds - one_row, 0.0)
        return Arm(arm.name, arm.tokens.mean * self._count, planned)

    def propose(self, states: Sequence[State], budget: int) -> list[Proposal]:
        """A part of each sequence's tree, so that all bring most tokens per second together."""
        now = self._chooser.clock()
        self._learn(states, now)
        arm, rates, again = self.experience.choose()
        seconds = partial(self._chooser.times.of, contexts=[s.position for s in states])
        cutting, rate = partial(self._cut, seconds, budget), self.experience.rate
        cut = self._chooser.draft(arm, states, budget // len(states), rate, cutting)
        self._asked = arm, cut, now
        pairs = zip(states, cut.parts, strict=True)
        self._last = WeakKeyDictionary((state, proposal.tree) for state, proposal in pairs)
        plain = self.experience.arms[0]
        slower = self.experience.machine.mean * plain.bias.mean
        plain_seconds = float(seconds(len(states))) * slower
        why = Reason(arm is not plain, cut.drafts, again, rates, cut.instead is not None)
        return [replace(part, why=why, plain_seconds=plain_seconds) for part in cut.parts]

    def _cut(
        self,
        seconds: Callable[[Any], Any],
        budget: int,
        drafts: Sequence[Proposal],
        before: float,
    ) -> Cut:
        """The nodes that promise most tokens per second together, all roots among them."""
        chances = self.experience.reliability.chances
        if self._chooser.only_chains:
            drafts = [
                _likeliest_chain(draft, reach(draft.tree, chances(draft.tree))) for draft in drafts
            ]
        reached = [reach(draft.tree, chances(draft.tree)) for draft in drafts]
        ends = list(accumulate(map(len, reached), initial=0))
        roots = np.array(ends[:-1])
        order = np.concatenate(reached)
        order[roots] = 2.0  # before all others, which may be certain as well
        sizes = Sizes.of_tree(order, budget, self._chooser.branching_cost)
        expected = np.minimum(order[sizes.ends], 1.0).cumsum()
        sizes = Sizes(expected, sizes.ends, sizes.extra)
        fixed = before + max(self.experience.beyond.mean, 0.0)
        rates = sizes.rates(seconds, fixed)
        count = int(np.argmax(rates[len(roots) - 1 :])) + len(roots)
        kept = np.sort(sizes.ends[:count])
        planned = before + sizes.cost(seconds, count)
        parts = [kept[(kept >= a) & (kept < b)] - a for a, b in pairwise(ends)]
        pairs = zip(drafts, parts, strict=True)
        cut = [draft.part(part.tolist()) for draft, part in pairs]
        return Cut(cut, float(expected[count - 1]), planned, sizes)

    def _learn(self, states: Sequence[State], now: float) -> None:
        """Take in how the last step went, where all who took part in it are here."""
        known = [s for s in states if s.last is not None and self._last.get(s) is s.last.tree]
        for state in known:
            if state.last is not None and len(state.last.tree) > 1:
                self.experience.reliability.learn(state.last)
        all_here = len(known) == len(states) == len(self._last)
        if self._asked is not None and all_here:
            arm, cut, start = self._asked
            if cut.instead is not None:
                last = [state.last for state in self._last if state.last is not None]
                self.experience.second.learn(cut.instead, last)
            if not any(s.delayed for s in states):
                self.experience.spent(arm, cut.seconds, now - start, cut.drafts)
        self._asked = None


def _likeliest_chain(draft: Proposal, reached: Any) -> Proposal:
    """The path with most expected tokens, for targets that verify nothing else."""
    chains = Sizes.of_chain(draft.tree, reached, len(draft.tree))
    last = chains.ends[int(chains.expected.argmax())]
    return draft.part(np.flatnonzero(draft.tree.ancestors[last]).tolist())
