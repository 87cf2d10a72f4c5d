"""Drafters that know the token before each: their walks, greedy and drawn, and what follows.

Of DFlash 2's selector and of DSpark's heads; what each adds of its own: test_selector, test_dspark.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.drafters.block_diffusion import BestFirst, DrawnPath, SelectedPath
from dflash_mlx.drafters.budget import BatchBudget
from dflash_mlx.drafters.dual_diffusion import DualDiffusion
from dflash_mlx.drafters.growth.grow import walk
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.drafters.paper import PaperGrowth
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State
from support import reference_dflash2, reference_dspark
from support.decoding import answer, paths_of
from support.drafter_formats import (
    DRAFT_IDS,
    DSPARK,
    FULL,
    SURE,
    Drafting,
    features_of,
    speculators,
)
from support.families import VOCAB_SIZE
from support.law import chi_square

LINKED = ["version 2", *DSPARK]
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", LINKED)
def test_the_greedy_walk_and_d2sd_s_first_draft_are_those_of_the_reference(drafting, name):
    subject, detours = drafting(name), 0
    drafter, both = SelectedPath(subject.model), DualDiffusion(subject.model, None, PaperGrowth(2))
    for seed in range(8):
        anchor = seed * 11 % VOCAB_SIZE
        block = subject.block(seed, anchor)
        tree = drafter.draft(subject.behind(seed, anchor), 100).tree
        assert tree.is_chain and list(tree.drafted) == block.greedy()
        (first,) = both.begin([subject.behind(seed, anchor)], [subject.model.block_size])
        assert list(walk(first.choices)[0]) == block.greedy()
        unlinked = subject.expected(features_of(9, seed), anchor, subject.model.block_size)
        detours += block.greedy() != unlinked.argmax(axis=-1).tolist()
    assert detours > 3, "the token before changes most paths, so that the walk is seen"


def test_second_drafts_follow_the_walk_behind_their_prefixes(drafting):
    subject = drafting("dspark")
    both = DualDiffusion(subject.model, None, PaperGrowth(3))
    for seed in range(4):
        anchor = seed * 11 % VOCAB_SIZE
        drafts = both.begin([subject.behind(seed, anchor)], [6])
        (second,) = both.second([subject.behind(seed, anchor)], drafts, [3])
        assert len(second) == 3
        for prefix, choices in second.items():
            block, path = subject.block(seed, anchor, 6, prefix), walk(choices)[0]
            assert list(path) == block.greedy() and len(path) == 5 - len(prefix)


@pytest.mark.parametrize("name", ["version 2", "dspark"])
@pytest.mark.parametrize("remaining", [1, 2, 3, 50])
def test_a_path_fits_the_room_and_a_tree_is_no_deeper_than_the_block(drafting, name, remaining):
    subject = drafting(name)
    tree = SelectedPath(subject.model).draft(subject.behind(0, 7), remaining).tree
    assert len(tree) == min(remaining, 6)
    tree = BestFirst(subject.model, None, 40).draft(subject.behind(0, 7), 100).tree
    assert max(tree.depths) == 5 and len(paths_of(tree)) == len(tree) == 40


# Drawn


def drawn_path(model: Any, state: State, temperature: float, seed: int) -> Any:
    sampling = SamplingConfig(seed=seed, temperature=temperature)
    return DrawnPath(model, None, sampling, weighed=True).draft(state, 100)


def short(folder: Any, kind: str) -> Drafting:
    """Three drafts, of few tokens each."""
    if kind == "dflash2":
        raw = reference_dflash2.tiny_config(dflash_config={"selector_top_k": 3, "block_size": 4})
        return Drafting(folder, raw, reference_dflash2.random_tensors(raw))
    raw, ids = speculators("dspark", draft_vocab_size=5, block_size=3), DRAFT_IDS[::8]
    own = {"d2t": np.asarray(ids - np.arange(5), np.int64)}
    own["lm_head.weight"] = FULL["lm_head.weight"][:5] * 8
    return Drafting(folder, raw, {**reference_dspark.random_tensors(raw, 5), **own})


@pytest.mark.parametrize(("kind", "offered"), [("dflash2", 3), ("dspark", 5)])
def test_drawn_paths_follow_the_law_of_the_walk(tmp_path, monkeypatch, kind, offered):
    subject = short(tmp_path, kind)
    model, state = subject.model, subject.behind(1, 7)
    law = subject.block(1, 7).path_law(1.3)
    assert len(law) == offered**3 and abs(sum(law.values()) - 1) < 1e-9
    found = model.candidates(state.context, state.anchor, 4)
    monkeypatch.setattr(model, "candidates", lambda *block: found)  # the pass is always alike
    draws = [drawn_path(model, state, 1.3, seed).tree.drafted for seed in range(800)]
    assert chi_square(law, draws) < 4
    flat = {path: 1 / len(law) for path in law}
    assert chi_square(flat, draws) > 4, "the test notices another law"


@pytest.mark.parametrize(
    "name", ["version 2", "dspark", "dspark, draft vocabulary", "dspark, no confidence"]
)
def test_q_is_the_law_after_the_tokens_drawn_before_and_trees_know_the_walk_s_confidence(
    drafting, name
):
    subject = drafting(name)
    state, block = subject.behind(2, 9), subject.block(2, 9)
    walked, drafts = [9, *block.greedy()], len(block.states)
    for seed in range(4):
        proposal = drawn_path(subject.model, state, 0.8, seed)
        q, before = np.array(proposal.q), 9
        assert q.shape == (drafts, VOCAB_SIZE)
        for t, token in enumerate(proposal.tree.drafted):
            expected = np.zeros(VOCAB_SIZE)
            for other, chance in block.law(t, before, 0.8).items():
                expected[other] = chance
            assert np.abs(q[t] - expected).max() < TOLERANCE
            before = token
        if name in SURE:
            sure = [block.confidence(t, walked[t]) for t in range(drafts)]
        else:
            sure = [max(block.law(t, walked[t], 0.8).values()) for t in range(drafts)]
        assert np.allclose(np.exp(proposal.tree.logprobs[1:]), sure, atol=TOLERANCE)


# Decoding


@pytest.mark.parametrize("name", ["version 2", "dspark", "dspark, draft vocabulary"])
@pytest.mark.parametrize("method", ["dflash", "ddtree", "d2sd"])
@pytest.mark.parametrize("budget", [None, 12])
def test_greedy_answers_are_the_target_s_own(drafting, name, method, budget):
    subject, prompt = drafting(name), [3, 1, 4, 1, 5, 9]
    settings = {"block_size": 5 if budget else None} if method == "dflash" else {"budget": budget}
    config = DecodeConfig(method, max_tokens=25, **settings)
    drafter = make_drafter(Pair(subject.target, None, (subject.model,)), config)
    assert isinstance(drafter, BatchBudget) == (budget is None)
    plain = answer(subject.target, NoDraft(), prompt, config)
    assert answer(subject.target, drafter, prompt, config) == plain
