"""From laws, or from earlier text, to prefix trees: best first, as in papers, and by lookup."""

from __future__ import annotations

from collections import Counter
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.core.tree import Tree
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
from dflash_mlx.drafters.paper import PaperGrowth, Resample, merge_samples
from support.decoding import paths_of

# Best first


def law(seed: int, positions: int, vocabulary: int = 20) -> np.ndarray:
    """Random log-probabilities of every position's tokens."""
    logits = np.random.default_rng(seed).normal(size=(positions, vocabulary)) * 2
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def ranked(seed: int, positions: int) -> Ranked:
    """The best of a random law per position."""
    return rank(mx.array(law(seed, positions)), 4)


def test_rank_gives_the_best_tokens_of_the_softmax_in_order():
    logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    found = rank(mx.array(logits), 5)
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = np.argsort(-chances, axis=-1)[:, :5]
    assert (found.tokens == expected).all()
    likeliest = np.take_along_axis(chances, expected, -1)
    np.testing.assert_allclose(np.exp(found.logprobs), likeliest, rtol=1e-5)
    assert rank(mx.array([[1.0, 3.0, 2.0]]), 8).tokens.tolist() == [[1, 2, 0]], "all there are"


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


# As published


def test_published_branches_leave_the_first_draft_where_it_is_likeliest_to_be_rejected():
    first = sure(0.9, 0.2, 0.5)  # r = 0.1, 0.72, 0.09, and 0.09 for all of it
    posteriors = PaperGrowth(2).prefixes(first, {}, 3).values()
    assert list(posteriors) == pytest.approx([0.72, 0.1, 0.09])
    assert [*PaperGrowth(2).prefixes(first, {}, 2)] == [(0,), ()]
    assert [*PaperGrowth(9).prefixes(first, {}, 2)] == [(0,), (), (0, 1)]
    assert [*PaperGrowth(2).prefixes(first, {}, 3)] == [(0,), (), (0, 1, 2)], "and one extends it"


def test_a_third_level_continues_the_second_s_branches_where_they_are_likely_to_fail():
    first, second = sure(0.9, 0.2), follow(Ranked(np.array([[7], [8]]), np.log([[0.9], [0.1]])))
    # Behind (0,) the second goes on with 7, 8: r(0, 7) = 0.9 * 0.9 * 0.9
    assert [*PaperGrowth(1).prefixes(first, {(0,): second}, 2)] == [(0, 7), (0, 1)]


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=40)
def test_the_published_tree_holds_exactly_the_branches_and_shares_their_prefixes(seed, count, more):
    first = follow(ranked(seed, 6))
    prefixes = list(PaperGrowth(count).prefixes(first, {}, 5 + more))
    lengths = {prefix: 6 + more - len(prefix) for prefix in prefixes}
    second = {p: follow(ranked(seed + i + 1, lengths[p])) for i, p in enumerate(prefixes)}
    chains = [walk(first)[0], *((*prefix, *walk(draft)[0]) for prefix, draft in second.items())]
    assert (more > 0) == (chains[0] in second), "a longer second block extends the whole draft"
    expected = {chain[:n] for chain in chains for n in range(len(chain) + 1)}
    assert set(paths_of(PaperGrowth(count).tree(first, second))) == expected


def leaves(tree: Tree) -> list[tuple[int, ...]]:
    return [path for i, path in enumerate(paths_of(tree)) if i not in tree.parents]


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=40)
def test_the_tree_is_the_likeliest_block_and_the_draws_with_shared_prefixes(seed, samples, n):
    logprobs = law(seed, n, 5)
    tree = merge_samples(logprobs, samples, np.random.default_rng(seed))
    blocks = leaves(tree)
    assert blocks[0] == tuple(np.argmax(logprobs, axis=-1))
    assert {len(block) for block in blocks} == {n}
    assert 1 <= len(blocks) <= samples + 1
    assert len(tree) == 1 + len({block[:i] for block in blocks for i in range(1, n + 1)})
    for node, depth in enumerate(tree.depths[1:], start=1):
        assert tree.logprobs[node] == logprobs[depth - 1, tree.drafted[node - 1]]


def test_blocks_are_drawn_with_their_probability():
    """Enumerate the blocks of two positions; every frequency lies within four deviations."""
    logprobs, trials = law(1, 2, 3), 6000
    generator, found = np.random.default_rng(0), Counter()
    for _ in range(trials):
        found[leaves(merge_samples(logprobs, 1, generator))[-1]] += 1
    for block in product(range(3), repeat=2):
        expected = float(np.exp(sum(logprobs[i, token] for i, token in enumerate(block))))
        deviation = (expected * (1 - expected) / trials) ** 0.5
        assert abs(found[block] / trials - expected) < 4 * deviation


def test_tokens_that_the_drafter_excludes_are_never_drawn():
    logits = np.array([[0.0, -np.inf, 0.0, -np.inf]] * 3, np.float32)
    for seed in range(50):
        tree = merge_samples(logits, 3, np.random.default_rng(seed))
        assert set(tree.drafted) <= {0, 2}


def test_a_seed_gives_the_same_draws_again_and_another_seed_others(drafting):
    subject = drafting("version 1")

    def drawn(seed: int) -> Tree:
        """The tree of a drafter that starts afresh."""
        return Resample(subject.model, None, 4, seed).draft(subject.behind(0, 7), 100).tree

    assert max(drawn(1).depths) == subject.model.block_size - 1
    assert drawn(1).drafted == drawn(1).drafted != drawn(2).drafted


# Prompt lookup
