"""Plain decoding, one draft or both, round by round: whatever gives most tokens per second here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Accepted, Tree
from dflash_mlx.drafters.autoregressive import StepByStep
from dflash_mlx.drafters.continuations.recall import MOST_LOOKED_UP, Lookup, join
from dflash_mlx.drafters.experience import (
    SAFE,
    Arm,
    Average,
    Cut,
    Experience,
    along,
    of_further_steps,
)
from dflash_mlx.drafters.growth.reliability import (
    Reliability,
    Seconds,
    Sizes,
    never,
    reach,
    worth_keeping,
)
from dflash_mlx.drafters.method import FirstDraft, Method, TwoPass
from dflash_mlx.drafters.round_times import RoundTimes
from dflash_mlx.engine.drafter import Drafter, Proposal, Reason, allowed
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import Context, State
from dflash_mlx.verifier.pass_times import PassTimes, stored_times

_PLAIN = "plain decoding"
_BLIND = 8  # rounds of plain decoding that follow each other without a look at their tokens
_IDLE = 1.02  # tokens per plain round up to which looking is not worth the wait
_TAUGHT = 3  # rounds that are enough to go by


@dataclass(frozen=True)
class Scope:
    """What may be proposed."""

    sources: tuple[str, ...] = ()  # names of where drafted tokens come from
    drafts: bool = True  # the drafter is run; otherwise lookups alone
    looks_up: bool = True  # n-gram continuations join every tree, and a plain round, at no cost
    chains: bool = False  # nothing else is verified


@dataclass(frozen=True, eq=False)
class _Asked:
    """A round that was proposed."""

    known: Experience  # that it is to teach
    arm: Arm
    cut: Cut
    timed: PassTimes | None  # by which it was planned
    start: float  # without what the answers had to wait for their readers until then
    trees: WeakKeyDictionary[State, tuple[Tree, Tree]]  # and what lookups alone would propose


class BatchBudget:
    """Drafts for all sequences of a step or for none, and verifies the part of all trees that pays.

    Every round goes to the arm with most expected tokens per second; another is tried again as soon
    as what that may cost is `_PROBES` of the time since it was last tried, and a draft at the
    beginning of every answer, which may be easier than the last. What counts is what the trees
    promised of late, going by what became of others, not what they brought: that is mostly luck,
    and two unlucky drafts must not park what pays. Where lookups promise less than usual of this
    round, that counts. What was learned, and whether plain rounds run unseen, holds for all its
    sequences; what several take and bring together is learned by their number.

    drafter: its trees know log-probabilities. times: None where no pass was timed; then trees have
    `SAFE` rows until a round tells how long they take. clock: seconds.
    """

    def __init__(
        self,
        drafter: Drafter,
        times: PassTimes | None,
        scope: Scope = Scope(),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafter, self.name, self.aux_layers = drafter, drafter.name, drafter.aux_layers
        self._scope, self.clock, self._lookup = scope, clock, Lookup()
        self.newest: Callable[[], PassTimes | None] = lambda: times  # may have been timed since
        rounds = RoundTimes(times)
        one_row = rounds.plain(1, ())
        arms = [Arm(_PLAIN, 1.0, one_row)]
        if scope.drafts:
            arms.append(Arm("draft", 2.0, one_row))
        # of one sequence, or of an earlier session
        self.experience = Experience(
            arms, Reliability(scope.sources), Reliability(scope.sources), rounds
        )
        self._together: dict[int, Experience] = {}
        self._asked: WeakKeyDictionary[State, _Asked] = WeakKeyDictionary()
        self._unjudged: list[tuple[Tree, Accepted]] = []  # lookups, of rounds that may still run
        self._blind = 0

    @property
    def rounds_ahead(self) -> int:
        return 1 if self._blind else 0

    def new_context(self) -> Context:
        return self.drafter.new_context()

    def propose(self, states: Sequence[State], budget: int) -> list[Proposal]:
        now = self.clock() - sum(state.paused for state in states)
        one = len(states) + states[0].beside  # each row of others is taken to bring its token
        known = self._known(one)
        self._learn(states, now)
        if all(state.last is None for state in states):
            self._begin_answer(known, states)
        drafts, recalled = [Proposal(Tree.chain())] * len(states), [Tree.chain()] * len(states)
        arm, rates, again = known.choose()
        if one == 1 and states[0].constraint is None and self._goes_blind(arm):
            cut = self._cut(known, states, budget, drafts, 0.0)
        else:
            self._blind = self._blind if one == 1 else 0
            recalled = self._recall(states, budget // len(states))
            cut = self._cut(known, states, budget, _joined(drafts, recalled), 0.0)
            arm, rates, again = known.choose(cut)
            known.arms[0].expect(cut)
        if arm is not known.arms[0]:
            cut = self._draft(known, states, budget, recalled, cut.tokens)
        trees = zip((part.tree for part in cut.parts), recalled, strict=True)
        of_states = WeakKeyDictionary(zip(states, trees, strict=True))
        asked = _Asked(known, arm, cut, known.times.timed, now, of_states)
        self._asked.update((state, asked) for state in states)
        why = Reason(arm is not known.arms[0], cut.drafts, again, rates, bool(cut.without))
        plain = known.times.plain_now(one, _contexts(states))
        return [replace(part, why=why, plain_seconds=plain) for part in cut.parts]

    def _known(self, count: int) -> Experience:
        """What so many sequences have taught; they begin with what those nearest have, or one."""
        own = self.experience if count == 1 else self._together.get(count)
        taught = [n for n, each in self._together.items() if each.rounds >= _TAUGHT]
        if own is not None and (count == 1 or count in taught or not taught):
            return own
        one, near = self.experience, min(taught, key=lambda n: abs(n - count), default=1)
        base, times = self._together.get(near, one), RoundTimes(one.times.timed)
        before, plain = times.plain(near, ()), times.plain(count, ())
        share = count / near
        arms = [
            Arm(a.name, a.tokens.mean * share, plain + max(a.seconds - before, 0.0) * min(share, 1))
            for a in base.arms
        ]
        begun = Experience(arms, one.reliability, one.lookups, times, one.second, one.further)
        begun.rounds = base.rounds if taught else 0
        self._together[count] = begun
        return begun

    def _begin_answer(self, known: Experience, states: Sequence[State]) -> None:
        """Expect what other answers taught, but not for long; while parked, try a draft at once."""
        for each in (self.experience, *self._together.values()):
            each.retime(self.newest())
        plain, *drafts = known.arms
        contexts, count = _contexts(states), len(states) + states[0].beside
        seconds, one_row = partial(known.times.of, contexts=contexts), known.times.plain
        plain.planned = Average(one_row(count, contexts))
        plain.plan(lambda rows: np.where(rows > count, seconds(rows), one_row(count, contexts)))
        for arm in drafts:
            arm.plan(seconds)
        if drafts and known.best is plain:
            min(drafts, key=lambda arm: arm.loss(plain.rate)).waited = math.inf

    def _draft(
        self,
        known: Experience,
        states: Sequence[State],
        budget: int,
        recalled: Sequence[Tree],
        lookups: float,
    ) -> Cut:
        """The best part of a draft joined with lookups, and of a second pass that pays.

        lookups: tokens that these alone promise.
        """
        share, cutting = budget // len(states), partial(self._cut, known, states, budget)
        arm = known.arms[-1]
        drafter, rate, second = self.drafter, known.best.rate, known.second
        drafts, further = self._begin(known, arm, states, share)
        drafts = _joined(drafts, recalled)
        before = float(arm.drafts.of()) + further
        best = cutting(drafts, before)
        best = usual = replace(best, sizes=best.sizes.dearer(further))
        begun = [draft for draft in drafts if isinstance(draft, FirstDraft)]
        counts, mass, tried = second.branches(begun, rate)
        if isinstance(drafter, TwoPass) and any(counts):
            start = self.clock()
            more = drafter.go_on(states, begun, counts)
            for draft in more:
                draft.tree.wait()
            second.times.took(self.clock() - start, sum(counts))
            spent = float(second.times.of(sum(counts)))
            both = cutting(_joined(more, recalled), before + spent)
            best = replace(
                both,
                sizes=both.sizes.dearer(spent),
                without=[part.tree for part in best.parts],
                mass=mass,
                further_rows=rate * (both.seconds - spent - best.seconds),
            )
            usual = usual if tried else best
        arm.expect(usual, lookups)
        return best

    def _begin(
        self, known: Experience, arm: Arm, states: Sequence[State], share: int
    ) -> tuple[list[Proposal], float]:
        """Drafts of one pass or of the steps that pay, and seconds of all steps but the first."""
        drafter, further, rate, start = self.drafter, known.further, known.best.rate, self.clock()
        one, passes, stepped = float(further.times.of()), known.times.of, start

        def another(chance: float, steps: int) -> bool:
            nonlocal stepped
            if steps == 1:
                stepped = self.clock()
            row = float(passes(steps + 2) - passes(1)) / (steps + 1)
            return further.goes_on(further.saved(chance, rate, one + row))

        if isinstance(drafter, StepByStep):
            drafter = drafter.asking(another)
        drafts: list[Proposal]
        if isinstance(drafter, TwoPass):
            drafts = [*drafter.begin(states, [min(state.remaining, share) for state in states])]
        else:
            drafts = drafter.propose(states, share * len(states))
        for draft in drafts:
            draft.tree.wait()
        end = self.clock()
        if drafts[-1].steps:  # which began last, so nothing else was done since its first step
            further.times.took((end - stepped) / len(drafts[-1].steps))
        seconds = float(further.times.of()) * sum(len(draft.steps) for draft in drafts)
        arm.drafts.took(end - start - seconds)
        return drafts, seconds

    def _recall(self, states: Sequence[State], share: int) -> list[Tree]:
        """What was said before, for each sequence; waits for what they say."""
        found = []
        while self._unjudged:
            tree, accepted = self._unjudged.pop()
            self.experience.lookups.learn(along(tree, accepted.tokens))
        for state in states:
            most = min(state.remaining - 1, share - 1, MOST_LOOKED_UP)
            looks_up = self._scope.looks_up and most > 0
            recalled = self._lookup.draft(state, most) if looks_up else Tree.chain()
            found.append(allowed(Proposal(recalled), state).tree)
        return found

    def _cut(
        self,
        known: Experience,
        states: Sequence[State],
        most: int,
        drafts: Sequence[Proposal],
        before: float,
    ) -> Cut:
        times, contexts, beside = known.times, _contexts(states), states[0].beside
        trees = [*(draft.tree for draft in drafts), *[Tree.chain()] * beside]
        seconds = partial(times.of, contexts=contexts)
        if sum(map(len, trees)) == len(trees):
            drafted = before > 0
            took = float(seconds(len(trees))) if drafted else times.plain(len(trees), contexts)
            count = len(trees)
            nothing = Sizes(np.full(count, 1.0 * count), np.arange(count), np.zeros(count), count)
            return Cut([*drafts], 1.0 * count, before, before + took, nothing, beside=beside)
        if times.timed is None:
            most = min(most, max(SAFE, len(trees)))
        believed = known.reliability if before > 0 else known.lookups
        reached = [reach(tree, believed.chances(tree)) for tree in trees]
        kept, count, sizes = worth_keeping(
            trees, reached, seconds, before, most, self._branching(times)
        )
        expected = sum(float(part[nodes].sum()) for part, nodes in zip(reached, kept, strict=True))
        pairs = zip(drafts, kept[: len(drafts)], strict=True)
        parts = [draft.part(nodes) for draft, nodes in pairs]
        took = before + sizes.cost(seconds, count)
        return Cut(parts, expected, before, took, sizes, beside=beside)

    def _branching(self, times: RoundTimes) -> Seconds | None:
        if self._scope.chains:
            return never
        return times.timed.branching if times.timed is not None and times.timed.trees else None

    def _learn(self, states: Sequence[State], now: float) -> None:
        """Take in how the last round went; its time where all who took part in it are here."""
        rounds = []
        for state in states:
            asked = self._asked.pop(state, None)
            if asked is None or state.last is None:
                continue
            tree, recalled = asked.trees[state]
            if state.last.tree is not tree:
                continue
            rounds.append(asked)
            if asked.cut.before and len(tree) > 1:
                asked.known.reliability.learn(state.last)
            if len(recalled) > 1:
                self._unjudged.append((recalled, state.last))
        whole = rounds and all(asked is rounds[0] for asked in rounds)
        if not whole or not len(rounds) == len(states) == len(rounds[0].cut.parts):
            return
        last, cut, known = rounds[0], rounds[0].cut, rounds[0].known
        accepted = [state.last for state in last.trees if state.last is not None]
        if cut.without:
            known.second.learn(cut.gain(accepted), cut.mass)
        if mass := sum(sum(part.steps) for part in cut.parts):
            known.further.learn(sum(map(of_further_steps, accepted)), mass)
        if last.timed is known.times.timed and not any(state.delayed for state in states):
            known.spent(last.arm, cut, now - last.start)

    def _goes_blind(self, arm: Arm) -> bool:
        """Whether this round can start before the last one is read, as it looks nothing up.

        Looking pays where lookups have hit lately; otherwise one plain round in `_BLIND` looks.
        """
        if arm.name != _PLAIN or (self._scope.looks_up and arm.tokens.mean > _IDLE):
            self._blind = 0
            return False
        if self._blind == 0 or not self._scope.looks_up:
            self._blind = _BLIND
            return not self._scope.looks_up
        self._blind -= 1
        return True


def _joined(drafts: Sequence[Proposal], recalled: Sequence[Tree]) -> list[Proposal]:
    """Drafts with what was said before, but for chains that were drawn."""
    pairs = zip(drafts, recalled, strict=True)
    return [d if d.q is not None else replace(d, tree=join(d.tree, tree)) for d, tree in pairs]


def _contexts(states: Sequence[State]) -> list[int]:
    return [state.position for state in states]


def within_budget(
    drafter: Drafter, method: Method, pair: Pair, config: DecodeConfig, chains: bool
) -> BatchBudget:
    """As much of a method's drafts as pays here, with lookups; of lookups alone where it has none.

    chains: whether nothing else is verified. Pass times stay with the target, what sessions have
    learned with the pair under `config`, which says nothing of single answers. Nothing is timed
    unless it asks for that.
    """
    target = pair.target
    if config.recalibrate:
        pair.calibrate(again=True)
    elif target.pass_times is None:
        target.pass_times = stored_times(target)
    drafts, sources = bool(method.family), tuple(source.name for source in method.sources)
    looks_up = config.lookup or not drafts
    scope = Scope(sources, drafts, looks_up, chains or not target.takes_trees)
    budget = BatchBudget(drafter, target.pass_times, scope)
    budget.newest = lambda: target.pass_times
    used = pair.drafter_name, len(pair.drafters), target.kernels.mode, drafter.name
    key = *used, replace(config, lookup=looks_up)
    budget.experience = pair.recall(key, lambda: budget.experience)
    return budget
