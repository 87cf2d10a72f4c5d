"""Trees that follow DFlash 2's selector: their law, their nodes, and what is decoded with them."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.best_first import BestFirst
from dflash_mlx.drafters.growth.grow import Array, Ranked, best_first, follow
from dflash_mlx.drafters.growth.links import conditional, follow_links
from dflash_mlx.drafters.growth.rank import rank
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.pair import Pair
from dflash_mlx.target.model import Target
from support import reference_dflash2
from support.decoding import answer, behind, paths_of
from support.drafter_formats import written
from support.families import VOCAB_SIZE, make_model

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
    assert best_first(follow_links(ranked, edges), 9).drafted == (9, 4)


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
    found = nodes_of(best_first(follow_links(ranked, edges), nodes))
    assert len(found) == min(nodes - 1, len(every))
    check_likeliest(found, every, 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_without_edges_the_tree_is_that_of_the_draft_alone(seed):
    _, ranked, edges = case(seed, 4)
    linked = best_first(follow_links(ranked, 0 * edges), 20)
    plain = best_first(follow(ranked), 20)
    assert (linked.drafted, linked.parents) == (plain.drafted, plain.parents)
    assert np.allclose(linked.logprobs, plain.logprobs)


# Drafting

METHOD = {"selector_top_k": 4, "block_size": 5}
SCALED = {"final_logit_softcapping": 3.0, "output_multiplier": 0.5}
WIDTH = 128


class Drafting:
    """A random DFlash 2 drafter of the tiny llama, and the law of its trees by NumPy."""

    def __init__(self, folder: Any, **method: Any) -> None:
        self.raw = reference_dflash2.tiny_config(dflash_config={**METHOD, **method})
        self.tensors = reference_dflash2.random_tensors(self.raw)
        self.target = Target(make_model("llama"), 512, "llama")
        self.model = written(folder, self.raw, self.tensors, self.target)

    def every_path(self, features: Array, anchor: int, rows: int) -> Nodes:
        table = np.array(self.target.embedding().weight)
        block = (table, table), features, anchor, rows
        hidden = reference_dflash2.draft_states(self.tensors, self.raw, *block)
        unary = reference_dflash2.logits(self.tensors, self.raw, *block)
        tokens = np.array(reference_dflash2.offers(self.raw, unary))

        def edge(t: int, a: int, b: int) -> float:
            before = tokens[t - 1, a] if t else anchor
            state, nothing = hidden[t], np.zeros(VOCAB_SIZE)
            return reference_dflash2.score(self.tensors, state, nothing, before, tokens[t, b])

        k = tokens.shape[1]
        edges = [[[edge(t, a, b) for b in range(k)] for a in range(k)] for t in range(rows - 1)]
        return every_path(unary, tokens, np.array(edges))


@pytest.mark.parametrize("method", [{}, SCALED], ids=["plain", "scaled and capped"])
def test_a_drafter_s_tree_is_that_of_the_reference(tmp_path, method):
    drafting, detours = Drafting(tmp_path, **method), 0
    drafter = BestFirst(drafting.model, None, 14)
    for seed in range(5):
        features = np.random.default_rng(seed).normal(size=(9, WIDTH)).astype(np.float32)
        anchor = seed * 20 % VOCAB_SIZE
        state = behind(drafter, anchor, features)
        found = nodes_of(drafter.draft(state, 100).tree)
        assert len(found) == 13
        check_likeliest(found, drafting.every_path(features, anchor, 5), 1e-3)
        plain = rank(drafting.model.logits(state.context, state.anchor, 5), 4)
        detours += nodes_of(best_first(follow(plain), 14)).keys() != found.keys()
    assert detours == 5, "the selector changes every tree, so that it is seen"


@pytest.mark.parametrize(("top_k", "offered"), [(3, 3), (40, 16)])
def test_a_position_offers_the_selector_s_candidates_and_16_at_most(tmp_path, top_k, offered):
    model = Drafting(tmp_path, selector_top_k=top_k).model
    state = behind(model, 7, np.ones((3, WIDTH), np.float32))
    ranked, edges = model.linked(state.context, state.anchor, 4)
    assert ranked.tokens.shape == (3, offered) and edges.shape == (3, offered, offered)
    assert (np.diff(ranked.logprobs) <= 0).all()
    assert (edges[0] == edges[0, 0]).all(), "before the first position there is the anchor alone"


@pytest.mark.parametrize("budget", [2, 12, 40])
def test_greedy_answers_of_linked_trees_are_the_target_s_own(tmp_path, budget):
    drafting, prompt = Drafting(tmp_path), [3, 1, 4, 1, 5, 9]
    config = DecodeConfig("ddtree", budget=budget, max_tokens=25)
    drafter = make_drafter(Pair(drafting.target, None, (drafting.model,)), config)
    assert isinstance(drafter, BestFirst)
    plain = answer(drafting.target, NoDraft(), prompt, config)
    assert answer(drafting.target, drafter, prompt, config) == plain
