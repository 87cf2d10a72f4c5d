"""Plain decoding, one draft or both, round by round: whatever gives most tokens per second here."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, median
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.growth.reliability import Reliability, Sizes, never, reach, worth_keeping
from dflash_mlx.drafters.lookup import MOST_LOOKED_UP, lookup
from dflash_mlx.drafters.method import LOOKUP, TokenSource
from dflash_mlx.engine.drafter import Drafter, Proposal, Reason
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import Context, State
from dflash_mlx.target.model import Target
from dflash_mlx.target.pass_times import PassTimes, forget_times, stored_times

_PLAIN = "plain decoding"
_MEMORY = 24  # rounds that an average remembers
_TRUST = 2.0  # rounds that the first guess weighs as much as
_FADED = 4.0  # rounds that what other answers taught weighs as much as
_MACHINE_MEMORY = 6  # rounds: whatever else the machine does can change within a second
_PROBES = 0.01  # of the time may go into rounds that try what looks slower
_BLIND = 8  # rounds of plain decoding that follow each other without a look at their tokens
_IDLE = 1.02  # tokens per plain round up to which looking is not worth the wait
_RECENT = 16  # drafts whose time and whose promises are remembered
_OUTLIER = 2.0  # a round that took so many times as long waited for something else
_CONTEXTS = (128, 2048)  # tokens before timed drafts
_CONTRADICTION = 1.5  # times that plain and drafted rounds may differ in how wrong their times are
_ENOUGH = 16  # rounds of each, to say so
_GUESSED_ROWS = 8  # of a drafter that has not drafted yet
_LEAST = 1e-6  # seconds, so that ratios are finite
_NOTHING = Sizes(np.ones(1), np.zeros(1, int), np.zeros(1))  # was found to draft
MOST_NODES = 48  # of a tree that the budget then cuts


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
            self.planned.fade(fixed + float(seconds(_GUESSED_ROWS)))

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


@dataclass(frozen=True)
class _Asked:
    """A round that was proposed: which arm, when, what, and the seconds that it should take.

    start: without what the answer had to wait for its reader until then.
    """

    arm: Arm
    start: float
    tree: Tree
    planned: float


@dataclass(frozen=True)
class Scope:
    """What may be proposed.

    sources: names of where drafted tokens come from. looks_up: whether n-gram continuations join
    every tree, and a plain round; they cost no pass. chains: whether nothing else is verified.
    """

    sources: tuple[str, ...] = ()
    looks_up: bool = True
    chains: bool = False


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
        self.name, self.taps = model.name, model.taps
        self._scope, self._times, self._clock = scope, times, clock
        self._branching = never if scope.chains else times.branching if times.trees else None
        one_row = float(times.of(1))
        arms = [Arm(_PLAIN, 1.0, one_row), *(Arm(label, 2.0, one_row) for label in drafters)]
        self.experience = Experience(arms, Reliability(scope.sources))  # or of an earlier session
        self._asked: WeakKeyDictionary[State, _Asked] = WeakKeyDictionary()
        self._blind = 0

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
        found: dict[str, list[PassTimes]] = {label: [] for label in self._drafters}
        width = target.embedding()(mx.array([0])).shape[-1] * len(self.taps)
        for before, context in zip((0, *_CONTEXTS), _CONTEXTS, strict=False):
            if before and context >= target.context_length:
                break
            rows = context - before
            features = mx.zeros((rows, width), target.dtype) if self.taps else None
            state.context.append(mx.zeros(rows, mx.int32), features)
            for label, drafter in self._drafters.items():
                times = []
                for _ in range(4):
                    start = self._clock()
                    drafter.propose([state], MOST_NODES)[0].tree.wait()
                    times.append(self._clock() - start)
                found[label].append(PassTimes((1,), (median(times[1:]),), context))
        for arm in self.experience.arms[1:]:
            first, *deeper = found[arm.name]
            arm.times = PassTimes(first.rows, first.seconds, first.context, tuple(deeper))
            arm.planned = Average(arm.draft_seconds(0) + float(self._times.of(_GUESSED_ROWS)))

    def propose(self, states: Sequence[State], budget: int) -> list[Proposal]:
        """For each sequence the part of the chosen draft with most expected tokens per second."""
        share = budget // len(states)
        return [self._propose(state, share) for state in states]

    def _propose(self, state: State, share: int) -> Proposal:
        now = self._clock() - state.paused
        self._learn(state, now)
        if state.last is None:
            self._begin_answer(state)
        arm, rates, again = self._choose()
        blind = self._goes_blind(arm)
        proposal, planned = self._draft(arm, state, share, blind)
        plain = self.experience.arms[0]
        why = Reason(
            drafted=arm is not plain, checked=len(proposal.tree) > 1, tried=again, rates=rates
        )
        self._asked[state] = _Asked(arm, now, proposal.tree, planned)
        slower = self.experience.machine.mean * plain.bias.mean
        plain_seconds = float(self._seconds(state)(1)) * slower
        return Proposal(proposal.tree, proposal.q, why, plain_seconds)

    def _seconds(self, state: State) -> Callable[[Any], Any]:
        """Of a target pass over n rows behind this sequence."""
        return partial(self._times.of, contexts=(state.position,))

    def _begin_answer(self, state: State) -> None:
        """Expect what other answers taught, but not for long; while parked, try a draft at once."""
        plain, *drafts = arms = self.experience.arms
        for arm in arms:
            arm.plan(self._seconds(state), arm.draft_seconds(state.position))
        rate = max(arm.rate for arm in arms)
        if drafts and plain.rate == rate:
            min(drafts, key=lambda arm: arm.loss(rate)).waited = math.inf

    def _draft(self, arm: Arm, state: State, share: int, blind: bool) -> tuple[Proposal, float]:
        """What the arm proposes with what was looked up, cut to what pays; its planned seconds."""
        start, proposal = self._clock(), Proposal(Tree.chain())
        if arm.name in self._drafters:
            proposal = self._drafters[arm.name].propose([state], share)[0]
            proposal.tree.wait()
            arm.drafted(state.position, self._clock() - start)
        seconds, draft_seconds = self._seconds(state), arm.draft_seconds(state.position)
        tree, looks = proposal.tree, self._scope.looks_up and not blind and proposal.q is None
        most = min(state.room - 1, share - 1, MOST_LOOKED_UP)
        if looks and (found := lookup(state.tokens, most)).tokens:
            tree = tree.merge(found.tokens, found.logprobs, LOOKUP.name)
        if len(tree) == 1:
            planned = draft_seconds + float(seconds(1))
            if not blind:
                arm.expect(1.0, planned, _NOTHING)
            return Proposal(tree), planned
        reached = reach(tree, self.experience.reliability.chances(tree))
        fixed = draft_seconds + max(self.experience.beyond.mean, 0.0)
        kept, sizes = worth_keeping(tree, reached, seconds, fixed, share, self._branching)
        planned = draft_seconds + sizes.cost(seconds, len(kept))
        arm.expect(float(reached[kept].sum()), planned, sizes)
        q = None if proposal.q is None else proposal.q[: len(kept) - 1]
        return Proposal(tree.prune(kept), q), planned

    def _learn(self, state: State, now: float) -> None:
        """Take in how the last round went."""
        last = self._asked.pop(state, None)
        if last is None or state.last is None or state.last.tree is not last.tree:
            return
        experience, arm = self.experience, last.arm
        if len(last.tree) > 1:
            experience.reliability.learn(state.last)
        took, machine = now - last.start, experience.machine.mean
        expected = last.planned * arm.bias.mean * machine
        seconds = min(max(took, expected / _OUTLIER), expected * _OUTLIER)
        if len(last.tree) > 1:
            experience.beyond.add(seconds / machine - last.planned)
        experience.machine.add(seconds / (last.planned * arm.bias.mean))
        arm.bias.add(seconds / (last.planned * machine))
        arm.rounds += 1
        for other in experience.arms:
            other.waited = 0.0 if other is arm else other.waited + took

    def _choose(self) -> tuple[Arm, tuple[tuple[str, float], ...], bool]:
        """The arm of this round, the rates that it was chosen by, and whether it is only tried."""
        arms, machine = self.experience.arms, self.experience.machine.mean
        rated = [(arm.rate, arm) for arm in arms]
        rate, best = max(rated, key=lambda pair: pair[0])
        others = [(r, arm) for r, arm in rated if arm is not best]
        rates = tuple((arm.name, r / machine) for r, arm in [(rate, best), *others])
        for _, arm in others:
            if arm.waited * _PROBES >= arm.loss(rate) * machine:
                return arm, rates, True
        return best, rates, False

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
