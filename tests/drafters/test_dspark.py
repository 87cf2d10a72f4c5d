"""DSpark: what its heads add, the walks and trees that follow, and what is decoded with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.block_diffusion import BestFirst, DrawnPath, RankedChain, SelectedPath
from dflash_mlx.drafters.budget import BatchBudget
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.dflash.paths import MarkovConfig, MarkovHead, MarkovLinks
from dflash_mlx.drafters.dual_diffusion import DualDiffusion
from dflash_mlx.drafters.growth.grow import Array, confident, walk
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.drafters.paper import PaperGrowth
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train.dflash import DFlashTrainee
from dflash_mlx.verifier.model import Target
from support import reference_dspark
from support.decoding import answer, behind, linked_of, paths_of
from support.drafter_formats import DRAFT_IDS, FORMATS, FULL, WIDTH, case, speculators, written
from support.families import VOCAB_SIZE, make_model
from support.law import chi_square
from support.reference_dflash import write_drafter_folder

DSPARK = [name for name in FORMATS if name.startswith("dspark") and "no heads" not in name]
SURE = [name for name in DSPARK if "no confidence" not in name]
TOLERANCE = 1e-4


def features_of(seed: int, length: int = 9) -> Array:
    return np.random.default_rng(seed).normal(size=(length, WIDTH)).astype(np.float32)


class Drafting:
    """A random drafter of the tiny llama, and what NumPy says of its blocks."""

    def __init__(self, folder: Path, name: str, raw: Any = None, **more: Array) -> None:
        self.raw, tensors = FORMATS[name] if raw is None else raw
        self.tensors = {**tensors, **more}
        self.target = Target(make_model("llama"), 512, "llama")
        self.model = written(folder, self.raw, self.tensors, self.target)

    def block(self, seed: int, anchor: int, drafts: int = 0, prefix: Any = ()) -> Any:
        table = np.array(self.target.embedding().weight)
        drafts = drafts or self.model.block_size - 1
        given = self.raw, self.tensors, (table, table), features_of(seed), anchor, drafts
        return reference_dspark.Block(*given, prefix)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    made: dict[str, Drafting] = {}

    def get(name: str) -> Drafting:
        if name not in made:
            made[name] = Drafting(tmp_path_factory.mktemp("drafter"), name)
        return made[name]

    return get


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Drafting:
    """Five tokens of a draft vocabulary, and three drafts."""
    raw = speculators("dspark", draft_vocab_size=5, block_size=3)
    ids = DRAFT_IDS[::8]
    d2t = {"d2t": np.asarray(ids - np.arange(5), np.int64)}
    head = {"lm_head.weight": FULL["lm_head.weight"][:5] * 8}
    tensors = reference_dspark.random_tensors(raw, 5)
    folder = tmp_path_factory.mktemp("short")
    return Drafting(folder, "", (raw, {**tensors, **d2t, **head}))


# What is read


def test_a_block_of_seven_drafts_seven_tokens(tmp_path):
    raw = reference_dspark.tiny_config(block_size=7)
    drafting = Drafting(tmp_path, "", case(raw, **FULL))
    assert drafting.model.config.block_size == drafting.model.block_size == 8
    tree = SelectedPath(drafting.model).draft(behind(drafting.model, 4, features_of(1)), 100).tree
    assert list(tree.drafted) == drafting.block(1, 4, 7).greedy()


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
def test_the_greedy_walk_is_that_of_the_reference(drafting, name):
    subject, detours = drafting(name), 0
    drafter = SelectedPath(subject.model)
    for seed in range(8):
        anchor = seed * 11 % VOCAB_SIZE
        tree = drafter.draft(behind(drafter, anchor, features_of(seed)), 100).tree
        block = subject.block(seed, anchor)
        assert tree.is_chain and list(tree.drafted) == block.greedy()
        detours += block.greedy() != block.ids[block.logits.argmax(axis=-1)].tolist()
    assert detours > 5, "the token before changes most paths, so that the walk is seen"


@pytest.mark.parametrize("name", DSPARK)
def test_paths_have_the_scores_and_confidences_of_the_reference(drafting, name):
    subject = drafting(name)
    state = behind(subject.model, 7, features_of(3))
    found = subject.model.candidates(state.context, state.anchor, 5)
    block = subject.block(3, 7, 4)
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


@pytest.mark.parametrize("remaining", [1, 2, 3, 50])
def test_a_path_fits_the_room(drafting, remaining):
    model = drafting("dspark").model
    tree = SelectedPath(model).draft(behind(model, 7, features_of(0)), remaining).tree
    assert len(tree) == min(remaining, 6)


def test_a_conversation_s_own_tokens_are_drafted_with_a_part_of_the_target_s_head(tmp_path):
    subject = Drafting(tmp_path, "dspark, specforge")
    subject.model.limit_vocabulary(subject.target, np.arange(VOCAB_SIZE), 30)
    state = behind(subject.model, 7, features_of(0))
    state.context.words.add(mx.array([90]))
    found = subject.model.candidates(state.context, state.anchor, 4)
    known = np.array(found.tokens)[0].tolist()
    assert known[:30] == list(range(30)) and 90 in known and len(known) < VOCAB_SIZE
    block, (path, scores) = subject.block(0, 7, 3), found.likeliest()
    before = [7, *np.array(found.at(path)).tolist()]
    for t in range(3):
        assert np.abs(np.array(scores[t]) - block.row(t, before[t])[known]).max() < TOLERANCE
    drafter = BestFirst(subject.model, None, 12)
    assert set(drafter.draft(state, 4).tree.drafted) <= set(known)


# Drawn


def drawn_path(model: Any, state: Any, temperature: float, seed: int) -> Any:
    sampling = SamplingConfig(seed=seed, temperature=temperature)
    return DrawnPath(model, None, sampling, weighed=True).draft(state, 100)


def test_drawn_paths_follow_the_law_of_the_walk(short, monkeypatch):
    model = short.model
    state = behind(model, 7, features_of(1))
    law = short.block(1, 7).path_law(1.3)
    assert len(law) == 5**3 and abs(sum(law.values()) - 1) < 1e-9
    found = model.candidates(state.context, state.anchor, 4)
    monkeypatch.setattr(model, "candidates", lambda *block: found)  # the pass is always alike
    draws = [drawn_path(model, state, 1.3, seed).tree.drafted for seed in range(800)]
    assert chi_square(law, draws) < 4
    flat = {path: 1 / len(law) for path in law}
    assert chi_square(flat, draws) > 4, "the test notices another law"


@pytest.mark.parametrize("name", ["dspark", "dspark, draft vocabulary", "dspark, no confidence"])
def test_q_is_the_law_after_the_tokens_drawn_before_and_trees_know_the_walk_s_confidence(
    drafting, name
):
    subject = drafting(name)
    state = behind(subject.model, 9, features_of(2))
    block = subject.block(2, 9)
    walk, drafts = [9, *block.greedy()], len(block.states)
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
            sure = [block.confidence(t, walk[t]) for t in range(drafts)]
        else:
            sure = [max(block.law(t, walk[t], 0.8).values()) for t in range(drafts)]
        assert np.allclose(np.exp(proposal.tree.logprobs[1:]), sure, atol=TOLERANCE)


# Trees


@pytest.mark.parametrize("name", DSPARK)
def test_along_the_greedy_walk_a_tree_has_the_law_of_the_reference(drafting, name):
    subject, chain = drafting(name), RankedChain(drafting(name).model)
    for seed in range(4):
        anchor = seed * 11 % VOCAB_SIZE
        (linked,) = linked_of(
            subject.model,
            behind(chain, anchor, features_of(seed)).context,
            mx.array([anchor]),
            subject.model.block_size,
        )
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
        tree = chain.draft(behind(chain, anchor, features_of(seed)), 100).tree
        assert list(tree.drafted) == walk[1:]
        if name in SURE:
            sure = [block.confidence(t, walk[t]) for t in range(len(block.states))]
            assert np.allclose(np.exp(tree.logprobs[1:]), sure, atol=TOLERANCE)


def test_beside_the_walk_candidates_are_told_apart_as_the_reference_does(drafting):
    """Their odds are right; all of them together may be a little more or less likely."""
    subject = drafting("dspark, no confidence")
    state = behind(subject.model, 7, features_of(5))
    (linked,) = linked_of(subject.model, state.context, state.anchor, 5)
    block, seen = subject.block(5, 7, 4), 0
    for t in range(1, 4):
        for place, before in enumerate(linked.ranked.tokens[t - 1].tolist()):
            law = block.law(t, before)
            expected = np.log([law[token] for token in linked.ranked.tokens[t].tolist()])
            difference = linked.logprobs[t, place] - expected
            assert np.ptp(difference) < 1e-3
            seen += np.abs(difference).max() > 1e-3
    assert seen, "or the second sentence above is to be deleted"


def test_second_drafts_follow_the_walk_behind_their_prefixes(drafting):
    subject = drafting("dspark")
    both = DualDiffusion(subject.model, None, PaperGrowth(3))
    for seed in range(4):
        anchor = seed * 11 % VOCAB_SIZE
        state = behind(both, anchor, features_of(seed))
        drafts = both.begin([state], [6])
        first, (second,) = drafts[0].choices, both.second([state], drafts, [3])
        assert list(walk(first)[0]) == subject.block(seed, anchor).greedy()
        assert len(second) == 3
        for prefix, choices in second.items():
            block, path = subject.block(seed, anchor, 5, prefix), walk(choices)[0]
            assert list(path) == block.greedy() and len(path) == 5 - len(prefix)


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


# Decoding


@pytest.mark.parametrize("name", ["dspark", "dspark, draft vocabulary"])
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


def test_a_tree_is_no_deeper_than_the_block(drafting):
    model = drafting("dspark").model
    tree = BestFirst(model, None, 40).draft(behind(model, 7, features_of(0)), 100).tree
    assert max(tree.depths) == 5 and len(tree) == 40
    assert len(paths_of(tree)) == 40


# Folders


def test_a_drafter_that_drafts_from_its_anchor_is_not_trained(tmp_path):
    target = Target(make_model("llama"), 512, "llama")
    for name in ("dspark, specforge", "speculators, from the anchor"):
        folder = write_drafter_folder(tmp_path / name, *FORMATS[name])
        with pytest.raises(DFlashError, match="drafts from its anchor"):
            DFlashTrainee.read(folder, target)
