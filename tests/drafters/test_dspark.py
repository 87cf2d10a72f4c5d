"""DSpark: what its files say, what its heads add, and the trees that follow."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.block_diffusion import BestFirst, RankedChain, SelectedPath
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.dflash.paths import MarkovConfig, MarkovHead, MarkovLinks
from dflash_mlx.drafters.growth.grow import confident
from dflash_mlx.train.dflash import DFlashTrainee
from dflash_mlx.verifier.model import Target
from support import reference_dspark
from support.decoding import linked_of
from support.drafter_formats import DSPARK, FORMATS, FULL, SURE, Drafting, case, speculators
from support.families import VOCAB_SIZE, make_model
from support.reference_dflash import write_drafter_folder

TOLERANCE = 1e-4


# What is read


def test_a_block_of_seven_drafts_seven_tokens(tmp_path):
    raw = reference_dspark.tiny_config(block_size=7)
    drafting = Drafting(tmp_path, *case(raw, **FULL))
    assert drafting.model.config.block_size == drafting.model.block_size == 8
    tree = SelectedPath(drafting.model).draft(drafting.behind(1, 4), 100).tree
    assert len(tree) == 8 and list(tree.drafted) == drafting.block(1, 4).greedy()


def proposing(methods: Any) -> dict[str, Any]:
    """Of an older file, which only says how many tokens it proposes."""
    return {"sample_from_anchor": None, "speculators_config": {"proposal_methods": methods}}


@pytest.mark.parametrize(
    ("changes", "rows", "from_anchor"),
    [
        ({}, 7, True),
        ({"sample_from_anchor": False}, 6, False),
        (proposing(None), 6, False),
        (proposing([5]), 6, False),
        (proposing([{"speculative_tokens": 6}]), 7, True),
        (proposing([{"speculative_tokens": 5}]), 6, False),
    ],
)
def test_files_say_whether_the_anchor_s_row_drafts(changes, rows, from_anchor):
    config = FILES.parse_config(speculators("dspark", **changes), "it", FULL)
    assert (config.block_size, config.sample_from_anchor) == (rows, from_anchor)


# Paths


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


def test_a_conversation_s_own_tokens_are_drafted_with_a_part_of_the_target_s_head(tmp_path):
    subject = Drafting(tmp_path, *FORMATS["dspark, specforge"])
    subject.model.limit_vocabulary(subject.target, np.arange(VOCAB_SIZE), 30)
    state = subject.behind(0, 7)
    state.context.words.add(mx.array([90]))
    found = subject.model.candidates(state.context, state.anchor, 4)
    known = np.array(found.tokens)[0].tolist()
    assert known[:30] == list(range(30)) and 90 in known and len(known) < VOCAB_SIZE
    block, (path, scores) = subject.block(0, 7, 4), found.likeliest()
    before = [7, *np.array(found.at(path)).tolist()]
    for t in range(3):
        assert np.abs(np.array(scores[t]) - block.row(t, before[t])[known]).max() < TOLERANCE
    drafter = BestFirst(subject.model, None, 12)
    assert set(drafter.draft(state, 4).tree.drafted) <= set(known)


# Trees


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
    head = MarkovHead(5, 5, MarkovConfig(2))
    links, tokens = MarkovLinks(head, None, None), mx.array([[1, 2]])
    assert mx.abs(links.edges(tokens, tokens)).max() > 0
    head.markov_w2.weight = mx.zeros_like(head.markov_w2.weight)
    assert mx.abs(links.edges(tokens, tokens)).max() == 0
    found = links.candidates(mx.zeros((1, 4)), mx.zeros((1, 5)), mx.array([3]), None)
    assert mx.abs(found.likeliest()[1]).max() == 0


# Folders


def test_a_drafter_that_drafts_from_its_anchor_is_not_trained(tmp_path):
    target = Target(make_model("llama"), 512, "llama")
    for name in ("dspark, specforge", "speculators, from the anchor"):
        folder = write_drafter_folder(tmp_path / name, *FORMATS[name])
        with pytest.raises(DFlashError, match="drafts from its anchor"):
            DFlashTrainee.read(folder, target)
