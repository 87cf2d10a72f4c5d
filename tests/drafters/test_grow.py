"""Draft distributions become the trees that the papers describe."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.drafters.dual_diffusion import PaperGrowth
from dflash_mlx.drafters.growth.grow import (
    Ranked,
    best_first,
    follow,
    follow_nearest,
    likely_boundaries,
    likely_prefixes,
    mix,
    rejection_boundaries,
)
from dflash_mlx.drafters.growth.rank import rank
from support.decoding import paths_of

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


def test_the_likeliest_boundaries_come_first():
    confidences = np.array([0.9, 0.2, 0.5])  # r = 0.1, 0.72, 0.09
    assert likely_prefixes(confidences, 2) == [1, 0]
    assert likely_prefixes(confidences, 9) == [1, 0, 2]


@given(st.integers(0, 10**6), st.integers(1, 5))
@settings(max_examples=40)
def test_the_published_tree_holds_exactly_the_branches_and_shares_their_prefixes(seed, count):
    first = ranked(seed, 6)
    prefixes = PaperGrowth(count).prefixes(first)
    second = {prefix: ranked(seed + i + 1, 6 - len(prefix)) for i, prefix in enumerate(prefixes)}
    chains = [first.best, *((*prefix, *draft.best) for prefix, draft in second.items())]
    expected = {chain[:n] for chain in chains for n in range(len(chain) + 1)}
    assert set(paths_of(PaperGrowth(count).tree(first, second))) == expected


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
    first = Ranked(np.array(tokens), np.log(np.array(law)))
    assert likely_boundaries(first, len(boundaries)) == boundaries


def test_choices_come_from_the_draft_that_saw_most_of_the_path():
    first, second, third = ranked(1, 4), ranked(2, 3), ranked(3, 2)
    a, b = first.best[:2]
    short = ranked(4, 1)
    choices = follow_nearest({(): first, (a,): second, (a, b): third, (b,): short})
    for path, draft, position in [
        ((), first, 0),
        ((a,), second, 0),
        ((a, a), second, 1),
        ((a, b, a), third, 1),
        ((b,), short, 0),
        ((b, a), first, 2),  # the short one has ended
    ]:
        assert (choices(path)[0] == draft.tokens[position]).all()
    assert choices((a, b, a, b)) is None


def test_mixing_adds_probabilities_and_keeps_the_order():
    first = Ranked(np.array([[1, 2]]), np.log(np.array([[0.6, 0.2]])))
    second = Ranked(np.array([[2, 3]]), np.log(np.array([[0.8, 0.1]])))
    both = mix(first, second, 0.5)
    assert both.tokens.tolist() == [[2, 1]]
    np.testing.assert_allclose(np.exp(both.logprobs), [[0.5, 0.3]])


def test_probabilities_that_vanish_do_not_confuse_the_order():
    first = Ranked(np.array([[1, 2]]), np.array([[0.0, -150.0]], np.float32))
    both = mix(first, Ranked(np.array([[1, 3]]), np.array([[0.0, -900.0]])), 0.5)
    assert np.isfinite(both.logprobs).all()
    tree = best_first(follow(Ranked(first.tokens, np.array([[0.0, -np.inf]]))), 5)
    assert tree.drafted == (1,)


def test_a_vocabulary_smaller_than_the_ranking_is_ranked_whole():
    assert rank(mx.array([[1.0, 3.0, 2.0]]), 8).tokens.tolist() == [[1, 2, 0]]
