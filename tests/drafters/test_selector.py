"""DFlash 2's selector: its walks, its law, its trees, and what is decoded with them."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.sampling import tempered
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.block_diffusion import (
    BestFirst,
    BlockDiffusion,
    DrawnBlock,
    DrawnPath,
    SelectedPath,
)
from dflash_mlx.drafters.dual_diffusion import DualDiffusion, JointGrowth
from dflash_mlx.drafters.growth.grow import (
    Array,
    Linked,
    Ranked,
    best_first,
    conditional,
    follow,
    follow_links,
    rank,
    walk,
)
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.drafters.paper import PaperGrowth
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.model import Target
from support import reference_dflash2
from support.decoding import answer, behind, linked_of, paths_of
from support.drafter_formats import written
from support.families import VOCAB_SIZE, make_model
from support.law import chi_square
from support.reference_dflash import random_drafter, tiny_drafter_config

VOCABULARY, K = 11, 4
Nodes = dict[tuple[int, ...], float]  # the log-probability of every node, by its path


def case(seed: int, positions: int, size: float = 2.0) -> tuple[Array, Ranked, Array]:
    """Random logits [n, V], their K best tokens, and random edges; all in float64.

    The edges of the first position are alike, as there is one anchor.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(positions, VOCABULARY)) * 2
    law = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    tokens = np.argsort(-law, axis=-1)[:, :K]
    edges = rng.normal(size=(positions, K, K)) * size
    edges[0] = edges[0, 0]
    return logits, Ranked(tokens, np.take_along_axis(law, tokens, axis=-1)), edges


def whole_law(logits: Array, tokens: Array, edges: Array) -> Array:
    """[V] log-softmax of logits [V] after edges [k] were added to those of `tokens` [k]."""
    scores = np.asarray(logits, np.float64).copy()
    scores[tokens] += edges
    return scores - np.logaddexp.reduce(scores)


# The law


@pytest.mark.parametrize("size", [0.3, 2.0, 40.0, 2000.0])
@pytest.mark.parametrize("seed", range(5))
def test_candidates_and_all_other_tokens_share_one_law(seed, size):
    logits, ranked, edges = case(seed, 3, size)
    found = conditional(ranked, edges)
    assert found.shape == (3, K, K)
    for t, a in product(range(3), range(K)):
        law = whole_law(logits[t], ranked.tokens[t], edges[t, a])
        assert np.allclose(found[t, a], law[ranked.tokens[t]], rtol=1e-12, atol=1e-9)
        others = np.exp(np.delete(law, ranked.tokens[t])).sum()
        assert np.exp(found[t, a]).sum() + others == pytest.approx(1)


@pytest.mark.parametrize("size", [1.0, 2000.0])
@pytest.mark.parametrize("over", [0.0, 1e-6], ids=["exact", "rounded up"])
def test_candidates_that_are_the_whole_vocabulary_leave_nothing_to_others(size, over):
    ranked = Ranked(np.array([[4, 9, 2]]), np.log(np.array([[0.5, 0.25, 0.25 + over]])))
    edges = -size * np.array([[[1.0, 1.0, 1.5]] * 3])
    found = np.exp(conditional(ranked, edges)[0, 0])
    weights = np.array([0.5, 0.25, 0.25 * np.exp(-size / 2)])
    assert found == pytest.approx(weights / weights.sum(), abs=1e-5)


def test_candidates_that_cannot_be_are_not_made_possible():
    logprobs = np.array([[np.log(0.7), np.log(0.3), -np.inf]])
    ranked = Ranked(np.array([[4, 9, 2]]), logprobs)
    edges = np.array([[[0.0, 1.0, 5.0]] * 3])
    weights = np.array([0.7, 0.3 * np.e, 0])
    found = conditional(ranked, edges)
    assert np.exp(found[0, 0]) == pytest.approx(weights / weights.sum())
    assert found[0, 0, 2] == -np.inf
    assert best_first(follow_links(Linked(ranked, edges)), 9).drafted == (9, 4)


def test_the_walk_takes_the_best_candidate_after_the_one_before():
    rng = np.random.default_rng(0)
    n, k = 6, 5
    tokens = np.array([rng.permutation(40)[:k] for _ in range(n)])
    logprobs = np.log(np.array([rng.dirichlet(np.ones(k)) for _ in range(n)]) * 0.9)
    ranked, edges = Ranked(tokens, logprobs), rng.normal(size=(n, k, k)) * 2
    edges[0] = edges[0, 0]
    law, before, detours = conditional(ranked, edges), 0, 0
    path, known = walk(follow_links(Linked(ranked, edges)))
    for t in range(n):
        law_there, before = law[t, before], int(law[t, before].argmax())
        assert path[t] == tokens[t, before] and known[t] == law_there[before]
        detours += before != int(logprobs[t].argmax())
    assert detours > 1


def test_behind_a_token_that_is_no_candidate_the_drafts_stand_unlinked():
    ranked = Ranked(np.array([[1, 2], [3, 4]]), np.log(np.array([[0.5, 0.4], [0.6, 0.3]])))
    linked = Linked(ranked, np.array([[[0.0, 0.0]] * 2, [[-9.0, 9.0]] * 2]))
    choices = follow_links(linked, 1)
    assert choices((2,))[0] == [4] and choices((9,)) == ([3], [math.log(0.6)])
    assert choices((9, 9)) is None and choices((9, 9, 9)) is None  # a longer second draft asks


def test_a_longer_second_draft_goes_on_behind_all_that_is_linked():
    ranked = Ranked(np.array([[1, 2], [3, 4]]), np.log(np.array([[0.9, 0.1], [0.8, 0.1]])))
    first = follow_links(Linked(ranked, np.zeros((2, 2, 2))))
    longer = Ranked(np.array([[5, 6], [7, 8]]), np.log(np.array([[0.9, 0.1], [0.9, 0.1]])))
    tree = JointGrowth(branches=2, nodes=5).tree(first, {(1, 3): follow(longer)})
    assert tree.drafted == (1, 3, 5, 7) and tree.is_chain


# Trees


def nodes_of(tree: Tree) -> Nodes:
    """Every node's log-probability given its path, the root's left out."""
    return dict(zip(paths_of(tree)[1:], tree.logprobs[1:], strict=True))


def every_path(logits: Array, tokens: Array, edges: Array) -> Nodes:
    """The log-probability of every path of candidates; edges [n, k, k]."""
    n, k = tokens.shape
    laws = [
        [whole_law(logits[t], tokens[t], edges[t, a])[tokens[t]] for a in range(k)]
        for t in range(n)
    ]
    found: Nodes = {}
    for length in range(1, n + 1):
        for ranks in product(range(k), repeat=length):
            before = (0, *ranks)
            total = sum(float(laws[t][before[t]][b]) for t, b in enumerate(ranks))
            found[tuple(int(tokens[t, b]) for t, b in enumerate(ranks))] = total
    return found


def check_likeliest(nodes: Nodes, every: Nodes, tolerance: float) -> None:
    """The nodes are as many of the likeliest of all paths, in order."""
    best = sorted(every.values(), reverse=True)[: len(nodes)]
    totals = {
        path: sum(nodes[path[:length]] for length in range(1, len(path) + 1)) for path in nodes
    }
    assert np.allclose(list(totals.values()), best, atol=tolerance)
    assert all(abs(total - every[path]) < tolerance for path, total in totals.items())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("nodes", "positions"), [(1, 2), (7, 1), (6, 3), (25, 4), (400, 3)])
def test_a_tree_holds_the_likeliest_prefixes_and_no_others(seed, nodes, positions):
    logits, ranked, edges = case(seed, positions)
    every = every_path(logits, ranked.tokens, edges)
    found = nodes_of(best_first(follow_links(Linked(ranked, edges)), nodes))
    assert len(found) == min(nodes - 1, len(every))
    check_likeliest(found, every, 1e-9)


# Drafting

METHOD = {"selector_top_k": 4, "block_size": 5}
SCALED = {"final_logit_softcapping": 3.0, "output_multiplier": 0.5}
BLOCK, TOP_K, WIDTH = 4, 3, 128


def features_of(seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=(9, WIDTH)).astype(np.float32)


class Drafting:
    """A random DFlash 2 drafter of the tiny llama, and what NumPy says of its blocks."""

    def __init__(self, folder: Any, **method: Any) -> None:
        self.raw = reference_dflash2.tiny_config(dflash_config=method)
        self.tensors = reference_dflash2.random_tensors(self.raw)
        self.target = Target(make_model("llama"), 512, "llama")
        self.model = written(folder, self.raw, self.tensors, self.target)

    def reference(self, seed: int, anchor: int) -> tuple[Array, Array]:
        """Final states and logits of a block."""
        table = np.array(self.target.embedding().weight)
        block = (table, table), features_of(seed), anchor
        hidden = reference_dflash2.draft_states(self.tensors, self.raw, *block)
        return hidden, reference_dflash2.logits(self.tensors, self.raw, *block)

    def every_path(self, seed: int, anchor: int) -> Nodes:
        hidden, unary = self.reference(seed, anchor)
        tokens = np.array(reference_dflash2.offers(self.raw, unary))

        def edge(t: int, a: int, b: int) -> float:
            before = tokens[t - 1, a] if t else anchor
            state, nothing = hidden[t], np.zeros(VOCAB_SIZE)
            return reference_dflash2.score(self.tensors, state, nothing, before, tokens[t, b])

        n, k = tokens.shape
        edges = [[[edge(t, a, b) for b in range(k)] for a in range(k)] for t in range(n)]
        return every_path(unary, tokens, np.array(edges))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    """Three candidates for each of three masks."""
    folder = tmp_path_factory.mktemp("drafter")
    return Drafting(folder, selector_top_k=TOP_K, block_size=BLOCK)


@pytest.mark.parametrize("method", [{}, SCALED], ids=["plain", "scaled and capped"])
def test_a_drafter_s_tree_is_that_of_the_reference(tmp_path, method):
    drafting, detours = Drafting(tmp_path, **METHOD, **method), 0
    drafter = BestFirst(drafting.model, None, 14)
    for seed in range(5):
        anchor = seed * 20 % VOCAB_SIZE
        state = behind(drafter, anchor, features_of(seed))
        found = nodes_of(drafter.draft(state, 100).tree)
        assert len(found) == 13
        check_likeliest(found, drafting.every_path(seed, anchor), 1e-3)
        plain = rank(drafting.model.logits(state.context, state.anchor, 5), 4)
        detours += nodes_of(best_first(follow(plain), 14)).keys() != found.keys()
    assert detours == 5, "the selector changes every tree, so that it is seen"


@pytest.mark.parametrize(("top_k", "offered"), [(3, 3), (40, 16)])
def test_a_position_offers_the_selector_s_candidates_and_16_at_most(tmp_path, top_k, offered):
    model = Drafting(tmp_path, selector_top_k=top_k, block_size=5).model
    state = behind(model, 7, np.ones((3, WIDTH), np.float32))
    (linked,) = linked_of(model, state.context, state.anchor, 4)
    ranked, edges = linked.ranked, linked.edges
    assert ranked.tokens.shape == (3, offered) and edges.shape == (3, offered, offered)
    assert (np.diff(ranked.logprobs) <= 0).all()
    spread = np.ptp(edges, axis=1).max(axis=1)  # over the tokens before; some BLAS rounds by place
    assert spread[0] < 1e-6, "before the first position there is the anchor alone"
    assert (spread[1:] > 1e-3).all(), "later ones go by the token before"


@pytest.mark.parametrize("budget", [2, 12, 40])
def test_greedy_answers_of_linked_trees_are_the_target_s_own(tmp_path, budget):
    drafting, prompt = Drafting(tmp_path, **METHOD), [3, 1, 4, 1, 5, 9]
    config = DecodeConfig("ddtree", budget=budget, max_tokens=25)
    drafter = make_drafter(Pair(drafting.target, None, (drafting.model,)), config)
    assert isinstance(drafter, BestFirst)
    plain = answer(drafting.target, NoDraft(), prompt, config)
    assert answer(drafting.target, drafter, prompt, config) == plain


def test_the_greedy_walk_and_d2sd_s_first_draft_are_those_of_the_reference(small):
    drafter, detours = SelectedPath(small.model), 0
    both = DualDiffusion(small.model, None, PaperGrowth(2))
    for seed in range(25):
        anchor, features = seed * 3 % VOCAB_SIZE, features_of(seed)
        hidden, unary = small.reference(seed, anchor)
        tree = drafter.draft(behind(drafter, anchor, features), 100).tree
        path = reference_dflash2.greedy_path(small.tensors, small.raw, hidden, unary, anchor)
        assert tree.is_chain and tree.drafted == tuple(path)
        (first,) = both.begin([behind(both, anchor, features)], [BLOCK])
        assert list(walk(first.choices)[0]) == path
        detours += path != unary.argmax(axis=-1).tolist()
    assert detours > 10, "the selector changes most paths, so that its walk is seen"


@pytest.mark.parametrize("remaining", [1, 2, 3, 4, 50])
def test_a_path_fits_the_room(small, remaining):
    tree = SelectedPath(small.model).draft(behind(small.model, 7, features_of(0)), remaining).tree
    assert len(tree) == min(remaining, BLOCK)


# Drawn


def drawn_path(model: Any, state: State, temperature: float, seed: int) -> Proposal:
    sampling = SamplingConfig(seed=seed, temperature=temperature)
    return DrawnPath(model, None, sampling).draft(state, 100)


def test_drawn_paths_follow_the_law_of_the_walk(small, monkeypatch):
    model, (hidden, unary) = small.model, small.reference(1, 7)
    state = behind(model, 7, features_of(1))
    law = reference_dflash2.path_law(small.tensors, small.raw, hidden, unary, 7, 1.3)
    assert len(law) == TOP_K ** (BLOCK - 1) and abs(sum(law.values()) - 1) < 1e-9
    found = model.candidates(state.context, state.anchor, BLOCK)
    monkeypatch.setattr(model, "candidates", lambda *block: found)  # the pass is always alike
    draws = [drawn_path(model, state, 1.3, seed).tree.drafted for seed in range(800)]
    assert chi_square(law, draws) < 4
    flat = {path: 1 / len(law) for path in law}
    assert chi_square(flat, draws) > 4, "the test notices another law"


def test_q_is_the_law_of_each_token_after_those_drawn_before(small):
    state = behind(small.model, 9, features_of(2))
    hidden, unary = small.reference(2, 9)
    for seed in range(5):
        proposal = drawn_path(small.model, state, 0.8, seed)
        tree, q = proposal.tree, np.array(proposal.q)
        assert q.shape == (BLOCK - 1, VOCAB_SIZE) and np.allclose(q.sum(axis=-1), 1)
        before = 9
        for t, token in enumerate(tree.drafted):
            candidates, given = reference_dflash2.offers(small.raw, unary)[t], (hidden[t], unary[t])
            scores = [reference_dflash2.score(small.tensors, *given, before, b) for b in candidates]
            weights = np.exp((np.array(scores) - max(scores)) / 0.8)
            expected = np.zeros(VOCAB_SIZE)
            expected[candidates] = weights / weights.sum()
            assert np.abs(q[t] - expected).max() < 1e-4
            before = token


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.6}, {"min_p": 0.5}], ids=str)
def test_the_targets_filters_apply_to_the_candidates(small, filters):
    model = small.model
    state = behind(model, 11, features_of(3))
    sampling = SamplingConfig(temperature=1.0, seed=4, **filters)
    proposal = DrawnPath(model, None, sampling).draft(state, 100)
    tree = proposal.tree
    q, found = np.array(proposal.q), model.candidates(state.context, state.anchor, BLOCK)
    path = [np.array(found.tokens)[t].tolist().index(k) for t, k in enumerate(tree.drafted)]
    _, scores = found.walk(lambda t, scores: mx.array(path[t]))
    kept = np.isfinite(np.array(tempered(scores, sampling)))
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
    tmp_path, small, is_second, sampling, expected
):
    plain = tiny_drafter_config(num_target_layers=3, dflash_config=small.raw["dflash_config"])
    first = written(tmp_path, plain, random_drafter(plain), small.target)
    pair = Pair(small.target, None, (small.model if is_second else first,))
    use = DecodeConfig("dflash", pair.drafters[0].block_size, sampling=SamplingConfig(**sampling))
    assert type(make_drafter(pair, use)) is expected
