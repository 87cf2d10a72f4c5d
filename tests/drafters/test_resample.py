"""The naive control draws whole blocks from the first draft's own law, and reproducibly."""

from __future__ import annotations

from collections import Counter
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.cli.options import Parser, add_options
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.checkpoint import load_network, read_config
from dflash_mlx.drafters.growth.grow import Prefixes
from dflash_mlx.drafters.methods import find_method
from dflash_mlx.drafters.resample import Resample, log_softmax, merge_samples
from dflash_mlx.engine.state import State
from dflash_mlx.target.model import Target
from support.decoding import feed
from support.families import make_model
from support.reference_dflash import random_drafter, tiny_drafter_config, write_drafter_folder


def law(seed: int, positions: int, vocabulary: int) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(positions, vocabulary)) * 1.5
    return log_softmax(logits.astype(np.float32))


def leaves(tree: Prefixes) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return [path for i, path in enumerate(paths) if i not in tree.parents]


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=40)
def test_the_tree_is_the_likeliest_block_and_the_draws_with_shared_prefixes(seed, samples, n):
    logprobs = law(seed, n, 5)
    tree = merge_samples(logprobs, samples, np.random.default_rng(seed))
    blocks = leaves(tree)
    assert blocks[0] == tuple(np.argmax(logprobs, axis=-1))
    assert {len(block) for block in blocks} == {n}
    assert 1 <= len(blocks) <= samples + 1
    assert len({*zip(tree.parents, tree.tokens, strict=True)}) == len(tree), "equal siblings"
    assert len(tree) == 1 + len({block[:i] for block in blocks for i in range(1, n + 1)})
    for token, parent, logprob in zip(
        tree.tokens[1:], tree.parents[1:], tree.logprobs[1:], strict=True
    ):
        depth = 0
        while parent > 0:
            parent, depth = tree.parents[parent], depth + 1
        assert logprob == logprobs[depth, token]


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
        assert set(tree.tokens[1:]) <= {0, 2}


def test_the_law_is_the_softmax():
    logits = np.random.default_rng(0).normal(size=(4, 30)).astype(np.float32) * 40
    expected = np.array(mx.log(mx.softmax(mx.array(logits), axis=-1)))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(log_softmax(logits)[finite], expected[finite], atol=1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> BlockModel:
    folder = tmp_path_factory.mktemp("drafter")
    dflash = {"mask_token_id": 5, "target_layer_ids": [0, 2]}
    config = tiny_drafter_config(num_target_layers=3, dflash_config=dflash)
    write_drafter_folder(folder, config, random_drafter(config, 1))
    network_config = read_config(folder)
    target = Target(make_model("llama"), 200, "tiny")
    return BlockModel(load_network(folder, network_config, mx.float32), network_config, target)


def tokens_drawn(model: BlockModel, seed: int, committed: int = 3) -> tuple[int, ...]:
    """The tree of a drafter that starts afresh behind `committed` tokens."""
    drafter = Resample(model, None, 4, seed)
    context = drafter.new_context()
    feed(context, mx.zeros((committed, 2 * 64)))
    state = State(Target(make_model("llama"), 200, "tiny").new_cache(), context)
    state.set_anchor(7)
    tree = drafter.draft(state, 100).tree
    assert max(tree.depths) == model.config.block_size - 1
    return tree.drafted


def test_a_seed_gives_the_same_draws_again_and_another_seed_others(model):
    assert tokens_drawn(model, 1) == tokens_drawn(model, 1)
    assert tokens_drawn(model, 1) != tokens_drawn(model, 2)


def test_a_round_without_room_drafts_nothing(model):
    drafter = Resample(model, None, 4, 0)
    state = State(Target(make_model("llama"), 200, "tiny").new_cache(), drafter.new_context())
    state.set_anchor(7)
    assert len(drafter.draft(state, 1).tree) == 1


def test_the_control_can_be_compared_but_is_not_offered():
    assert find_method("resample").is_control
    parser = Parser()
    add_options(parser, DecodeConfig)
    with pytest.raises(SystemExit):
        parser.parse_args(["--method", "resample"])
