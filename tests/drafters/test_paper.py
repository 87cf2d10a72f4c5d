"""What reproduces papers: D2SD's tree as published, and draws of whole blocks, merged."""

from __future__ import annotations

from collections import Counter
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.growth.grow import Choices, Ranked, follow, rank, walk
from dflash_mlx.drafters.paper import PaperGrowth, Resample, merge_samples
from dflash_mlx.verifier.model import Target
from support.decoding import behind, paths_of
from support.drafter_formats import drafter_folder
from support.families import make_model


def law(seed: int, positions: int, vocabulary: int) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(positions, vocabulary)) * 2
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def sure(*confidences: float) -> Choices:
    """A first draft 0, 1, 2, ... that is so sure of each token."""
    return follow(Ranked(np.arange(len(confidences))[:, None], np.log([[c] for c in confidences])))


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
    first = follow(rank(mx.array(law(seed, 6, 20)), 4))
    prefixes = list(PaperGrowth(count).prefixes(first, {}, 5 + more))
    lengths = {prefix: 6 + more - len(prefix) for prefix in prefixes}
    second = {
        p: follow(rank(mx.array(law(seed + i + 1, lengths[p], 20)), 4))
        for i, p in enumerate(prefixes)
    }
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> BlockModel:
    target = Target(make_model("llama"), 200, "tiny")
    return drafter_folder(tmp_path_factory.mktemp("drafter"), [0, 2], 1, target)


def tree_drawn(model: BlockModel, seed: int) -> Tree:
    """The tree of a drafter that starts afresh."""
    drafter = Resample(model, None, 4, seed)
    return drafter.draft(behind(drafter, 7, mx.zeros((3, 2 * 64))), 100).tree


def test_a_seed_gives_the_same_draws_again_and_another_seed_others(model):
    tree = tree_drawn(model, 1)
    assert max(tree.depths) == model.config.block_size - 1
    assert tree_drawn(model, 1).drafted == tree.drafted
    assert tree_drawn(model, 2).drafted != tree.drafted
