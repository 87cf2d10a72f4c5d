"""A second draft pass is made in the rounds in which it pays, over the branches that pay."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mlx.drafters.dual_diffusion import DualDiffusion, JointGrowth
from dflash_mlx.drafters.paper import AblatedDual, PaperGrowth
from dflash_mlx.verifier.pass_times import PassTimes
from support.decoding import behind, paths_of
from support.grammars import toy_constraint
from support.law import ToyDrafter
from support.timed import FLAT, Case, Honest, InTwo

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
