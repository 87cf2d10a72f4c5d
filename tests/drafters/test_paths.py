"""Drafters that know the token before each: DFlash 2's selector, DSpark's and Domino's heads.

Their walks, greedy and drawn, and what DSpark's heads add; the selector's trees: test_selector;
what Domino's GRU reads: test_domino.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.block_diffusion import BestFirst, DrawnPath, RankedChain, SelectedPath
from dflash_mlx.drafters.budget import BatchBudget
from dflash_mlx.drafters.dflash.paths import MarkovHead, MarkovLinks
from dflash_mlx.drafters.dual_diffusion import DualDiffusion
from dflash_mlx.drafters.growth.grow import confident, walk
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.drafters.paper import PaperGrowth
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State
from dflash_mlx.train.dflash import DFlashTrainee
from support import reference_dflash2, reference_dspark
from support.decoding import answer, linked_of, paths_of
from support.drafter_formats import (
    DOMINO,
    DRAFT_IDS,
    DSPARK,
    FORMATS,
    FULL,
    SURE,
    case,
    speculators,
)
from support.drafting import TOLERANCE, Blocks
from support.families import VOCAB_SIZE
from support.law import chi_square

LINKED = ["version 2", *DSPARK, *DOMINO]


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
        unlinked = subject.expected(subject.text(9, seed), anchor, subject.model.block_size)
        detours += block.greedy() != unlinked.argmax(axis=-1).tolist()
    assert detours > 3, "the token before changes most paths, so that the walk is seen"


@pytest.mark.parametrize("name", ["dspark", *DOMINO])
def test_second_drafts_follow_the_walk_behind_their_prefixes(drafting, name):
    subject = drafting(name)
    both = DualDiffusion(subject.model, None, PaperGrowth(3))
    for seed in range(4):
        anchor = seed * 11 % VOCAB_SIZE
        drafts = both.begin([subject.behind(seed, anchor)], [6])
        (second,) = both.behind([subject.behind(seed, anchor)], drafts, [[*drafts[0].branches]])
        assert len(second) == 3
        for prefix, choices in second.items():
            block, path = subject.block(seed, anchor, 6, prefix), walk(choices)[0]
            assert list(path) == block.greedy() and len(path) == 5 - len(prefix)


@pytest.mark.parametrize("name", ["version 2", "dspark", *DOMINO])
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


def short(folder: Any, kind: str) -> Blocks:
    """Three drafts, of few tokens each."""
    if kind == "dflash2":
        raw = reference_dflash2.tiny_config(dflash_config={"selector_top_k": 3, "block_size": 4})
        return Blocks(folder, raw, reference_dflash2.random_tensors(raw))
    raw, ids = speculators("dspark", draft_vocab_size=5, block_size=3), DRAFT_IDS[::8]
    own = {"d2t": np.asarray(ids - np.arange(5), np.int64)}
    own["lm_head.weight"] = FULL["lm_head.weight"][:5] * 8
    return Blocks(folder, raw, {**reference_dspark.random_tensors(raw, 5), **own})


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


@pytest.mark.parametrize("name", ["version 2", "dspark", "dspark, draft vocabulary", "domino"])
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


# DSpark


def test_a_block_of_seven_drafts_seven_tokens(tmp_path):
    raw = reference_dspark.tiny_config(block_size=7)
    drafting = Blocks(tmp_path, *case(raw, **FULL))
    assert drafting.model.config.block_size == drafting.model.block_size == 8
    tree = SelectedPath(drafting.model).draft(drafting.behind(1, 4), 100).tree
    assert len(tree) == 8 and list(tree.drafted) == drafting.block(1, 4).greedy()


@pytest.mark.parametrize("name", DSPARK)
def test_paths_have_the_scores_and_confidences_of_the_reference(drafting, name):
    subject = drafting(name)
    state = subject.behind(3, 7)
    found = subject.model.candidates(state.context, state.anchor, 5)
    block = subject.block(3, 7, 5)
    tokens = [int(block.ids[i]) for i in (3, 30, 12, 8)]
    path = mx.array([np.array(found.tokens)[0].tolist().index(token) for token in tokens])
    _, scores = found.walk(lambda t, scores: path[t])
    before = [7, *tokens[:-1]]
    for t in range(4):
        expected = block.row(t, before[t])
        assert np.abs(np.array(scores[t]) - expected).max() < TOLERANCE
    assert (found.confidences is not None) == (name in SURE)
    if found.confidences is not None:
        sure = [block.confidence(t, before[t]) for t in range(4)]
        assert np.abs(np.array(found.confidences(path)) - sure).max() < TOLERANCE
        assert np.ptp(sure) > 0.02


@pytest.mark.parametrize("name", ["dspark, specforge", "domino"])
def test_a_conversation_s_own_tokens_are_drafted_with_a_part_of_the_target_s_head(tmp_path, name):
    subject = Blocks(tmp_path, *FORMATS[name])
    subject.model.limit_vocabulary(subject.target, np.arange(VOCAB_SIZE), 30)
    state = subject.behind(0, 7)
    state.context.words.add(mx.array([90]))
    found = subject.model.candidates(state.context, state.anchor, 4)
    known = np.array(found.tokens)[0].tolist()
    assert known[:30] == list(range(30)) and 90 in known and len(known) < VOCAB_SIZE
    block, (path, scores) = subject.block(0, 7, 4), found.likeliest()
    walked = np.array(found.at(path)).tolist()
    for t in range(3):
        row = block.row(tuple(walked[:t])) if name == "domino" else block.row(t, [7, *walked][t])
        assert np.abs(np.array(scores[t]) - row[known]).max() < TOLERANCE
    drafter = BestFirst(subject.model, None, 12)
    assert set(drafter.draft(state, 4).tree.drafted) <= set(known)


@pytest.mark.parametrize("name", DSPARK)
def test_along_the_greedy_walk_a_tree_has_the_law_of_the_reference(drafting, name):
    subject, chain = drafting(name), RankedChain(drafting(name).model)
    for seed in range(4):
        anchor = seed * 11 % VOCAB_SIZE
        state = subject.behind(seed, anchor)
        (linked,) = linked_of(subject.model, state.context, state.anchor, subject.model.block_size)
        block, place = subject.block(seed, anchor), 0
        walk = [anchor, *block.greedy()]
        for t in range(len(block.states)):
            law = block.law(t, walk[t])
            tokens = linked.ranked.tokens[t].tolist()
            assert tokens == sorted(law, key=lambda token: -law[token])[: len(tokens)]
            expected = np.log([law[token] for token in tokens])
            if name in SURE:
                expected = confident(expected, np.array(block.confidence(t, walk[t])))
            assert np.abs(linked.logprobs[t, place] - expected).max() < 1e-3
            place = tokens.index(walk[t + 1])
        tree = chain.draft(subject.behind(seed, anchor), 100).tree
        assert list(tree.drafted) == walk[1:]
        if name in SURE:
            sure = [block.confidence(t, walk[t]) for t in range(len(block.states))]
            assert np.allclose(np.exp(tree.logprobs[1:]), sure, atol=TOLERANCE)


def test_beside_the_walk_candidates_are_told_apart_as_the_reference_does(drafting):
    """Their odds are right; all of them together may be a little more or less likely."""
    subject = drafting("dspark, no confidence")
    state = subject.behind(5, 7)
    (linked,) = linked_of(subject.model, state.context, state.anchor, 5)
    block, seen = subject.block(5, 7, 5), 0
    for t in range(1, 4):
        for place, before in enumerate(linked.ranked.tokens[t - 1].tolist()):
            law = block.law(t, before)
            expected = np.log([law[token] for token in linked.ranked.tokens[t].tolist()])
            difference = linked.logprobs[t, place] - expected
            assert np.ptp(difference) < 1e-3
            seen += np.abs(difference).max() > 1e-3
    assert seen, "or the second sentence above is to be deleted"


@pytest.mark.parametrize("seed", range(20))
def test_confidence_moves_the_best_token_and_no_other_past_it(seed):
    rng = np.random.default_rng(seed)
    law = np.log(rng.dirichlet(np.ones(6), size=(4, 3)))[..., :5]  # one is no candidate
    sure = rng.uniform(size=(4, 3)) ** 2
    found, best = np.exp(confident(law, sure)), law.argmax(axis=-1)
    assert np.allclose(np.take_along_axis(found, best[..., None], axis=-1)[..., 0], sure)
    assert (found.argmax(axis=-1) == best).all() and found.sum(axis=-1).max() < 1 + 1e-9
    lost = sure < np.exp(law.max(axis=-1))
    assert lost.any() and not lost.all()
    scaled = np.exp(law) * (sure / np.exp(law.max(axis=-1)))[..., None]
    assert np.allclose(found[lost], scaled[lost]), "where it is less sure, all are as much less"
    assert (np.diff(np.sort(law), axis=-1) > 0).all()
    assert (np.argsort(found) == np.argsort(law)).all(), "their order stays"


@pytest.mark.parametrize("sure", [0.0, 1.0])
@pytest.mark.parametrize("best", [0.5, 1.0])
def test_confidence_may_be_none_at_all_or_certain(sure, best):
    with np.errstate(divide="ignore"):
        law = np.log(np.array([best, 1 - best]))
    found = confident(law, np.array(sure))
    assert not np.isnan(found).any() and np.isfinite(found[0]) and found.argmax() == 0
    assert np.exp(found[0]) == pytest.approx(sure, abs=1e-6)


def test_heads_that_are_given_other_weights_later_are_read_anew():
    head = MarkovHead(5, 5, 2)
    links, tokens = MarkovLinks(head, None, None), mx.array([[1, 2]])
    assert mx.abs(links.edges(tokens, tokens)).max() > 0
    head.markov_w2.weight = mx.zeros_like(head.markov_w2.weight)
    assert mx.abs(links.edges(tokens, tokens)).max() == 0
    found = links.candidates(mx.zeros((1, 4)), mx.zeros((1, 5)), mx.array([3]), None)
    assert mx.abs(found.likeliest()[1]).max() == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dspark, specforge", "drafts from its anchor"),
        ("speculators, from the anchor", "drafts from its anchor"),
        ("dspark, layers of Qwen3.5", "norms of 1 [+] w"),
        ("dspark, Gemma 4", "Gemma's layers"),
    ],
)
def test_a_drafter_of_what_training_does_not_do_is_not_trained(drafting, name, said):
    with pytest.raises(DFlashError, match=said):
        DFlashTrainee.read(drafting(name).folder, drafting(name).target)
