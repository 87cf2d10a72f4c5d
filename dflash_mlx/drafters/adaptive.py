"""Plain decoding, one draft or both, round by round: whatever gives most tokens per second here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from dflash_mlx.core.config import DecodeConfig, SamplingConfig, StructureConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.crowd import Crowd, Cut, Cutting
from dflash_mlx.drafters.experience import GUESSED_ROWS, Arm, Average, Experience, Instead
from dflash_mlx.drafters.growth.reliability import (
    Reliability,
    Seconds,
    Sizes,
    never,
    reach,
    worth_keeping,
)
from dflash_mlx.drafters.lookup import MOST_LOOKED_UP, lookup
from dflash_mlx.drafters.method import LOOKUP, TokenSource
from dflash_mlx.drafters.two_pass import FirstDraft, TwoPass
from dflash_mlx.engine.drafter import Drafter, Proposal, Reason
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import Context, State
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.pass_times import PassTimes, forget_times, stored_times

_PLAIN = "plain decoding"
_BLIND = 8  # rounds of plain decoding that follow each other without a look at their tokens
_IDLE = 1.02  # tokens per plain round up to which looking is not worth the wait
_CONTEXTS = (128, 2048)  # tokens before timed drafts
_NOTHING = Sizes(np.ones(1), np.zeros(1, int), np.zeros(1))  # was found to draft
MOST_NODES = 48  # of a tree that the budget then cuts


@dataclass(frozen=True)
class _Asked:
    """A round that was proposed: which arm, when, what, and the seconds that it should take.

    start: without what the answer had to wait for its reader until then. instead: without the
    second pass, if there was one.
    """

    arm: Arm
    start: float
    tree: Tree
    planned: float
    instead: Instead | None


@dataclass(frozen=True)
class Scope:
    """What may be proposed.

    sources: names of where drafted tokens come from. looks_up: whether n-gram continuations join
    every tree, and a plain round; they cost no pass. chains: whether nothing else is verified.
    """

    sources: tuple[str, ...] = ()
    looks_up: bool = True
    chains: bool = False


def _behind(times: Sequence[PassTimes]) -> PassTimes:
    """The first of them, with those behind longer contexts."""
    return replace(times[0], deeper=tuple(times[1:]))


class Adaptive:
    """Chooses among plain decoding and drafts, and verifies the part of a tree that pays.

    model: whose name and context this has. drafters: by name; they share that context, and their
    trees know log-probabilities. Every round goes to the arm with most expected tokens per second;
    another is tried again as soon as what that may cost is `_PROBES` of the time since it was last
    tried, and a draft at the beginning of every answer, which may be easier than the last. What
    counts is what the trees promised, going by what became of others, not what they brought: that
    is mostly luck, and two unlucky drafts must not park what pays. clock: seconds. What was
    learned, and whether plain rounds run unseen, holds for all its sequences.
    """

    def __init__(
        self,
        model: Drafter,
        drafters: dict[str, Drafter],
        times: PassTimes,
        scope: Scope = Scope(),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model, self._drafters = model, drafters
        self.name, self.aux_layers = model.name, model.aux_layers
        self._scope, self.times, self.clock = scope, times, clock
        self.only_chains = scope.chains
        self.branching_cost: Seconds | None = times.branching if times.trees else None
        one_row = float(times.of(1))
        arms = [Arm(_PLAIN, 1.0, one_row), *(Arm(label, 2.0, one_row) for label in drafters)]
        self.experience = Experience(arms, Reliability(scope.sources))  # or of an earlier session
        self._asked: WeakKeyDictionary[State, _Asked] = WeakKeyDictionary()
        self._blind = 0
        self._crowds: dict[int, Crowd] = {}

    @property
    def rounds_ahead(self) -> int:
        """One while plain rounds follow each other unseen, else none."""
        return 1 if self._blind else 0

    def new_context(self) -> Context:
        """The drafters'."""
        return self._model.new_context()

    def time_drafts(self, target: Target) -> None:
        """Time each drafter behind 128 and more tokens, a fraction of a second."""
        state = State(target.new_cache(), self.new_context())
        state.anchor, state.end = mx.array([0]), sum(_CONTEXTS)
        arms = [arm for arm in self.experience.arms if arm.name in self._drafters]
        first: dict[str, list[PassTimes]] = {arm.name: [] for arm in arms}
        second: list[PassTimes] = []
        width = target.embedding()(mx.array([0])).shape[-1] * len(self.aux_layers)
        for before, context in zip((0, *_CONTEXTS), _CONTEXTS, strict=False):
            if before and context >= target.context_length:
                break
            rows = context - before
            features = mx.zeros((rows, width), target.dtype) if self.aux_layers else None
            state.context.append(mx.zeros(rows, mx.int32), features)
            for label, drafter in self._drafters.items():
                begin = partial(self._begin, drafter, [state], MOST_NODES)
                first[label].append(PassTimes((1,), (self._time(begin),), context))
                if isinstance(drafter, TwoPass):
                    drafts = drafter.begin([state], [MOST_NODES])
                    counts = tuple(sorted({1, max(len(drafts[0].branches), 1)}))
                    goes_on = [partial(drafter.go_on, [state], drafts, [n]) for n in counts]
                    second.append(PassTimes(counts, tuple(map(self._time, goes_on)), context))
        for arm in arms:
            arm.drafts.timed = _behind(first[arm.name])
            arm.planned = Average(arm.drafts.of(0) + float(self.times.of(GUESSED_ROWS)))
        if second:
            self.experience.second.times.timed = _behind(second)

    def _time(self, draft: Callable[[], Sequence[Proposal]]) -> float:
        """Seconds of a draft, the median of a few without the first."""
        times = []
        for _ in range(4):
            start = self.clock()
            draft()[0].tree.wait()
            times.append(self.clock() - start)
        return median(times[1:])

    def propose(self, states: Sequence[State], budget: int) -> list[Proposal]:
        """For each sequence the part of the chosen draft with most expected tokens per second."""
        if len(states) == 1:
            return [self._propose(states[0], budget)]
        self._blind = 0
        if len(states) not in self._crowds:
            self._crowds[len(states)] = Crowd(self, len(states))
        return self._crowds[len(states)].propose(states, budget)

    def draft(
        self, arm: Arm, states: Sequence[State], share: int, rate: float, cut: Cutting
    ) -> Cut:
        """The best part of what the arm proposes for each sequence, with what was looked up.

        rate: tokens per second that time brings otherwise. A second pass follows where it pays.
        """
        drafter, drafts = self._drafters.get(arm.name), [Proposal(Tree.chain())] * len(states)
        position, start = sum(state.position for state in states) // len(states), self.clock()
        if drafter is not None:
            drafts = self._begin(drafter, states, share)
            for draft in drafts:
                draft.tree.wait()
            arm.drafts.took(self.clock() - start, position)
        drafts = self._looked_up(drafts, states, share)
        before, second = float(arm.drafts.of(position)), self.experience.second
        best = usual = cut(drafts, before)
        begun = [draft for draft in drafts if isinstance(draft, FirstDraft)]
        counts, tried = second.branches(begun, rate, position)
        if isinstance(drafter, TwoPass) and any(counts):
            start = self.clock()
            more = drafter.go_on(states, begun, counts)
            second.times.took(self.clock() - start, position, sum(counts))
            spent = float(second.times.of(position, sum(counts)))
            both = cut(self._looked_up(more, states, share), before + spent)
            trees, dearer = [part.tree for part in best.parts], both.seconds - spent - best.seconds
            instead = Instead.of(trees, begun, counts, rate * dearer)
            best = replace(both, sizes=both.sizes.dearer(spent), instead=instead)
            usual = usual if tried else best
        arm.expect(usual.tokens, usual.seconds, usual.sizes)
        return best

    def _begin(self, drafter: Drafter, states: Sequence[State], share: int) -> list[Proposal]:
        """What the drafter proposes, of two passes the first."""
        if isinstance(drafter, TwoPass):
            return [*drafter.begin(states, [min(state.remaining, share) for state in states])]
        return drafter.propose(states, share * len(states))

    def _looked_up(
        self, drafts: Sequence[Proposal], states: Sequence[State], share: int
    ) -> list[Proposal]:
        """The proposals with n-gram continuations, where these are wanted and nothing was drawn."""
        found = []
        for draft, state in zip(drafts, states, strict=True):
            most = min(state.remaining - 1, share - 1, MOST_LOOKED_UP)
            wanted = self._scope.looks_up and draft.q is None
            if wanted and (seen := lookup(state.tokens, most)).tokens:
                tokens, constraint = seen.tokens, state.constraint
                if constraint is not None:
                    tokens = tokens[: constraint.run(state.tokens, tokens)]
                tree = draft.tree.merge(tokens, seen.logprobs[: len(tokens)], LOOKUP.name)
                draft = replace(draft, tree=tree)
            found.append(draft)
        return found

    def _propose(self, state: State, share: int) -> Proposal:
        now = self.clock() - state.paused
        self._learn(state, now)
        if state.last is None:
            self._begin_answer(state)
        arm, rates, again = self.experience.choose()
        seconds, plain = self._seconds(state), self.experience.arms[0]
        cutting, rate = partial(self._cut, seconds, share), self.experience.rate
        if state.constraint is None and self._goes_blind(arm):
            best = cutting([Proposal(Tree.chain())], 0.0)
        else:
            best = self.draft(arm, [state], share, rate, cutting)
        (proposal,) = best.parts
        continued = best.instead is not None
        why = Reason(arm is not plain, best.drafts, again, rates, continued)
        self._asked[state] = _Asked(arm, now, proposal.tree, best.seconds, best.instead)
        slower = self.experience.machine.mean * plain.bias.mean
        return Proposal(proposal.tree, proposal.q, why, float(seconds(1)) * slower)

    def _seconds(self, state: State) -> Callable[[Any], Any]:
        """Of a target pass over n rows behind this sequence."""
        return partial(self.times.of, contexts=(state.position,))

    def _begin_answer(self, state: State) -> None:
        """Expect what other answers taught, but not for long; while parked, try a draft at once."""
        plain, *drafts = arms = self.experience.arms
        for arm in arms:
            arm.plan(self._seconds(state), arm.drafts.of(state.position))
        rate = self.experience.rate
        if drafts and plain.rate == rate:
            min(drafts, key=lambda arm: arm.loss(rate)).waited = math.inf

    def _cut(self, seconds: Seconds, most: int, drafts: Sequence[Proposal], before: float) -> Cut:
        """The part of a proposal that pays. before: seconds that its drafts took."""
        (draft,) = drafts
        if len(draft.tree) == 1:
            return Cut([draft], 1.0, before + float(seconds(1)), _NOTHING)
        reached = reach(draft.tree, self.experience.reliability.chances(draft.tree))
        fixed = before + max(self.experience.beyond.mean, 0.0)
        branching = never if self.only_chains else self.branching_cost
        kept, sizes = worth_keeping(draft.tree, reached, seconds, fixed, most, branching)
        took, expected = before + sizes.cost(seconds, len(kept)), float(reached[kept].sum())
        return Cut([draft.part(kept)], expected, took, sizes)

    def _learn(self, state: State, now: float) -> None:
        """Take in how the last round went."""
        last = self._asked.pop(state, None)
        if last is None or state.last is None or state.last.tree is not last.tree:
            return
        drafted = len(last.tree) > 1
        if drafted:
            self.experience.reliability.learn(state.last)
        if last.instead is not None:
            self.experience.second.learn(last.instead, [state.last])
        if not state.delayed:
            self.experience.spent(last.arm, last.planned, now - last.start, drafted)

    def _goes_blind(self, arm: Arm) -> bool:
        """Whether this round need not see the tokens before it.

        Then it can start before the last one is read. Looking pays where lookups have hit lately;
        otherwise one plain round in `_BLIND` looks.
        """
        if arm.name != _PLAIN or (self._scope.looks_up and arm.tokens.mean > _IDLE):
            self._blind = 0
            return False
        if self._blind == 0 or not self._scope.looks_up:
            self._blind = _BLIND
            return not self._scope.looks_up
        self._blind -= 1
        return True


def within_budget(
    model: Drafter,
    drafters: dict[str, Drafter],
    pair: Pair,
    config: DecodeConfig,
    sources: Sequence[TokenSource],
    chains: bool = False,
) -> Adaptive:
    """Whatever pays here, with one or several drafters or with lookups alone.

    model, drafters: as in `Adaptive`. sources, chains: as in `Scope`. Pass times stay with the
    target, what sessions have learned with the pair; where the two contradict each other, passes
    are timed again.
    """
    target = pair.target
    used = pair.drafter_name, len(pair.drafters), target.kernels.mode
    settings = replace(config, sampling=SamplingConfig(), stop=(), max_tokens=1)
    settings = replace(settings, structure=StructureConfig())
    key = (*used, model.name, settings)
    known = pair.learned.get(key)
    again = known is not None and known.contradicts_times
    if again:
        forget_times(target)
        del pair.learned[key]
    if target.pass_times is None:  # once per model that is loaded
        target.pass_times = stored_times(target, config.recalibrate)
    names = tuple(source.name for source in sources)
    scope = Scope(names, config.lookup, chains or not target.takes_trees)
    adaptive = Adaptive(model, drafters, target.pass_times, scope)

    def learn() -> Experience:
        if drafters:
            adaptive.time_drafts(target)
        return adaptive.experience

    adaptive.experience = pair.recall(key, learn)
    adaptive.experience.timed_again |= again
    return adaptive
