"""DFlash 2's selector: its law, its trees, and the method that takes its paths."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import SamplingConfig
from dflash_mlx.core.sampling import tempered
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.block_diffusion import (
    BestFirst,
    DrawnPath,
)
from dflash_mlx.drafters.dflash.paths import CandidateSelector
from dflash_mlx.drafters.dual_diffusion import JointGrowth
from dflash_mlx.drafters.growth.grow import (
    Array,
    Linked,
    Ranked,
    best_first,
    conditional,
    follow,
    follow_links,
    rank,
)
from support import reference_dflash2
from support.decoding import linked_of, paths_of
from support.drafting import Blocks
from support.families import VOCAB_SIZE

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


def second(folder: Any, **method: Any) -> Blocks:
    """A DFlash 2 drafter with these fields of `dflash_config`."""
    raw = reference_dflash2.tiny_config(dflash_config=method)
    return Blocks(folder, raw, reference_dflash2.random_tensors(raw))


def paths_in(block: Any, anchor: int) -> Nodes:
    tokens = np.array(block.offers)
    edges = [[block.edges(0, anchor)] * tokens.shape[1]]
    edges += [[block.edges(t, a) for a in tokens[t - 1]] for t in range(1, len(tokens))]
    return every_path(block.logits, tokens, np.array(edges))


@pytest.mark.parametrize("method", [{}, SCALED], ids=["plain", "scaled and capped"])
def test_a_drafter_s_tree_is_that_of_the_reference(tmp_path, method):
    drafting, detours = second(tmp_path, **METHOD, **method), 0
    drafter = BestFirst(drafting.model, None, 14)
    for seed in range(5):
        anchor = seed * 20 % VOCAB_SIZE
        state = drafting.behind(seed, anchor)
        found = nodes_of(drafter.draft(state, 100).tree)
        assert len(found) == 13
        check_likeliest(found, paths_in(drafting.block(seed, anchor), anchor), 1e-3)
        plain = rank(drafting.model.logits(state.context, state.anchor, 5), 4)
        detours += nodes_of(best_first(follow(plain), 14)).keys() != found.keys()
    assert detours == 5, "the selector changes every tree, so that it is seen"


@pytest.mark.parametrize(("top_k", "offered"), [(3, 3), (40, 16)])
def test_a_position_offers_the_selector_s_candidates_and_16_at_most(tmp_path, top_k, offered):
    drafting = second(tmp_path, selector_top_k=top_k, block_size=5)
    state = drafting.behind(0, 7)
    (linked,) = linked_of(drafting.model, state.context, state.anchor, 4)
    ranked, edges = linked.ranked, linked.edges
    assert ranked.tokens.shape == (3, offered) and edges.shape == (3, offered, offered)
    assert (np.diff(ranked.logprobs) <= 0).all()
    spread = np.ptp(edges, axis=1).max(axis=1)  # over the tokens before; some BLAS rounds by place
    assert spread[0] < 1e-6, "before the first position there is the anchor alone"
    assert (spread[1:] > 1e-3).all(), "later ones go by the token before"


def test_padding_of_the_vocabulary_is_offered_in_no_tree(tmp_path):
    drafting = second(tmp_path, selector_top_k=16, selector_vocab_size=20, block_size=5)
    state = drafting.behind(0, 7)
    (linked,) = linked_of(drafting.model, state.context, state.anchor, 4)
    assert linked.ranked.tokens.shape == (3, 16) and linked.ranked.tokens.max() < 20


def test_among_the_ids_of_a_grammar_padding_is_told_by_the_id_not_by_its_place():
    selector = CandidateSelector(11, 4, rank=2, top_k=3, offered=8)
    ids, logits = mx.array([9, 2, 10, 4, 7]), mx.array([[5.0, 1, 4, 3, 2], [5, 4, 3, 2, 1]])
    found = selector.candidates(mx.zeros((2, 4)), logits, mx.array([1]), ids)
    assert np.sort(np.array(found.tokens)).tolist() == [[2, 4, 7]] * 2


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.6}, {"min_p": 0.5}], ids=str)
def test_the_targets_filters_apply_to_the_candidates(drafting, filters):
    model, state = drafting("version 2").model, drafting("version 2").behind(3, 11)
    sampling = SamplingConfig(temperature=1.0, seed=4, **filters)
    proposal = DrawnPath(model, None, sampling).draft(state, 100)
    tree = proposal.tree
    q, found = np.array(proposal.q), model.candidates(state.context, state.anchor, 6)
    path = [np.array(found.tokens)[t].tolist().index(k) for t, k in enumerate(tree.drafted)]
    _, scores = found.walk(lambda t, scores: mx.array(path[t]))
    kept = np.isfinite(np.array(tempered(scores, sampling)))
    assert (q > 0).sum(axis=-1).tolist() == kept.sum(axis=-1).tolist()
    assert kept.sum() < kept.size
