"""The part of a tree that is verified is the one that pays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.core.tree import Accepted, Tree
from dflash_mlx.drafters.experience import along
from dflash_mlx.drafters.growth.reliability import (
    Reliability,
    never,
    reach,
    worth_keeping,
)
from dflash_mlx.verifier.pass_times import ROWS, PassTimes, size_of
from support.decoding import path_to
from support.toys import random_tree

FLAT = PassTimes((1, 96), (1.0, 1.0))
STEEP = PassTimes((1, 96), (1.0, 191.0))
RISING = PassTimes((1, 96), (1.0, 10.5))


def keep(tree, reached, *rest):
    """As `worth_keeping`, of one tree."""
    (kept,), _, sizes = worth_keeping([tree], [reached], *rest)
    return kept, sizes


def random(seed: int, nodes: int) -> Tree:
    rng = np.random.default_rng(seed)
    tokens, parents = random_tree(rng, nodes, 50)
    logprobs = (0.0, *np.log(rng.uniform(0.05, 0.95, len(tokens))).tolist())
    return Tree(tuple(tokens), (-1, *parents), logprobs)


trees = st.builds(random, st.integers(0, 10**6), st.integers(1, 25))


@given(trees)
def test_no_node_is_reached_more_often_than_its_parent(tree):
    reached = reach(tree, np.exp(tree.logprobs))
    for node in range(1, len(tree)):
        path = path_to(tree, node)
        assert reached[node] == pytest.approx(np.exp(sum(tree.logprobs[i] for i in path)))
        assert reached[node] <= reached[tree.parents[node]]


@given(trees, st.floats(0.0, 2.0), st.floats(0.0, 0.5))
@settings(max_examples=60)
def test_what_is_kept_is_closed_and_no_number_of_nodes_pays_more(tree, draft, slope):
    def seconds(rows):
        return 1 + slope * np.asarray(rows)

    reached = reach(tree, np.exp(tree.logprobs))
    kept, _ = keep(tree, reached, seconds, draft, 96)
    assert kept[0] == 0
    assert all(tree.parents[node] in kept for node in kept[1:])
    best = np.sort(reached)[::-1]
    counts = [n for n in range(1, len(tree) + 1) if n in ROWS or n == len(tree)]
    rates = [best[:n].sum() / (draft + seconds(n)) for n in counts]
    assert reached[kept].sum() / (draft + seconds(len(kept))) == pytest.approx(max(rates))
    assert len(tree.prune(kept)) == len(kept)


@given(trees, st.integers(1, 30))
def test_width_that_costs_nothing_is_used_up_and_width_that_costs_a_pass_is_not(tree, most):
    reached = reach(tree, np.exp(tree.logprobs))
    kept, _ = keep(tree, reached, FLAT.of, 0.1, most)
    assert len(tree.prune(kept)) == min(most, len(tree))
    assert keep(tree, reached, STEEP.of, 0.1, most)[0] == [0]


@given(trees, st.floats(0.0, 1.0), st.integers(1, 30))
@settings(max_examples=60)
def test_dearer_branches_are_kept_only_where_they_beat_the_best_chain(tree, extra, most):
    def dearer(rows):
        return extra * np.asarray(rows)

    def seconds(rows):  # passes come in sizes, so no chain is cheaper than the tree that fills its
        return RISING.of(size_of(rows))

    reached = reach(tree, np.exp(tree.logprobs))
    options = {
        name: keep(tree, reached, seconds, 0.1, most, branching)
        for name, branching in (("free", None), ("dear", dearer), ("never", never))
    }
    rates = {}
    for name, (kept, sizes) in options.items():
        count = len(kept)
        pays = 0.0 if tree.prune(kept).is_chain or name == "free" else float(dearer(count))
        assert sizes.cost(seconds, count) == pytest.approx(float(seconds(count)) + pays)
        rates[name] = reached[kept].sum() / (0.1 + sizes.cost(seconds, count))
    assert tree.prune(options["never"][0]).is_chain
    assert rates["free"] >= rates["dear"] >= rates["never"] - 1e-12
    if not tree.prune(options["dear"][0]).is_chain:
        assert rates["dear"] > rates["never"] - 1e-12


def test_only_children_of_accepted_nodes_are_counted():
    tree = Tree((2, 3, 4, 5), (-1, 0, 0, 1, 2), (0.0, *[-0.1] * 4))
    reliability = Reliability()
    reliability.learn(Accepted(tree, (0, 1), 7))
    assert reliability.tried.sum(axis=(0, 2))[:3].tolist() == [2, 1, 0]
    assert reliability.right.sum(axis=(0, 2))[:3].tolist() == [1, 0, 0]


def promise(chance: float, source: str = "") -> Tree:
    """One draft, of which its drafter says so."""
    return Tree((2,), (-1, 0), (0.0, float(np.log(chance))), ("", source))


def trust(reliability: Reliability, tree: Tree) -> float:
    return float(reliability.chances(tree)[1])


def test_reliability_begins_with_the_drafters_word_and_ends_with_the_facts():
    """A drafter says 0.75 and is right in 30 of 100."""
    rng, reliability, tree = np.random.default_rng(0), Reliability(), promise(0.75)
    assert trust(reliability, tree) == pytest.approx(0.75)
    for _ in range(2000):
        reliability.learn(Accepted(tree, (0, 1) if rng.random() < 0.3 else (0,), 5))
    assert trust(reliability, tree) == pytest.approx(0.3, abs=0.06)


def test_each_drafter_is_trusted_by_its_own_record():
    reliability = Reliability(("first", "second", "lookup"))
    for _ in range(500):
        reliability.learn(Accepted(promise(0.75, "first"), (0,), 5))
        reliability.learn(Accepted(promise(0.75, "second"), (0, 1), 5))
    assert trust(reliability, promise(0.75, "first")) < 0.02
    assert trust(reliability, promise(0.75, "second")) > 0.98
    assert trust(reliability, promise(0.75, "lookup")) == pytest.approx(0.75)


def test_a_source_that_breaks_its_word_is_doubted_where_it_was_not_tried_yet():
    """Three drafts at 0.75 were wrong: its next at 0.35 is no longer taken at its word."""
    reliability = Reliability(("first", "lookup"))
    for _ in range(3):
        reliability.learn(Accepted(promise(0.75, "first"), (0,), 5))
    assert trust(reliability, promise(0.35, "first")) < 0.2
    assert trust(reliability, promise(0.35, "lookup")) == pytest.approx(0.35)
    for _ in range(30):
        reliability.learn(Accepted(promise(0.75, "first"), (0, 1), 5))
    assert trust(reliability, promise(0.35, "first")) == pytest.approx(0.35, rel=0.3)


def test_what_would_follow_the_known_text_is_not_judged():
    chain = Tree((5, 6, 7), (-1, 0, 1, 2), (0.0, *[np.log(0.5)] * 3))
    told = Reliability()
    told.learn(along(chain, [5, 6]))
    assert told.tried.sum() == told.right.sum() == 2
    told.learn(along(chain, [5, 4]))
    assert told.tried.sum() == pytest.approx(4, rel=0.01) and told.right.sum() < 3.01
