"""The part of a tree that is verified is the one that pays."""

from __future__ import annotations

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx import budget
from dflash_mlx.accept import Accepted
from dflash_mlx.budget import (
    Budgeted,
    PassTimes,
    Reliability,
    measure,
    reach,
    stored_times,
    worth_keeping,
)
from dflash_mlx.config import DecodeConfig
from dflash_mlx.decode import decode, prefill
from dflash_mlx.drafters import methods
from dflash_mlx.observer import Observer
from dflash_mlx.state import State
from dflash_mlx.target import Target
from dflash_mlx.tree import Tree
from families import VOCAB_SIZE, make_model
from toys import Scripted, ToyTarget, random_tree

FLAT = PassTimes((1, 96), (1.0, 1.0))
STEEP = PassTimes((1, 96), (1.0, 191.0))


def tree_of(seed: int, nodes: int) -> Tree:
    rng = np.random.default_rng(seed)
    tokens, parents = random_tree(rng, nodes, 50)
    logprobs = (0.0, *np.log(rng.uniform(0.05, 0.95, len(tokens))).tolist())
    return replace(Tree.of([1, *tokens], [-1, *parents]), logprobs=logprobs)


trees = st.builds(tree_of, st.integers(0, 10**6), st.integers(1, 25))


@given(trees)
def test_no_node_is_reached_more_often_than_its_parent(tree):
    reached = reach(tree, np.exp(tree.logprobs))
    for node in range(1, len(tree)):
        path = tree.path_to(node)
        assert reached[node] == pytest.approx(np.exp(sum(tree.logprobs[i] for i in path)))
        assert reached[node] <= reached[tree.parents[node]]


@given(trees, st.floats(0.0, 2.0), st.floats(0.0, 0.5))
@settings(max_examples=60)
def test_what_is_kept_is_closed_and_no_number_of_nodes_pays_more(tree, draft, slope):
    def seconds(rows):
        return 1 + slope * np.asarray(rows)

    reached = reach(tree, np.exp(tree.logprobs))
    kept = worth_keeping(reached, seconds, draft)
    assert kept[0] == 0
    assert all(tree.parents[node] in kept for node in kept[1:])
    best = np.sort(reached)[::-1]
    rates = [best[:n].sum() / (draft + seconds(n)) for n in range(1, len(tree) + 1)]
    assert reached[kept].sum() / (draft + seconds(len(kept))) == pytest.approx(max(rates))
    assert len(tree.only(kept)) == len(kept)


def test_width_that_costs_nothing_is_used_and_width_that_costs_a_pass_is_not():
    tree = tree_of(3, 20)
    reached = reach(tree, np.exp(tree.logprobs))
    assert len(worth_keeping(reached, FLAT.of, 0.1)) == len(tree)
    assert worth_keeping(reached, STEEP.of, 0.1) == [0]


def test_a_sure_chain_is_kept_where_only_sure_nodes_pay():
    chain = Tree.of([1, 2, 3, 4, 5, 6], [-1, 0, 1, 2, 0, 4])
    chances = np.array([1, 0.99, 0.99, 0.99, 0.3, 0.3])
    times = PassTimes((1, 2, 3, 4, 5, 6), (1.0, 1.1, 1.2, 1.3, 2.4, 3.5))
    kept = worth_keeping(reach(chain, chances), times.of, 0.2)
    assert kept == [0, 1, 2, 3]
    assert chain.only(kept).is_chain


def test_a_smaller_tree_keeps_its_tokens_parents_and_confidences():
    tree = replace(Tree.of([9, 1, 2, 3], [-1, 0, 0, 2]), logprobs=(0.0, -1.0, -2.0, -3.0))
    smaller = tree.only([0, 2, 3])
    assert smaller.tokens.tolist() == [9, 2, 3]
    assert smaller.parents == (-1, 0, 1)
    assert smaller.logprobs == (0.0, -2.0, -3.0)


def test_times_are_interpolated_and_never_fall():
    times = PassTimes((1, 2, 4), (1.0, 3.0, 2.0))
    assert times.of(np.array([1, 2, 3, 4, 9])).tolist() == [1.0, 3.0, 3.0, 3.0, 3.0]


def test_reliability_begins_with_the_drafters_word_and_ends_with_the_facts():
    """A drafter says 0.75 and is right in 30 of 100."""
    rng = np.random.default_rng(0)
    tree = replace(Tree.of([1, 2], [-1, 0]), logprobs=(0.0, float(np.log(0.75))))
    reliability = Reliability()
    assert reliability.chances(tree)[1] == pytest.approx(0.75)
    for _ in range(2000):
        reliability.learn(Accepted(tree, (0, 1) if rng.random() < 0.3 else (0,), 5))
    assert reliability.chances(tree)[1] == pytest.approx(0.3, abs=0.03)


def test_only_children_of_accepted_nodes_are_counted():
    tree = replace(Tree.of([1, 2, 3, 4, 5], [-1, 0, 0, 1, 2]), logprobs=(0.0, *[-0.1] * 4))
    reliability = Reliability()
    reliability.learn(Accepted(tree, (0, 1), 7))
    assert reliability.tried.sum(axis=1)[:3].tolist() == [2, 1, 0]
    assert reliability.right.sum(axis=1)[:3].tolist() == [1, 0, 0]


class Sure:
    """Proposes 15 random nodes and swears by all of them; the first is right half the time."""

    name, taps, rounds_ahead = "sure", (), 0

    def __init__(self, plain: list[int], prompt: int) -> None:
        self.plain, self.prompt = plain, prompt
        self.rng = np.random.default_rng(1)

    def new_context(self):
        return Scripted(lambda tokens, room: ([], [])).new_context()

    def propose(self, state: State, room: int) -> Tree:
        done = len(state.tokens) - self.prompt
        right = self.plain[done] if done < len(self.plain) else 0
        first = right if self.rng.random() < 0.5 else (right + 1) % 14
        tokens = [first, *self.rng.integers(14, size=14).tolist()]
        size = min(room, 16)
        tree = Tree.of([state.tokens[-1], *tokens][:size], list(range(-1, size - 1)))
        return replace(tree, logprobs=(0.0, *[float(np.log(0.95))] * (size - 1)))


def test_a_budget_changes_no_answer_and_learns_how_far_to_trust():
    target = ToyTarget(14, context_length=400)
    config = DecodeConfig(max_tokens=300)

    def run(drafter):
        state = State(target.new_cache(), drafter.new_context())
        prefill(target, drafter, state, [1, 2, 3], config, Observer())
        return list(decode(target, drafter, state, config, Observer()))

    none = methods.NoDraft()
    plain = [token for accepted in run(none) for token in accepted.tokens]
    times = PassTimes((1, 16), (1.0, 2.5))
    drafter = Budgeted(Sure(plain, 3), times)
    rounds = run(drafter)
    assert [token for accepted in rounds for token in accepted.tokens] == plain
    sizes = [len(accepted.tree) for accepted in rounds]
    assert sizes[0] > 8, "a drafter that is sure of all is believed at first"
    assert np.mean(sizes[-50:]) < 4, "later only as far as it deserves"


def test_trees_without_confidences_are_left_alone():
    drafter = Budgeted(Scripted(lambda tokens, room: ([1, 2], [0, 0])), STEEP)
    state = State(ToyTarget(14).new_cache(), drafter.new_context())
    state.set_anchor(3)
    assert len(drafter.propose(state, 9)) == 3


@pytest.fixture
def target():
    return Target(make_model("llama"), 200, "tiny")


def test_a_target_can_be_timed_and_is_as_it_was_afterwards(target, monkeypatch):
    monkeypatch.setattr(budget, "ROWS", (1, 3))
    tokens = mx.array([1, 2, 3]) % VOCAB_SIZE
    before = target.forward(tokens, target.new_cache(), budget.Block(3))[0]
    times = measure(target)
    assert times.rows == (1, 3) and min(times.seconds) > 0
    after = target.forward(tokens, target.new_cache(), budget.Block(3))[0]
    assert mx.array_equal(before, after)


def test_times_are_kept_and_measured_again_only_when_asked(target, monkeypatch, tmp_path):
    calls = []

    def fake(measured):
        calls.append(measured)
        return PassTimes((1, 2), (1.0, float(len(calls))))

    monkeypatch.setattr(budget, "ROWS", (1, 2))
    monkeypatch.setattr(budget, "measure", fake)
    first = stored_times(target, folder=tmp_path)
    assert stored_times(target, folder=tmp_path) == first and len(calls) == 1
    assert stored_times(target, again=True, folder=tmp_path).seconds == (1.0, 2.0)
    other = Target(make_model("llama"), 200, "another")
    stored_times(other, folder=tmp_path)
    assert len(calls) == 3, "another model has times of its own"


DAMAGES = [
    "",
    "{",
    "[]",
    json.dumps({"rows": [1]}),
    json.dumps({"rows": [1, 96], "seconds": [1.0]}),
    json.dumps({"rows": [1, 96], "seconds": [0.0, 1.0]}),
    json.dumps({"rows": [1, 2], "seconds": [1.0, 1.0]}),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_times_are_measured_anew(target, monkeypatch, tmp_path, damage):
    monkeypatch.setattr(budget, "ROWS", FLAT.rows)
    monkeypatch.setattr(budget, "measure", lambda measured: FLAT)
    stored_times(target, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(damage)
    assert stored_times(target, folder=tmp_path) == FLAT
    assert stored_times(target, folder=tmp_path) == FLAT


def test_times_that_cannot_be_kept_are_used_all_the_same(target, monkeypatch, tmp_path):
    monkeypatch.setattr(budget, "measure", lambda measured: FLAT)
    (tmp_path / "file").write_text("")
    assert stored_times(target, folder=tmp_path / "file") == FLAT
