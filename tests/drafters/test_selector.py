"""DFlash 2's paths: the greedy one is the reference's, drawn ones follow its law."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.sampling import tempered
from dflash_mlx.drafters.block_diffusion import BlockDiffusion, DrawnBlock, DrawnPath, SelectedPath
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dual_diffusion import DualDiffusion, PaperGrowth
from dflash_mlx.drafters.growth.grow import Ranked
from dflash_mlx.drafters.growth.links import along_path, conditional
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State
from dflash_mlx.target.model import Target
from support import reference_dflash2
from support.decoding import behind
from support.drafter_formats import written
from support.families import VOCAB_SIZE, make_model
from support.law import chi_square
from support.reference_dflash import random_drafter, tiny_drafter_config

CONFIG = reference_dflash2.tiny_config(dflash_config={"selector_top_k": 3, "block_size": 4})
BLOCK, TOP_K, WIDTH = 4, 3, 128


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    return reference_dflash2.random_tensors(CONFIG)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(make_model("llama"), 512, "llama")


@pytest.fixture(scope="module")
def model(tmp_path_factory, tensors, target) -> BlockModel:
    return written(tmp_path_factory.mktemp("drafter"), CONFIG, tensors, target)


def features_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(9, WIDTH)).astype(np.float32)


def reference(tensors: Any, target: Target, seed: int, anchor: int) -> tuple[Any, Any]:
    """Final states and logits of a block."""
    table = np.array(target.embedding().weight)
    block = features_of(seed), anchor, BLOCK
    hidden = reference_dflash2.draft_states(tensors, CONFIG, (table, table), *block)
    return hidden, reference_dflash2.logits(tensors, CONFIG, (table, table), *block)


# Greedy


def test_the_greedy_walk_and_d2sd_s_first_draft_are_those_of_the_reference(model, tensors, target):
    drafter, both, detours = (
        SelectedPath(model),
        DualDiffusion(model, None, None, PaperGrowth(2)),
        0,
    )
    for seed in range(25):
        anchor, features = seed * 3 % VOCAB_SIZE, features_of(seed)
        hidden, unary = reference(tensors, target, seed, anchor)
        tree = drafter.draft(behind(drafter, anchor, features), 100).tree
        path = reference_dflash2.greedy_path(tensors, CONFIG, hidden, unary, anchor)
        assert tree.is_chain and tree.drafted == tuple(path)
        first, _ = both.drafts(behind(both, anchor, features), BLOCK)
        assert list(first.best) == path
        detours += path != unary.argmax(axis=-1).tolist()
    assert detours > 10, "the selector changes most paths, so that its walk is seen"


def test_behind_the_walk_candidates_stand_as_they_do_after_its_tokens():
    rng = np.random.default_rng(0)
    n, k, kept = 6, 5, 3
    tokens = np.array([rng.permutation(40)[:k] for _ in range(n)])
    logprobs = np.log(np.array([rng.dirichlet(np.ones(k)) for _ in range(n)]) * 0.9)
    ranked, edges = Ranked(tokens, logprobs), rng.normal(size=(n, k, k)) * 2
    edges[0] = edges[0, 0]
    law, before, detours = conditional(ranked, edges), 0, 0
    first = along_path(ranked, edges, kept)
    assert first.tokens.shape == first.logprobs.shape == (n, kept)
    for t in range(n):
        order = np.argsort(-law[t, before])[:kept]
        assert first.tokens[t].tolist() == tokens[t, order].tolist()
        assert np.allclose(first.logprobs[t], law[t, before, order])
        before = int(order[0])
        detours += before != int(logprobs[t].argmax())
    assert detours > 1


@pytest.mark.parametrize("room", [1, 2, 3, 4, 50])
def test_a_path_fits_the_room(model, target, room):
    tree = SelectedPath(model).draft(behind(model, 7, features_of(0)), room).tree
    assert len(tree) == min(room, BLOCK)


# Drawn


def drawn_path(model: BlockModel, state: State, temperature: float, seed: int) -> Proposal:
    sampling = SamplingConfig(seed=seed, temperature=temperature)
    return DrawnPath(model, None, sampling).draft(state, 100)


def test_drawn_paths_follow_the_law_of_the_walk(model, tensors, target, monkeypatch):
    state = behind(model, 7, features_of(1))
    hidden, unary = reference(tensors, target, 1, 7)
    law = reference_dflash2.path_law(tensors, CONFIG, hidden, unary, 7, 1.3)
    assert len(law) == TOP_K ** (BLOCK - 1) and abs(sum(law.values()) - 1) < 1e-9
    found = model.candidates(state.context, state.anchor, BLOCK)
    monkeypatch.setattr(
        model, "candidates", lambda *block: found
    )  # the pass itself is always alike
    draws = [drawn_path(model, state, 1.3, seed).tree.drafted for seed in range(1500)]
    assert chi_square(law, draws) < 4
    flat = {path: 1 / len(law) for path in law}
    assert chi_square(flat, draws) > 4, "the test notices another law"


def test_q_is_the_law_of_each_token_after_those_drawn_before(model, tensors, target):
    state = behind(model, 9, features_of(2))
    hidden, unary = reference(tensors, target, 2, 9)
    for seed in range(5):
        proposal = drawn_path(model, state, 0.8, seed)
        tree, q = proposal.tree, np.array(proposal.q)
        assert q.shape == (BLOCK - 1, VOCAB_SIZE) and np.allclose(q.sum(axis=-1), 1)
        before = 9
        for t, token in enumerate(tree.drafted):
            candidates = reference_dflash2.offers(CONFIG, unary)[t]
            scores = [
                reference_dflash2.score(tensors, hidden[t], unary[t], before, b) for b in candidates
            ]
            weights = np.exp((np.array(scores) - max(scores)) / 0.8)
            expected = np.zeros(VOCAB_SIZE)
            expected[candidates] = weights / weights.sum()
            assert np.abs(q[t] - expected).max() < 1e-4
            before = token


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.6}, {"min_p": 0.5}], ids=str)
def test_the_targets_filters_apply_to_the_candidates(model, target, filters):
    state = behind(model, 11, features_of(3))
    sampling = SamplingConfig(temperature=1.0, seed=4, **filters)
    proposal = DrawnPath(model, None, sampling).draft(state, 100)
    tree = proposal.tree
    q, found = np.array(proposal.q), model.candidates(state.context, state.anchor, BLOCK)
    path = [np.array(found.tokens)[t].tolist().index(k) for t, k in enumerate(tree.drafted)]
    kept = np.isfinite(np.array(tempered(found.scores_along(mx.array(path)), sampling)))
    assert (q > 0).sum(axis=-1).tolist() == kept.sum(axis=-1).tolist()
    assert kept.sum() < kept.size


# The method


@pytest.mark.parametrize(
    ("is_second", "sampling", "expected"),
    [
        (False, {}, BlockDiffusion),
        (True, {}, SelectedPath),
        (False, {"temperature": 0.7}, DrawnBlock),
        (True, {"temperature": 0.7}, DrawnPath),
    ],
)
def test_the_dflash_method_takes_the_paths_of_drafters_that_have_them(
    tmp_path, model, tensors, target, is_second, sampling, expected
):
    plain = tiny_drafter_config(num_target_layers=3, dflash_config={**CONFIG["dflash_config"]})
    raw, weights = (CONFIG, tensors) if is_second else (plain, random_drafter(plain))
    pair = Pair(target, None, (written(tmp_path, raw, weights, target),))
    use = DecodeConfig("dflash", sampling=SamplingConfig(**sampling))
    assert type(make_drafter(pair, use)) is expected
