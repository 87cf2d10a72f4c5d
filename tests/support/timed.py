"""Drafters and targets in simulated time, whose passes take what a test says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.autoregressive import StepByStep
from dflash_mlx.drafters.budget import BatchBudget, Scope
from dflash_mlx.drafters.growth.grow import FIRST, rejection_boundaries
from dflash_mlx.drafters.method import FirstDraft, TwoPass
from dflash_mlx.drafters.none import NoContext, NoDraft
from dflash_mlx.engine.drafter import EachAlone, Proposal
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.pass_times import PassTimes
from support import decoding
from support.decoding import answer_rounds as answer_of
from support.toys import ToyTarget

VOCABULARY = 14
FLAT = PassTimes((1, 96), (1.0, 1.0))
ALONE = Scope(looks_up=False)


@dataclass
class Clock:
    """Time that passes only when somebody says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class TimedTarget(ToyTarget):
    """A toy target whose passes take what `times` says of all their rows, and `more`."""

    def __init__(self, clock: Clock, times: PassTimes, more: float = 0.0) -> None:
        super().__init__(VOCABULARY, context_length=2000)
        self.clock, self.times, self.more = clock, times, more
        self.rows: list[list[int]] = []  # of each pass, by sequence

    def forward_all(self, sequences, aux_layers=()):
        self.rows.append([each.block.rows for each in sequences])
        rows = sum(self.rows[-1])
        self.clock.now += float(self.times.of(rows)) + self.more
        if any(each.block.tree is not None for each in sequences):
            self.clock.now += float(self.times.branching(np.array([rows]))[0])
        return super().forward_all(sequences, aux_layers)


class Honest(EachAlone):
    """Knows the next token with probability `sure(position)`, says so, and offers siblings.

    The target whose answers it knows comes from the case that it is in.
    """

    name, aux_layers, rounds_ahead = "draft", (), 0
    target: TimedTarget

    def __init__(self, seconds: float, sure: Callable[[int], float], width=1, seed=1) -> None:
        self.seconds, self.sure, self.width = seconds, sure, width
        self.rng = np.random.default_rng(seed)

    def new_context(self) -> NoContext:
        return NoContext()

    def draft(self, state: State, remaining: int) -> Proposal:
        self.target.clock.now += self.seconds
        done = len(state.tokens) - 3
        tokens, parents, logprobs, parent = [], [-1], [0.0], 0
        *_, before, last = [0, *state.tokens]
        for i in range(done, done + min(7, remaining - 1)):
            right, first = int(self.target.table[before, last].argmax()), len(parents)
            guesses = [(right + k) % VOCABULARY for k in range(self.width)]
            if self.rng.random() > self.sure(i):
                guesses = [(guess + 5) % VOCABULARY for guess in guesses]
            guesses = self.rng.permutation(guesses).tolist()
            tokens += guesses
            parents += [parent] * self.width
            logprobs += [float(np.log(max(self.sure(i), 1e-3) / self.width))] * self.width
            parent = first + (guesses.index(right) if right in guesses else 0)
            before, last = last, right
        return Proposal(Tree(tuple(tokens), tuple(parents), tuple(logprobs)))


class InSteps(StepByStep):
    """Knows each next token with probability `sure(position)`; every step takes so many seconds.

    says: what it says of that. most: steps. first: seconds of the first step, where it differs.
    """

    name, aux_layers, rounds_ahead = "draft", (), 0
    target: TimedTarget

    def __init__(self, seconds: float, sure: Callable[[int], float], says=None, most=7, first=None):
        self.seconds, self.sure, self.says = seconds, sure, says or sure
        self.first = seconds if first is None else first
        self.block_size, self.rng = most + 1, np.random.default_rng(3)

    def new_context(self) -> NoContext:
        return NoContext()

    def draft_block(self, state: State, rows: int) -> Proposal:
        done, most = len(state.tokens) - 3, rows - 1
        tokens, logprobs, chances = [], [0.0], []
        *_, before, last = [0, *state.tokens]
        for i in range(done, done + most):
            self.target.clock.now += self.seconds if tokens else self.first
            right = int(self.target.table[before, last].argmax())
            tokens.append(right if self.rng.random() < self.sure(i) else (right + 5) % VOCABULARY)
            logprobs.append(float(np.log(self.says(i))))
            before, last = last, right
            chance = float(np.exp(sum(logprobs)))
            if len(tokens) == most or not self.another(chance, len(tokens)):
                break
            chances.append(chance)
        parents = tuple(range(-1, len(tokens)))
        sources = ("", *[FIRST] * len(tokens))
        return Proposal(Tree((*tokens,), parents, (*logprobs,), sources), steps=(*chances,))


class InTwo(TwoPass):
    """Two drafters one after the other, the second by the branches that it is asked for."""

    name, aux_layers, rounds_ahead = "draft", (), 0

    def __init__(self, first: Honest, second: Honest, by_branch: float = 0.0) -> None:
        self.passes, self.by_branch = (first, second), by_branch
        self.begun = 0  # first passes
        self.asked: list[list[int]] = []  # branches of every second pass, by sequence

    def new_context(self) -> NoContext:
        return NoContext()

    def first_pass(self, states, rooms):
        self.begun += 1
        return [self.first(*each) for each in zip(states, rooms, strict=True)]

    def first(self, state, remaining):
        """Branches as of the published tree, of a chain."""
        tree = self.passes[0].draft(state, remaining).tree
        fails = rejection_boundaries(np.exp(np.array(tree.logprobs[1:]))).tolist()
        return FirstDraft(tree, branches={tree.drafted[:i]: r for i, r in enumerate(fails)})

    def second_pass(self, states, drafts, counts):
        self.asked.append([*counts])
        second = self.passes[1]
        second.target.clock.now += self.by_branch * sum(counts)
        return [
            second.draft(state, state.remaining) if count else draft
            for state, draft, count in zip(states, drafts, counts, strict=True)
        ]


def timed_seconds(second, times) -> None:
    """Second passes have taken so long before, None for no such pass."""
    for branches in () if times is None else times.rows:
        second.times.took(float(times.of(branches)), branches)


class Case:
    """Plain decoding and a drafter on one toy target, in simulated time."""

    def __init__(self, target, drafter, tokens=400, scope=ALONE, second=None, timed=True):
        if isinstance(target, PassTimes):
            target = TimedTarget(Clock(), target)
        self.target, self.clock = target, target.clock
        self.plain = decoding.answer(target, NoDraft(), [1, 2, 3], DecodeConfig(max_tokens=tokens))
        self.plain_seconds = self.clock.now
        for part in getattr(drafter, "passes", [drafter]):
            part.target = target
        self.drafter = BatchBudget(drafter, target.times if timed else None, scope, self.clock)
        timed_seconds(self.drafter.experience.second, second)
        self.rounds = self.run(tokens)
        self.seconds = self.clock.now - self.plain_seconds

    def run(self, tokens):
        """The rounds of another answer, which is plain decoding's."""
        config = DecodeConfig(max_tokens=tokens)
        rounds = list(answer_of(self.target, self.drafter, [1, 2, 3], config))
        assert decoding.tokens_in(r.accepted for r in rounds) == self.plain[:tokens]
        _, *chosen = rounds
        assert all(r.proposal.mode and r.proposal.reason for r in chosen)
        return chosen

    def start(self, tokens):
        """A config of so many tokens, and a state behind the prompt."""
        config = DecodeConfig(max_tokens=tokens)
        return config, decoding.start(self.target, self.drafter, [1, 2, 3], config)

    @property
    def modes(self):
        """The share of each mode in the second half, when all is known."""
        half = self.rounds[len(self.rounds) // 2 :]
        counts = Counter(r.proposal.mode for r in half)
        return {mode: count / len(half) for mode, count in counts.items()}
