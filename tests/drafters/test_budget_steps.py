"""How many steps a draft that is made token by token is worth, asked during the draft."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.autoregressive import GrownTree
from dflash_mlx.drafters.budget import BatchBudget
from support.decoding import open_with, start
from support.law import PROMPT, VOCABULARY, ToyEagle
from support.timed import FLAT, Case, InSteps
from support.toys import ToyTarget


def by_stretch(position: int) -> float:
    """Sure in every other stretch of 40 tokens."""
    return 0.95 if position // 40 % 2 else 0.2


def further(case: Case) -> np.ndarray:
    """Steps of each round beyond the first."""
    return np.array([len(r.proposal.steps) for r in case.rounds])


def fixed(seconds: float, sure, most: int, tokens: int = 600) -> float:
    """Seconds of an answer whose drafts have always so many steps."""
    drafter = InSteps(seconds, sure, most=most)
    drafter.asking = lambda another: drafter
    return Case(FLAT, drafter, tokens).seconds


def test_as_many_steps_are_made_as_pay_where_the_text_is():
    case = Case(FLAT, InSteps(0.3, by_stretch), 600)
    starts = np.cumsum([1, *(len(r.accepted.tokens) for r in case.rounds[:-1])])
    easy = np.array([by_stretch(i) > 0.5 and by_stretch(i + 4) > 0.5 for i in starts])
    hard = np.array([by_stretch(i) < 0.5 and by_stretch(i + 4) < 0.5 for i in starts])
    late, made = starts > 200, further(case)
    assert made[late & easy].mean() > 3.5 and made[late & hard].mean() < 0.5
    assert case.seconds < 0.95 * min(fixed(0.3, by_stretch, most) for most in (1, 2, 3, 7))


@pytest.mark.parametrize("seconds", [0.7, 5.0])
def test_steps_that_cost_too_much_are_hardly_ever_made(seconds):
    case = Case(FLAT, InSteps(seconds, lambda i: 0.6), 600)
    assert further(case)[20:].mean() < 0.1
    assert case.seconds < 1.1 * min(case.plain_seconds, fixed(seconds, lambda i: 0.6, 1))


def test_steps_that_cost_nothing_are_made_to_the_end():
    assert further(Case(FLAT, InSteps(0.0, lambda i: 0.8), 600))[20:].mean() > 5


def test_a_draft_model_that_is_too_sure_of_itself_is_soon_asked_for_fewer_steps():
    honest = Case(FLAT, InSteps(0.25, lambda i: 0.5), 600)
    boastful = Case(FLAT, InSteps(0.25, lambda i: 0.5, says=lambda i: 0.97), 600)
    assert further(boastful)[40:].mean() < further(honest)[40:].mean() + 1.0
    assert boastful.seconds < 1.15 * honest.seconds


def test_a_tree_that_is_cut_to_its_share_of_rows_still_says_how_many_steps_it_took():
    target, drafter = ToyTarget(VOCABULARY), GrownTree(ToyEagle(1), None, 3, 8)
    states = [start(target, drafter, PROMPT, DecodeConfig(max_tokens=20)) for _ in range(2)]
    for state in states:
        open_with(state, 1)
    whole, cut = (drafter.propose(states, rows) for rows in (40, 8))
    assert [len(each.tree) for each in whole] == [8, 8] and [len(each.tree) for each in cut] == [
        4,
        4,
    ]
    for before, after in zip(whole, cut, strict=True):
        assert len(before.steps) == 2 and after.steps == before.steps


def test_what_steps_of_one_sequence_have_brought_holds_for_several():
    budget = BatchBudget(InSteps(0.3, by_stretch), FLAT)
    assert budget._known(3).further.saved(1.0, 1.0, 0.5) > 0
    budget.experience.further.learn(0.0, 100.0)
    for count in (1, 2, 3):
        assert budget._known(count).further.saved(1.0, 1.0, 0.5) < 0
