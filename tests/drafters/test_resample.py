"""The naive control draws whole blocks from the first draft's own law, and reproducibly."""

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
from dflash_mlx.drafters.paper import Resample, log_softmax, merge_samples
from dflash_mlx.verifier.model import Target
from support.decoding import behind, paths_of
from support.drafter_formats import drafter_folder
from support.families import make_model


def law(seed: int, positions: int, vocabulary: int) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(positions, vocabulary)) * 1.5
    return log_softmax(logits.astype(np.float32))


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
        tree = merge_samples(log_softmax(logits), 3, np.random.default_rng(seed))
        assert set(tree.drafted) <= {0, 2}


def test_the_law_is_the_softmax():
    logits = np.random.default_rng(0).normal(size=(4, 30)).astype(np.float32) * 40
    expected = np.array(mx.log(mx.softmax(mx.array(logits), axis=-1)))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(log_softmax(logits)[finite], expected[finite], atol=1e-4)


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
