"""Several sequences share one budget: deep trees for few of them, few rows each for many."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Accepted, Tree
from dflash_mlx.drafters.budget import BatchBudget, Scope
from dflash_mlx.drafters.experience import Average, Instead, SecondPass
from dflash_mlx.drafters.method import FirstDraft
from dflash_mlx.drafters.none import NoContext, NoDraft
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.pass_times import PassTimes, size_of
from support.decoding import Strict, answer, scheduler_of, sequence_of
from support.timed import VOCABULARY, Clock, Honest, InTwo, TimedTarget, timed_seconds
from support.toys import ToyTarget

CHEAP = PassTimes((1, 96), (1.0, 1.0))
RISING = PassTimes((1, 8, 16, 32, 64, 96), (1.0, 1.1, 1.4, 3.0, 9.0, 20.0))
DEAR = PassTimes((1, 2, 96), (1.0, 2.0, 96.0))


def decode(times: PassTimes, sure: float, count: int, width: int = 2, chains: bool = False):
    """The rows of each step of `count` sequences at once, by sequence."""
    return decode_with(Honest(0.05, lambda i: sure, width), times, count, chains=chains)


def decode_with(drafter, times, count, second=None, chains=False):
    """The same with any drafter, whose second pass, if any, was timed so."""
    target, config = TimedTarget(Clock(), times), DecodeConfig(max_tokens=120)
    for part in getattr(drafter, "passes", [drafter]):
        part.target = target
    scope = Scope(looks_up=False, chains=chains)
    budget = BatchBudget(drafter, times, scope, target.clock)
    timed_seconds(budget.experience.second, second)
    prompts = [[1, i % VOCABULARY, i // VOCABULARY] for i in range(count)]
    engine, said = scheduler_of(target, observer=Strict()), {}
    for prompt in prompts:
        engine.add(sequence_of(target, budget, prompt, config))
    while engine.running or engine.waiting:
        for each, outcome in engine.step():
            assert not isinstance(outcome, Exception), outcome
            if outcome is not None:
                assert not chains or outcome.accepted.tree.is_chain
                said.setdefault(id(each.state), []).extend(outcome.accepted.tokens)
    plain = ToyTarget(VOCABULARY, context_length=2000)
    assert sorted(said.values()) == sorted(answer(plain, NoDraft(), p, config) for p in prompts)
    return target.rows


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("times", [CHEAP, RISING, DEAR])
@pytest.mark.parametrize("count", [2, 5])
def test_answers_stay_what_they_are(times, count, chains):
    decode(times, 0.8, count, chains=chains)


def test_few_sequences_have_deep_trees_and_many_few_rows_each():
    few, many = (
        np.mean(
            [sum(rows) / count for rows in decode(RISING, 0.8, count, 1)[5:] if len(rows) == count]
        )
        for count in (2, 16)
    )
    assert few > 4 and many < 2


def test_where_rows_cost_what_passes_do_nothing_is_drafted():
    steps = decode(DEAR, 0.6, 4)
    assert np.mean([sum(rows) for rows in steps[40:] if len(rows) == 4]) < 4.5


def test_the_best_nodes_of_all_trees_are_verified_together():
    target, drafter = TimedTarget(Clock(), RISING), Honest(0.05, lambda i: 0.7, 2)
    adaptive = BatchBudget(drafter, RISING, Scope(looks_up=False), target.clock)
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


def drafts_of(*posteriors):
    """First drafts that may fail in these places."""
    branches = [{(i,): r for i, r in enumerate(each)} for each in posteriors]
    return [FirstDraft(Tree.chain(), branches=each) for each in branches]


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("by_branch", [0.0, 0.02, 0.1])
def test_of_all_drafts_branches_those_are_drafted_on_that_save_most_time(rate, by_branch):
    second, drafts = SecondPass(), drafts_of([0.5, 0.3, 0.01], [0.05, 0.04], [])
    timed_seconds(second, PassTimes((1, 5), (0.1 + by_branch, 0.1 + 5 * by_branch)))
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
    timed_seconds(second, PassTimes((1,), (1.0,)))
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


class Unsure(InTwo):
    """Knows nothing of every other sequence before its second pass."""

    def first(self, state, remaining):
        if state.tokens[1] % 2:
            return replace(super().first(state, remaining), branches={(): 0.1})
        return FirstDraft(Tree((0,), (-1, 0), (0.0, np.log(0.05))), branches={(): 0.9})


def test_a_second_pass_is_over_those_sequences_that_need_it():
    drafter = Unsure(*(Honest(0.05, lambda i: 0.9, 1, seed) for seed in (1, 2)))
    decode_with(drafter, CHEAP, 4, PassTimes((1, 4), (0.1, 0.25)))
    whole = [asked for asked in drafter.asked if len(asked) == 4]
    assert len(whole) > 10
    assert np.mean([asked == [1, 0, 1, 0] for asked in whole[5:]]) > 0.8
