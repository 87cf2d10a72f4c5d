"""Plain decoding, one draft or both, round by round: whatever gives most tokens per second here."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.growth.reliability import Reliability, reach, worth_keeping
from dflash_mlx.drafters.method import LOOKUP, TokenSource
from dflash_mlx.drafters.ngram import lookup
from dflash_mlx.engine.drafter import Drafter, Proposal
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import Context, State
from dflash_mlx.target.model import Target
from dflash_mlx.target.pass_times import PassTimes, stored_times

_PLAIN = "plain decoding"
_MEMORY = 24  # rounds that an average remembers
_TRUST = 2.0  # rounds that the first guess weighs as much as
_FADED = 4.0  # rounds that what other answers taught weighs as much as
_PROBES = 0.01  # of the time may go into rounds that try what looks slower
_BLIND = 8  # rounds of plain decoding that follow each other without a look at their tokens
_IDLE = 1.02  # tokens per plain round up to which looking is not worth the wait
_RECENT = 16  # drafts whose time is remembered
_OUTLIER = 2.0  # a round that took so many times as long waited for something else
_CONTEXT = 128  # tokens before a timed draft
MOST_NODES = 48  # of a tree that the budget then cuts


class Average:
    """A mean that forgets; it starts at a guess."""

    def __init__(self, guess: float) -> None:
        self._total, self._weight = guess * _TRUST, _TRUST

    @property
    def mean(self) -> float:
        """Of the last `_MEMORY` values or so."""
        return self._total / self._weight

    def add(self, value: float) -> None:
        """Take in one more."""
        keep = 1 - 1 / _MEMORY
        self._total = self._total * keep + value
        self._weight = self._weight * keep + 1

    def fade(self) -> None:
        """Keep the mean, but let the next values change it soon."""
        self._total, self._weight = self.mean * _FADED, _FADED


class Arm:
    """One way to spend a round, and what it has been worth.

    tokens, seconds: expected per round. drafting: seconds of the latest drafts. waited: seconds of
    other rounds since the last one of this.
    """

    def __init__(self, name: str, tokens: float, seconds: float) -> None:
        self.name = name
        self.drafting: deque[float] = deque(maxlen=_RECENT)
        self.tokens, self.seconds = Average(tokens), Average(seconds)
        self.waited = 0.0

    @property
    def draft_seconds(self) -> float:
        """Of one draft, 0 where there is none."""
        return median(self.drafting) if self.drafting else 0.0

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens.mean / self.seconds.mean

    def loss(self, rate: float) -> float:
        """Seconds that a round of this costs more than the same tokens at `rate`."""
        return self.seconds.mean - self.tokens.mean / rate


@dataclass
class Experience:
    """What sessions with one pair and one method have learned, kept from one to the next."""

    arms: list[Arm]
    reliability: Reliability


@dataclass(frozen=True)
class _Asked:
    """A round that was proposed: which arm, when, what, and what to expect of it."""

    arm: Arm
    start: float
    tree: Tree
    tokens: float
    seconds: float
    blind: bool


@dataclass(frozen=True)
class _Why:
    """Why a round went to an arm, as a sentence when it is called.

    rates: expected tokens per second by arm, the best first. again: whether `arm` is only tried.
    plain: whether nothing that was drafted is worth verifying.
    """

    arm: str
    rates: tuple[tuple[str, float], ...]
    again: bool
    plain: bool

    def __call__(self) -> str:
        rates = ", ".join(f"{name} {rate:.1f}" for name, rate in self.rates)
        said = f"most expected tok/s: {rates}"
        if self.again:
            said = f"trying the {self.arm} again (expected tok/s: {rates})"
        return f"nothing drafted is worth verifying; {said}" if self.plain else said


class Adaptive:
    """Chooses among plain decoding and drafts, and verifies the part of a tree that pays.

    drafters: by name; they share the context of the last, and their trees know log-probabilities.
    Every round goes to the arm with most expected tokens per second; another is tried again as
    soon as what that may cost is `_PROBES` of the time since it was last tried, and a draft at the
    beginning of every answer, which may be easier than the last. What counts is what the trees
    promised, going by what became of others, not what they brought: that is mostly luck, and two
    unlucky drafts must not park what pays. sources: names of where drafted tokens come from.
    looks_up: n-gram continuations join every tree, and a plain round; they cost no pass. clock:
    seconds. What was learned, and whether plain rounds run unseen, holds for all its sequences.
    """

    def __init__(
        self,
        drafters: dict[str, Drafter],
        times: PassTimes,
        sources: Sequence[str] = (),
        looks_up: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = list(drafters.values())[-1]
        self.name, self.taps = self._model.name, self._model.taps
        self._looks_up, self._times, self._clock = looks_up, times, clock
        self._drafters = drafters
        one_row = float(times.of(1))
        arms = [Arm(_PLAIN, 1.0, one_row), *(Arm(label, 2.0, one_row) for label in drafters)]
        self.experience = Experience(arms, Reliability(sources))  # or of an earlier session
        self._asked: WeakKeyDictionary[State, _Asked] = WeakKeyDictionary()
        self._blind = 0
        self._beyond = Average(0.0)  # seconds that rounds take beyond what was measured

    @property
    def rounds_ahead(self) -> int:
        """One while plain rounds follow each other unseen, else none."""
        return 1 if self._blind else 0

    def new_context(self) -> Context:
        """The drafters'."""
        return self._model.new_context()

    def time_drafts(self, target: Target) -> None:
        """Time each drafter behind 128 tokens, a fraction of a second, as a first guess."""
        width = target.embedding()(mx.array([0])).shape[-1] * len(self.taps)
        state = State(target.new_cache(), self.new_context())
        features = mx.zeros((_CONTEXT, width), target.dtype)
        state.context.append(mx.zeros(_CONTEXT, mx.int32), features)
        state.anchor = mx.array([0])
        state.end = _CONTEXT
        for arm in self.experience.arms[1:]:
            drafter = self._drafters[arm.name]
            drafter.propose([state], MOST_NODES)[0].tree.wait()
            for _ in range(3):
                start = self._clock()
                drafter.propose([state], MOST_NODES)[0].tree.wait()
                arm.drafting.append(self._clock() - start)
            arm.seconds = Average(arm.draft_seconds + float(self._times.of(8)))

    def propose(self, states: Sequence[State], budget: int) -> list[Proposal]:
        """For each sequence the part of the chosen draft with most expected tokens per second."""
        share = budget // len(states)
        return [self._propose(state, share) for state in states]

    def _propose(self, state: State, share: int) -> Proposal:
        now = self._clock()
        self._learn(state, now)
        if state.last is None:
            self._begin_answer()
        arm, rates, again = self._choose()
        blind = self._goes_blind(arm)
        tree, tokens = self._draft(arm, state, share, blind)
        why = _Why(arm.name, rates, again, len(tree) == 1 and arm.name != _PLAIN)
        seconds = arm.draft_seconds + self._seconds(state)(len(tree))
        self._asked[state] = _Asked(arm, now, tree, tokens, float(seconds), blind)
        return Proposal(tree, why=why)

    def _seconds(self, state: State) -> Callable[[Any], Any]:
        """Of a target pass over n rows behind this sequence."""
        return partial(self._times.of, contexts=(state.position,))

    def _begin_answer(self) -> None:
        """Expect what other answers taught, but not for long; while parked, try a draft at once."""
        plain, *drafts = arms = self.experience.arms
        rate = max(arm.rate for arm in arms)
        if plain.rate == rate:
            min(drafts, key=lambda arm: arm.loss(rate)).waited = math.inf
        for arm in arms:
            arm.tokens.fade()

    def _draft(self, arm: Arm, state: State, share: int, blind: bool) -> tuple[Tree, float]:
        """The arm's tree with what was looked up, cut to what pays, and the tokens it promises."""
        start = self._clock()
        tree = Tree.chain()
        if arm.name != _PLAIN:
            tree = self._drafters[arm.name].propose([state], share)[0].tree
            arm.drafting.append(self._clock() - start)
        looks = self._looks_up and not blind
        if looks and (found := lookup(state.tokens, min(state.room, share) - 1)).tokens:
            tree = tree.merge(found.tokens, found.logprobs, LOOKUP.name)
        if len(tree) == 1:
            return tree, 1.0
        reached = reach(tree, self.experience.reliability.chances(tree))
        fixed = arm.draft_seconds + max(self._beyond.mean, 0.0)
        kept = worth_keeping(reached, self._seconds(state), fixed, share)
        return tree.prune(kept), float(reached[kept].sum())

    def _learn(self, state: State, now: float) -> None:
        """Take in how the last round went."""
        last = self._asked.pop(state, None)
        if last is None or state.last is None or state.last.tree is not last.tree:
            return
        if len(last.tree) > 1:
            self.experience.reliability.learn(state.last)
        if not last.blind:
            last.arm.tokens.add(last.tokens)
        took = now - last.start
        most = _OUTLIER * max(last.seconds, last.arm.seconds.mean)
        seconds = min(max(took, last.seconds / _OUTLIER), most)
        last.arm.seconds.add(seconds)
        self._beyond.add(seconds - last.seconds)
        for arm in self.experience.arms:
            arm.waited = 0.0 if arm is last.arm else arm.waited + took

    def _choose(self) -> tuple[Arm, tuple[tuple[str, float], ...], bool]:
        """The arm of this round, the rates that it was chosen by, and whether it is only tried."""
        arms = self.experience.arms
        rated = [(arm.rate, arm) for arm in arms]
        rate, best = max(rated, key=lambda pair: pair[0])
        others = [(r, arm) for r, arm in rated if arm is not best]
        rates = tuple((arm.name, r) for r, arm in [(rate, best), *others])
        for _, arm in others:
            if arm.waited * _PROBES >= arm.loss(rate):
                return arm, rates, True
        return best, rates, False

    def _goes_blind(self, arm: Arm) -> bool:
        """Whether this round need not see the tokens before it.

        Then it can start before the last one is read. Looking pays where lookups have hit lately;
        otherwise one plain round in `_BLIND` looks.
        """
        if arm.name != _PLAIN or (self._looks_up and arm.tokens.mean > _IDLE):
            self._blind = 0
            return False
        if self._blind == 0:
            self._blind = _BLIND
            return not self._looks_up
        self._blind -= 1
        return True


def within_budget(
    drafters: dict[str, Drafter], pair: Pair, config: DecodeConfig, sources: Sequence[TokenSource]
) -> Drafter:
    """The last drafter itself where the number of nodes is given, else whatever pays here.

    drafters: by name, see `Adaptive`. Pass times stay with the target, what sessions have learned
    with the pair.
    """
    last = list(drafters.values())[-1]
    if config.budget is not None:
        return last
    target = pair.target
    if target.pass_times is None:  # once per model that is loaded
        target.pass_times = stored_times(target, config.recalibrate)
    names = [source.name for source in sources]
    adaptive = Adaptive(drafters, target.pass_times, names, config.lookup)

    def learn() -> Experience:
        adaptive.time_drafts(target)
        return adaptive.experience

    used = pair.drafter_name, len(pair.drafters), target.kernels.mode
    key = (*used, last.name, config.block_size, config.branches, config.lookup)
    adaptive.experience = pair.recall(key, learn)
    return adaptive
