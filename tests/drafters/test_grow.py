"""Draft distributions become the trees that the papers describe."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_mlx.drafters.dual_diffusion import JointGrowth
from dflash_mlx.drafters.growth.grow import (
    Choices,
    Ranked,
    best_first,
    follow,
    likely_boundaries,
    mix,
    rank,
    rejection_boundaries,
    walk,
)

VOCABULARY = 20


def ranked(seed: int, positions: int, k: int = 4) -> Ranked:
    """The k best of a random law per position."""
    logits = np.random.default_rng(seed).normal(size=(positions, VOCABULARY)) * 2
    return rank(mx.array(logits.astype(np.float32)), k)


def test_rank_gives_the_best_tokens_of_the_softmax_in_order():
    logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    found = rank(mx.array(logits), 5)
    law = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = np.argsort(-law, axis=-1)[:, :5]
    assert (found.tokens == expected).all()
    np.testing.assert_allclose(
        np.exp(found.logprobs), np.take_along_axis(law, expected, -1), rtol=1e-5
    )


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=7))
def test_the_boundary_posterior_is_the_probability_of_exactly_so_many_acceptances(confidences):
    """Enumerate which drafts are right; exactly i are accepted when the first wrong one is i+1."""
    expected = np.zeros(len(confidences) + 1)
    for right in product([True, False], repeat=len(confidences)):
        mass = np.prod([c if ok else 1 - c for c, ok in zip(confidences, right, strict=True)])
        accepted = right.index(False) if False in right else len(right)
        expected[accepted] += mass
    np.testing.assert_allclose(rejection_boundaries(np.array(confidences)), expected[:-1])


def sure(*confidences: float) -> Choices:
    """A first draft 0, 1, 2, ... that is so sure of each token."""
    return follow(Ranked(np.arange(len(confidences))[:, None], np.log([[c] for c in confidences])))


@pytest.mark.parametrize(
    ("tokens", "law", "boundaries"),
    [
        ([[1], [2], [3]], [[0.9], [0.2], [0.5]], [(1,), ()]),  # no other paths: as in the paper
        ([[1, 2], [3, 4]], [[0.5, 0.45], [0.3, 0.2]], [(), (1,), (2,)]),
    ],
)
def test_boundaries_are_those_of_the_best_path_and_of_likely_second_choices(
    tokens, law, boundaries
):
    choices, count = follow(Ranked(np.array(tokens), np.log(np.array(law)))), len(boundaries)
    assert [*likely_boundaries(choices, count, len(tokens) - 1)] == boundaries
    rest = [*likely_boundaries(choices, count, len(tokens) - 1, known=boundaries[:1])]
    assert rest[: count - 1] == boundaries[1:]


def test_a_draft_that_is_likely_to_be_right_to_its_end_is_continued_there():
    assert [*likely_boundaries(sure(0.9, 0.9), 1, 2)] == [(0, 1)]
    assert [*likely_boundaries(sure(0.9, 0.9), 1, 1)] == [()], "or not, without room for more"


def test_joint_branches_are_in_the_order_in_which_a_second_pass_would_pay():
    first = sure(0.97, 0.9, 0.5, 0.9)  # r = 0.03, 0.10, 0.44, 0.04
    posteriors = JointGrowth(2, 8).prefixes(first, {}, 3)
    assert [*posteriors] == [(0, 1), ()], "the empty prefix is one of several, not the first"
    assert [*posteriors.values()] == pytest.approx([0.97 * 0.9 * 0.5, 0.03])
    assert [*JointGrowth(1, 8).prefixes(first, {}, 3)] == [(0, 1)]


def test_choices_come_from_the_draft_that_saw_most_of_the_path_and_from_the_first():
    first, second, third = ranked(1, 4), ranked(2, 3), ranked(3, 3)
    (a, b), short = walk(follow(first))[0][:2], ranked(4, 1)
    drafts = {(): second, (a,): second, (a, b): third, (b,): short}
    both = JointGrowth(2, 8)._both(follow(first), {p: follow(draft) for p, draft in drafts.items()})
    behind, root = JointGrowth.FIRST_SHARE, JointGrowth.ROOT_SHARE
    for path, draft, position, share in [
        ((), second, 0, root),
        ((a,), second, 0, behind),
        ((a, a), second, 1, behind),
        ((a, b, a), third, 1, behind),
        ((b,), short, 0, behind),
        ((b, a), second, 2, root),  # the short one has ended
    ]:
        assert both(path) == mix(draft.offers[position], first.offers[len(path)], share)
    assert both((a, b, a, b)) == third.offers[2], "behind the first draft's end, the second alone"
    assert both((a, b, a, b, a)) is None


def test_mixing_adds_probabilities_and_keeps_the_order():
    first, second = ([1, 2], np.log([0.6, 0.2])), ([2, 3], np.log([0.8, 0.1]))
    tokens, logprobs = mix(first, second, 0.5)
    assert tokens == [2, 1]
    np.testing.assert_allclose(np.exp(logprobs), [0.5, 0.3])


def test_probabilities_that_vanish_do_not_confuse_the_order():
    _, logprobs = mix(([1, 2], [0.0, -150.0]), ([1, 3], [0.0, -900.0]), 0.5)
    assert np.isfinite(logprobs).all()
    tree = best_first(follow(Ranked(np.array([[1, 2]]), np.array([[0.0, -np.inf]]))), 5)
    assert tree.drafted == (1,)


def test_a_vocabulary_smaller_than_the_ranking_is_ranked_whole():
    assert rank(mx.array([[1.0, 3.0, 2.0]]), 8).tokens.tolist() == [[1, 2, 0]]
