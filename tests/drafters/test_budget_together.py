"""Several sequences share one budget, and a second pass is made over the branches that pay."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Accepted, Tree
from dflash_mlx.drafters.budget import BatchBudget, Scope
from dflash_mlx.drafters.dual_diffusion import DualDiffusion, JointGrowth
from dflash_mlx.drafters.experience import GAIN, Average, Continued, Cut, Experience
from dflash_mlx.drafters.growth.reliability import Sizes
from dflash_mlx.drafters.method import FirstDraft
from dflash_mlx.drafters.none import NoContext, NoDraft
from dflash_mlx.drafters.paper import AblatedDual, PaperGrowth
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.pass_times import PassTimes, size_of
from support.decoding import Strict, answer, behind, paths_of, scheduler_of, sequence_of
from support.grammars import toy_constraint
from support.law import ToyDrafter
from support.timed import FLAT, VOCABULARY, Case, Clock, Honest, InTwo, TimedTarget, timed_seconds
from support.toys import ToyTarget

# One budget


CHEAP = PassTimes((1, 96), (1.0, 1.0))
RISING = PassTimes((1, 8, 16, 32, 64, 96), (1.0, 1.1, 1.4, 3.0, 9.0, 20.0))
DEAR = PassTimes((1, 2, 96), (1.0, 2.0, 96.0))


def decode(times: PassTimes, sure: float, count: int, width: int = 2, chains: bool = False):
    """The rows of each step of `count` sequences at once, by sequence."""
    return decode_with(Honest(0.05, lambda i: sure, width), times, count, chains=chains)


def decode_with(drafter, times, count, second=None, chains=False):
    """The rows of each step with any drafter, whose second pass, if any, was timed so."""
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
    second, drafts = Continued(GAIN), drafts_of([0.5, 0.3, 0.01], [0.05, 0.04], [])
    timed_seconds(second, PassTimes((1, 5), (0.1 + by_branch, 0.1 + 5 * by_branch)))
    second.gain, second.mass = Average(0.8), Average(1.0)

    def mass(counts):
        return sum(sum([*d.branches.values()][:n]) for d, n in zip(drafts, counts, strict=True))

    def saved(counts):
        seconds = float(second.times.of(sum(counts)))
        return 0.8 * mass(counts) / rate - seconds if any(counts) else 0.0

    best = max(saved(counts) for counts in product(range(4), range(3), range(1)))
    found, likely, tried = second.branches(drafts, rate)
    assert (saved(found), likely) == pytest.approx((best, mass(found)))
    assert any(found) == (best > 0) and not tried


def test_a_second_pass_is_tried_now_and_then_where_it_has_not_paid():
    second, drafts = Continued(GAIN), drafts_of([0.5])
    timed_seconds(second, PassTimes((1,), (1.0,)))
    second.gain = Average(0.0)
    for waited, expected in ((0.0, [0]), (99.0, [0]), (101.0, [1])):
        second.waited = waited
        counts, _, tried = second.branches(drafts, 1.0)
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
    cut = Cut([], 0.0, 0.0, 0.0, Sizes.of([np.ones(1)], 1), without=trees, further_rows=0.25)
    assert cut.gain(accepted) == (4 - 2) + (2 - 3) + (1 - 1) - 0.25
    second = Continued(GAIN)
    for _ in range(500):
        second.learn(cut.gain(accepted), 0.7)
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


# A second pass


GROWTHS = {
    "published": PaperGrowth(3),
    "joint": JointGrowth(3, 12),
}


@pytest.mark.parametrize("growth", GROWTHS.values(), ids=GROWTHS)
def test_neither_pass_proposes_what_a_grammar_forbids(growth):
    dropped = [0, 0]
    both = AblatedDual(ToyDrafter(1), ToyDrafter(2), growth).ablated(levels=3)
    for anchor in (0, 1):
        state, trees = behind(both, anchor), []
        for constraint in (None, toy_constraint("[ab]{9}", start=0)):
            state.constraint = constraint
            (draft,) = drafts = both.begin([state], [4])
            (whole,) = both.go_on([state], drafts, [len(draft.branches)])
            trees.append([draft.tree, whole.tree, [*draft.branches]])
        free, bound = trees
        for tree, other in zip(bound[:2], free[:2], strict=True):
            assert {*tree.drafted} <= {0, 1}
            dropped[0] += len(other) - len(tree)
        assert all({*prefix} <= {0, 1} for prefix in bound[2])
        dropped[1] += len(free[2]) - len(bound[2])
    assert min(dropped) > 0


@pytest.mark.parametrize("growth", GROWTHS.values(), ids=GROWTHS)
def test_a_drafter_that_continues_itself_does_not_repeat_its_first_pass(growth):
    first, found = ToyDrafter(1), []
    for size in (4, 3):
        both = DualDiffusion(first, None, growth, (None, size))
        (draft,) = both.begin([behind(both, 0)], [4])
        found.append(() in draft.branches)
    assert found == [False, True], "a pass over another block is another pass"


def test_a_longer_second_block_goes_on_behind_the_whole_first_draft():
    """In the places that the law's answers have, see test_law.py; or not, where that is off."""
    for extension in (True, False):
        both = AblatedDual(ToyDrafter(1, 2), ToyDrafter(2), PaperGrowth(1)).ablated(2, extension)
        state = behind(both, 0)
        (draft,) = drafts = both.begin([state], [3])
        (whole,) = both.go_on([state], drafts, [len(draft.branches)])
        extended = [path for path in paths_of(whole.tree) if path[:1] == draft.tree.drafted]
        assert max(map(len, extended)) == (2 if extension else 1)


def in_two(first, second, seconds, tokens=600, by_branch=0.0):
    """A case with a second pass of so many seconds, and whether each round went on to it."""
    drafter = InTwo(Honest(0.1, first), Honest(seconds, second, seed=2), by_branch)
    timed = PassTimes((1, 7), tuple(max(seconds + by_branch * n, 1e-6) for n in (1, 7)))
    case = Case(FLAT, drafter, tokens, second=timed)
    continued = np.array([r.proposal.why.continued for r in case.rounds])
    assert case.modes.get("plain", 0) < 0.1
    assert drafter.begun >= len(drafter.asked) == continued.sum(), "no pass is made twice"
    assert drafter.begun <= len(case.rounds)
    return case, continued


def begins(rounds):
    """The position in the answer at which each round's drafts begin."""
    return np.cumsum([1, *(len(r.accepted.tokens) for r in rounds[:-1])])


def by_stretch(position: int) -> float:
    """Sure in every other stretch of 40 tokens."""
    return 0.95 if position // 40 % 2 else 0.15


def test_a_second_pass_is_made_in_the_rounds_that_need_it():
    case, continued = in_two(by_stretch, lambda i: 0.9, 0.5)
    starts = begins(case.rounds)
    here, ahead = (np.array([by_stretch(i + k) > 0.5 for i in starts]) for k in (0, 6))
    late = starts > 200
    assert continued[late & ~here].mean() > 0.8 and continued[late & here & ahead].mean() < 0.2
    always, never = (
        Case(FLAT, Honest(seconds, sure), 600).seconds
        for seconds, sure in ((0.6, lambda i: max(0.9, by_stretch(i))), (0.1, by_stretch))
    )
    assert case.seconds < 0.95 * min(always, never)


@pytest.mark.parametrize("seconds", [3.0, 30.0])
def test_a_second_pass_that_costs_too_much_is_hardly_ever_made(seconds):
    case, continued = in_two(lambda i: 0.6, lambda i: 0.9, seconds)
    alone = Case(FLAT, Honest(0.1, lambda i: 0.6), 600)
    assert continued.mean() < 0.03
    assert case.seconds < 1.1 * alone.seconds


def test_a_second_pass_that_costs_nothing_is_made_wherever_it_may_help():
    _, continued = in_two(lambda i: 0.5, lambda i: 0.9, 0.0)
    assert continued.mean() > 0.95


def test_no_more_branches_are_asked_for_than_are_worth_their_time():
    """r = 0.4, 0.24, 0.14, ...: what each brings is worth that share of about two tokens."""
    case, _ = in_two(lambda i: 0.6, lambda i: 0.95, 0.1, by_branch=0.15)
    asked = case.drafter.drafter.asked
    assert 1 < np.mean(np.sum(asked[20:], axis=1)) < 6


def test_a_second_pass_that_begins_to_help_is_noticed_and_costs_little_before():
    case, continued = in_two(lambda i: 0.3, lambda i: 0.9 if i > 900 else 0.3, 0.3, 1800)
    starts = begins(case.rounds)
    before = (starts > 100) & (starts < 900)
    assert 0 < continued[before].mean() < 0.1
    assert continued[starts > 1400].mean() > 0.8


# Answers that come and go, and sequences of several drafters


class Shared(Honest):
    """Drafts for all sequences in one pass, a tenth of which each of them adds."""

    def propose(self, states, budget):
        self.target.clock.now += 0.1 * len(states)
        return super().propose(states, budget)


def seconds_of(times, lengths, slots, *sure):
    """To answer in so many tokens each, by turns with a drafter of each chance or with none."""
    target, drafters = TimedTarget(Clock(), times), [NoDraft()]
    target.pass_times = times
    if sure:
        shared = [Shared(0.0, lambda i, p=p: p, seed=k) for k, p in enumerate(sure)]
        drafters = [BatchBudget(s, times, Scope(looks_up=False), target.clock) for s in shared]
        for each in shared:
            each.target = target
    scheduler, left = scheduler_of(target), [*enumerate(lengths)]
    while left or len(scheduler):
        while left and len(scheduler) < slots:
            i, most = left.pop(0)
            prompt = [1, i % VOCABULARY, i // VOCABULARY % VOCABULARY]
            config = DecodeConfig(max_tokens=most)
            drafter = drafters[i % len(drafters)]
            scheduler.add(sequence_of(target, drafter, prompt, config))
        for _, outcome in scheduler.step():
            assert not isinstance(outcome, Exception), outcome
    return target.clock.now


MANY = PassTimes((1, 2, 4, 8, 16, 32, 64), (1.0, 1.25, 1.7, 2.6, 4.4, 8.0, 15.0))


def test_drafts_that_do_not_pay_cost_little_where_answers_begin_and_end_all_the_time():
    shares = []
    for seed in range(3):
        lengths = np.random.default_rng(seed).integers(4, 24, 160).tolist()
        shares.append(seconds_of(MANY, lengths, 8) / seconds_of(MANY, lengths, 8, 0.4))
    assert np.mean(shares) > 0.975


def test_a_number_that_began_with_what_another_taught_goes_on_to_learn():
    target = TimedTarget(Clock(), MANY)
    shared = Shared(0.0, lambda i: 0.8)
    shared.target = target
    budget = BatchBudget(shared, MANY, Scope(looks_up=False), target.clock)
    scheduler, begun = scheduler_of(target), []
    for count in (2, 5):
        for i in range(count):
            config = DecodeConfig(max_tokens=200)
            scheduler.add(sequence_of(target, budget, [1, i, 2], config))
        while scheduler.running or scheduler.waiting:
            scheduler.step()
            begun += [budget._together[5]] if 5 in budget._together else []
    assert len({id(each) for each in begun}) == 1 and begun[0].rounds > 40
    assert [arm.bias.mean for arm in begun[0].arms] != [1.0, 1.0]


def test_a_round_teaches_the_number_of_rows_that_it_had(monkeypatch):
    """Those of others may be gone when it is looked at."""
    target, taught, spent = TimedTarget(Clock(), MANY), [], Experience.spent
    drafter = Honest(0.0, lambda i: 0.8)
    drafter.target = target
    budget = BatchBudget(drafter, MANY, Scope(looks_up=False), target.clock)

    def learn(self, arm, cut, took):
        taught.append((self is budget._known(1 + cut.beside), any(arm is a for a in self.arms)))
        spent(self, arm, cut, took)

    monkeypatch.setattr(Experience, "spent", learn)
    scheduler = scheduler_of(target)
    for each, most in ((budget, 80), (NoDraft(), 10), (NoDraft(), 10)):
        scheduler.add(sequence_of(target, each, [1, 2, 3], DecodeConfig(max_tokens=most)))
    while len(scheduler):
        assert not any(isinstance(outcome, Exception) for _, outcome in scheduler.step())
    assert len(taught) > 10 and {*taught} == {(True, True)}


@pytest.mark.parametrize("chances", [(0.6, 0.6), (0.4, 0.4, 0.4, 0.4)])
def test_several_drafters_of_a_step_know_of_each_others_rows(chances):
    lengths = [100] * 8
    apart, one = (seconds_of(MANY, lengths, 8, *each) for each in (chances, chances[:1]))
    assert apart < 1.1 * one
