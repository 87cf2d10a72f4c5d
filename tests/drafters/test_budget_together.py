"""Several sequences share one budget: deep trees for few of them, few rows each for many."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.budget import BatchBudget, Scope
from dflash_mlx.drafters.experience import Average, Instead, SecondPass
from dflash_mlx.drafters.none import NoContext, NoDraft
from dflash_mlx.drafters.two_pass import FirstDraft, TwoPass
from dflash_mlx.engine.drafter import Drafter, EachAlone, Proposal
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.pass_times import PassTimes, size_of
from support.decoding import Strict, answer, scheduler_of, sequence_of
from support.toys import ToyTarget

VOCABULARY = 9
CHEAP = PassTimes((1, 96), (1.0, 1.0))
RISING = PassTimes((1, 8, 16, 32, 64, 96), (1.0, 1.1, 1.4, 3.0, 9.0, 20.0))
DEAR = PassTimes((1, 2, 96), (1.0, 2.0, 96.0))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(ToyTarget):
    """Its passes over several sequences take what `times` says of all their rows."""

    def __init__(self, times: PassTimes, chains: bool = False) -> None:
        super().__init__(VOCABULARY, context_length=2000)
        self.clock, self.times, self.pass_times = Clock(), times, times
        self.rows: list[list[int]] = []
        self.chains = chains

    def forward_all(self, sequences, aux_layers=()):
        rows = [each.block.rows for each in sequences]
        assert not self.chains or all(each.block.tree is None for each in sequences)
        self.clock.now += float(self.times.of(sum(rows)))
        self.rows.append(rows)
        return super().forward_all(sequences, aux_layers)


class Knowing(EachAlone):
    """Drafts the right token, beside a wrong one, as surely as it says."""

    name, aux_layers, rounds_ahead = "draft", (), 0

    def __init__(self, target: Timed, sure: float) -> None:
        self.target, self.sure = target, sure
        self.rng = np.random.default_rng(0)

    def new_context(self) -> NoContext:
        return NoContext()

    def draft(self, state: State, remaining: int) -> Proposal:
        self.target.clock.now += 0.05
        *_, before, last = [0, *state.tokens]
        tokens, parents, logprobs, parent = [], [-1], [0.0], 0
        for _ in range(min(6, remaining - 1)):
            right = int(self.target.table[before, last].argmax())
            pair = [right, (right + 1) % VOCABULARY]
            if self.rng.random() > self.sure:
                pair = [(right + 2) % VOCABULARY, (right + 3) % VOCABULARY]
            tokens += pair
            parents += [parent, parent]
            logprobs += [np.log(self.sure), np.log((1 - self.sure) / 2)]
            parent, before, last = len(tokens) - 1, last, pair[0]
        return Proposal(Tree(tuple(tokens), tuple(parents), tuple(logprobs)))


def decode(times: PassTimes, sure: float, count: int, chains: bool = False):
    """Answers of `count` sequences at once; the rows of each step."""
    target = Timed(times, chains)
    return decode_with(target, Knowing(target, sure), count)


def decode_with(
    target: Timed, drafter: Drafter, count: int, second: PassTimes | None = None
) -> Timed:
    """The same with any drafter, whose second pass, if any, was timed so."""
    config, scope = DecodeConfig(max_tokens=120), Scope(looks_up=False, chains=target.chains)
    adaptive = BatchBudget(drafter, {"draft": drafter}, target.times, scope, target.clock)
    tell(adaptive.experience.second, second)
    prompts = [[1, i % VOCABULARY, i // VOCABULARY] for i in range(count)]
    engine, said = scheduler_of(target, observer=Strict()), {}
    for prompt in prompts:
        engine.add(sequence_of(target, adaptive, prompt, config))
    while engine.running or engine.waiting:
        for each, outcome in engine.step():
            assert not isinstance(outcome, Exception), outcome
            if outcome is not None:
                said.setdefault(id(each.state), []).extend(outcome.accepted.tokens)
    expected = [
        answer(ToyTarget(VOCABULARY, context_length=2000), NoDraft(), p, config) for p in prompts
    ]
    assert sorted(said.values()) == sorted(expected)
    return target


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("times", [CHEAP, RISING, DEAR])
@pytest.mark.parametrize("count", [2, 5])
def test_answers_stay_what_they_are(times, count, chains):
    decode(times, 0.8, count, chains)


def test_few_sequences_have_deep_trees_and_many_few_rows_each():
    few, many = (
        np.mean(
            [
                sum(rows) / count
                for rows in decode(RISING, 0.8, count).rows[5:]
                if len(rows) == count
            ]
        )
        for count in (2, 16)
    )
    assert few > 4 and many < 2


def test_where_rows_cost_what_passes_do_nothing_is_drafted():
    steps = decode(DEAR, 0.6, 4).rows
    assert np.mean([sum(rows) for rows in steps[40:] if len(rows) == 4]) < 4.5


def test_the_best_nodes_of_all_trees_are_verified_together():
    target = Timed(RISING)
    drafter = Knowing(target, 0.7)
    adaptive = BatchBudget(drafter, {"draft": drafter}, RISING, Scope(looks_up=False), target.clock)
    trees = [
        Tree((1, 2, 3), (-1, 0, 0, 1), tuple(np.log([1, 0.6, 0.3, 0.5]))),
        Tree((1, 2), (-1, 0, 1), tuple(np.log([1, 0.9, 0.8]))),
    ]
    states = [State(target.new_cache(), NoContext()) for _ in trees]
    cut = adaptive._cut(adaptive._known(2), states, 96, [Proposal(tree) for tree in trees], 0.0)
    chances = [[1, 0.6, 0.3, 0.3], [1, 0.9, 0.72]]  # of reaching each node
    best = 0.0
    for a, b in product(range(1, 5), range(1, 4)):
        for first, second in product(
            combinations(range(1, 4), a - 1), combinations(range(1, 3), b - 1)
        ):
            nodes = [(0, *first), (0, *second)]
            whole = all(
                tree.parents[n] in kept
                for tree, kept in zip(trees, nodes, strict=True)
                for n in kept
                if n
            )
            if whole:
                tokens = sum(chances[i][n] for i, kept in enumerate(nodes) for n in kept)
                best = max(best, tokens / float(RISING.of(size_of(a + b))))
    found = sum(len(part.tree) for part in cut.parts)
    assert cut.seconds == pytest.approx(float(RISING.of(size_of(found))))
    assert best == pytest.approx(cut.tokens / cut.seconds, rel=0.05)


def tell(second: SecondPass, times: PassTimes | None) -> None:
    """Second passes have taken so long."""
    for branches in () if times is None else times.rows:
        second.times.took(float(times.of(branches)), branches)


def drafts_of(*posteriors):
    """First drafts that may fail in these places."""
    branches = [{(i,): r for i, r in enumerate(each)} for each in posteriors]
    return [FirstDraft(Tree.chain(), branches=each) for each in branches]


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("by_branch", [0.0, 0.02, 0.1])
def test_of_all_drafts_branches_those_are_drafted_on_that_save_most_time(rate, by_branch):
    second, drafts = SecondPass(), drafts_of([0.5, 0.3, 0.01], [0.05, 0.04], [])
    tell(second, PassTimes((1, 5), (0.1 + by_branch, 0.1 + 5 * by_branch)))
    second.gain, second.mass = Average(0.8), Average(1.0)

    def saved(counts):
        mass = sum(sum([*d.branches.values()][:n]) for d, n in zip(drafts, counts, strict=True))
        return 0.8 * mass / rate - float(second.times.of(sum(counts))) if any(counts) else 0.0

    best = max(saved(counts) for counts in product(range(4), range(3), range(1)))
    found, tried = second.branches(drafts, rate)
    assert saved(found) == pytest.approx(best)
    assert any(found) == (best > 0) and not tried


def test_a_second_pass_is_tried_now_and_then_where_it_has_not_paid():
    second, drafts = SecondPass(), drafts_of([0.5])
    tell(second, PassTimes((1,), (1.0,)))
    second.gain = Average(0.0)
    for waited, expected in ((0.0, [0]), (99.0, [0]), (101.0, [1])):
        second.waited = waited
        counts, tried = second.branches(drafts, 1.0)
        assert counts == expected and tried == any(counts)
    assert second.branches(drafts, 1.0)[0] == [0]


def test_what_a_second_pass_brought_is_told_from_the_same_text():
    """The first trees would have had two tokens, three at least, and one."""
    trees = [Tree((1, 5), (-1, 0, 1)), Tree((7, 8), (-1, 0, 1)), Tree((9,), (-1, 0))]
    texts = [((1, 2, 3), 4), ((7,), 8), ((), 3)]
    accepted = [
        Accepted(Tree.chain(drafts), tuple(range(len(drafts) + 1)), token)
        for drafts, token in texts
    ]
    instead = Instead.of(trees, drafts_of([0.5, 0.3], [0.2], [0.1]), [1, 1, 0], 0.25)
    assert instead.gain(accepted) == (4 - 2) + (2 - 3) + (1 - 1)
    second = SecondPass()
    for _ in range(500):
        second.learn(instead, accepted)
    assert (second.gain.mean, second.mass.mean) == pytest.approx((0.75, 0.7), rel=0.02)


class InTwo(TwoPass):
    """Knows nothing of some sequences before its second pass."""

    name, aux_layers, rounds_ahead = "draft", (), 0

    def __init__(self, target: Timed) -> None:
        self.knowing, self.asked = Knowing(target, 0.9), []

    def new_context(self) -> NoContext:
        return NoContext()

    def first_pass(self, states, rooms):
        return [
            self.first(state, remaining) for state, remaining in zip(states, rooms, strict=True)
        ]

    def first(self, state, remaining):
        if state.tokens[1] % 2:
            return FirstDraft(self.knowing.draft(state, remaining).tree, branches={(): 0.1})
        return FirstDraft(Tree((0,), (-1, 0), (0.0, np.log(0.05))), branches={(): 0.9})

    def second_pass(self, states, drafts, counts):
        self.asked.append(
            [n for _, n in sorted(zip([s.tokens[1] for s in states], counts, strict=True))]
        )
        self.knowing.target.clock.now += 0.05
        return [
            self.knowing.draft(state, state.remaining) if n else draft
            for state, draft, n in zip(states, drafts, counts, strict=True)
        ]


def test_a_second_pass_is_over_those_sequences_that_need_it():
    target = Timed(CHEAP)
    drafter = InTwo(target)
    decode_with(target, drafter, 4, PassTimes((1, 4), (0.1, 0.25)))
    whole = [asked for asked in drafter.asked if len(asked) == 4]
    assert len(whole) > 10
    assert np.mean([asked == [1, 0, 1, 0] for asked in whole[5:]]) > 0.8
