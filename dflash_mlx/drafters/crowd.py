"""Several sequences, one budget: drafts for all or for none, and the best nodes of all trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.experience import Arm, Experience
from dflash_mlx.drafters.growth.reliability import Seconds, Sizes, reach
from dflash_mlx.engine.drafter import Proposal, Reason
from dflash_mlx.engine.state import State
from dflash_mlx.target.pass_times import PassTimes


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

    def draft(self, arm: Arm, states: Sequence[State], share: int) -> list[Proposal]:
        """What the arm proposes for each sequence, with what was looked up."""


class Crowd:
    """What `Adaptive` does for one sequence, for a number of them that step together.

    Tokens and seconds of an arm are of all of them in one round. experience: begins with what one
    sequence has taught, and is of this number alone; how far drafts can be trusted is common.
    """

    def __init__(self, chooser: Chooser, count: int) -> None:
        self._chooser, self._count = chooser, count
        one = chooser.experience
        arms = [self._arm_like(arm) for arm in one.arms]
        self.experience = Experience(arms, one.reliability)
        self._last: WeakKeyDictionary[State, Tree] = WeakKeyDictionary()
        self._asked: tuple[Arm, float, float, bool] | None = None  # arm, planned, start, drafted

    def _arm_like(self, arm: Arm) -> Arm:
        one_row = float(self._chooser.times.of(1))
        planned = float(self._chooser.times.of(self._count)) + max(arm.seconds - one_row, 0.0)
        return Arm(arm.name, arm.tokens.mean * self._count, planned)

    def propose(self, states: Sequence[State], budget: int) -> list[Proposal]:
        """A part of each sequence's tree, so that all bring most tokens per second together."""
        now = self._chooser.clock()
        self._learn(states, now)
        arm, rates, again = self.experience.choose()
        drafts = self._chooser.draft(arm, states, budget // len(states))
        seconds = partial(self._chooser.times.of, contexts=[s.position for s in states])
        draft_seconds = arm.draft_seconds(int(np.mean([s.position for s in states])))
        cut, planned = self._cut(arm, drafts, seconds, draft_seconds, budget)
        drafted = any(len(proposal.tree) > 1 for proposal in cut)
        self._asked = arm, planned, now, drafted
        pairs = zip(states, cut, strict=True)
        self._last = WeakKeyDictionary((state, proposal.tree) for state, proposal in pairs)
        plain = self.experience.arms[0]
        slower = self.experience.machine.mean * plain.bias.mean
        plain_seconds = float(seconds(len(states))) * slower
        why = Reason(drafted=arm is not plain, checked=drafted, tried=again, rates=rates)
        return [replace(proposal, why=why, plain_seconds=plain_seconds) for proposal in cut]

    def _cut(
        self,
        arm: Arm,
        drafts: Sequence[Proposal],
        seconds: Callable[[Any], Any],
        draft_seconds: float,
        budget: int,
    ) -> tuple[list[Proposal], float]:
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
        fixed = draft_seconds + max(self.experience.beyond.mean, 0.0)
        rates = sizes.rates(seconds, fixed)
        count = int(np.argmax(rates[len(roots) - 1 :])) + len(roots)
        kept = np.sort(sizes.ends[:count])
        planned = draft_seconds + sizes.cost(seconds, count)
        arm.expect(float(expected[count - 1]), planned, sizes)
        parts = [kept[(kept >= a) & (kept < b)] - a for a, b in pairwise(ends)]
        pairs = zip(drafts, parts, strict=True)
        return [draft.part(part.tolist()) for draft, part in pairs], planned

    def _learn(self, states: Sequence[State], now: float) -> None:
        """Take in how the last step went, where all who took part in it are here."""
        known = [s for s in states if s.last is not None and self._last.get(s) is s.last.tree]
        for state in known:
            if state.last is not None and len(state.last.tree) > 1:
                self.experience.reliability.learn(state.last)
        all_here = len(known) == len(states) == len(self._last)
        if self._asked is not None and all_here and not any(s.delayed for s in states):
            arm, planned, start, drafted = self._asked
            self.experience.spent(arm, planned, now - start, drafted)
        self._asked = None


def _likeliest_chain(draft: Proposal, reached: Any) -> Proposal:
    """The path with most expected tokens, for targets that verify nothing else."""
    chains = Sizes.of_chain(draft.tree, reached, len(draft.tree))
    last = chains.ends[int(chains.expected.argmax())]
    return draft.part(np.flatnonzero(draft.tree.ancestors[last]).tolist())
