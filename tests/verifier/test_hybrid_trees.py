"""Trees on targets with recurrent layers: every node follows its own path, and nothing drifts."""

import ast
import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import models

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.tree import Tree
from dflash_mlx.verifier import mixers, recurrent
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.mixers import DELTA_NETS, TREE_MIXERS, UNTRIED, Paths
from support.decoding import ids_of, path_to
from support.hybrids import (
    WIDE,
    changed_target,
    difference,
    forward,
    fresh,
    some_tree,
    target_of,
    tokens_on,
    worst_node,
)
from support.recurrent_families import RECURRENT
from support.toys import prompt_of

TREES = sorted(set(RECURRENT) & TREE_MIXERS)
FIVE = ["falcon_h1", "lfm2", "mamba2", "nemotron_h", "qwen3_5"]
TOLERANCE = 1e-4
SHAPES = {
    "wide": (-1, *[0] * 7),
    "deep": (-1, 0, 1, 2, 3, 4, 5, 0),
    "late": (-1, 0, 1, 2, 3, 4, 4, 4, 4),
    "comb": (-1, 0, 0, 1, 1, 3, 3, 5, 5),
    "heap": (-1, *((i - 1) // 2 for i in range(1, 12))),
    "mixed": (-1, 0, 0, 1, 0, 2, 5, 1, 6, 3),
}


def of_shape(parents):
    return Tree(tuple(prompt_of(len(parents), len(parents) - 1)), parents)


def verify(target, cache, tree):
    target.forward(ids_of(tree), cache, Block.of(tree))


def worst(target, cache, before, tree):
    """By how much any node's logits or features are off, the latter over the largest of theirs."""
    aux_layers = tuple(range(target.num_layers))
    target.tap(aux_layers)

    def alone(path):
        given = mx.array(before + path), target.new_cache(), Block(len(before) + len(path))
        return [found[len(before) :] for found in target.forward(*given, aux_layers)]

    return worst_node(target, cache, tree, alone, aux_layers)


@pytest.mark.parametrize("name", TREES)
def test_every_node_of_a_random_tree_equals_a_forward_over_its_own_path(name):
    rng, prompt = np.random.default_rng(0), prompt_of(3, 12)
    target = target_of(name)
    cache = fresh(target, prompt, 5)
    for _ in range(2):
        assert worst(target, cache, prompt, some_tree(rng)) < TOLERANCE
        cache.discard()
    assert difference(target, cache, prompt) < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FIVE)
def test_so_does_every_node_of_trees_of_all_shapes_with_and_without_a_prompt(name, shape):
    target, tree = target_of(name), of_shape(SHAPES[shape])
    for prompt in ([], prompt_of(4, 9)):
        assert worst(target, fresh(target, prompt), prompt, tree) < TOLERANCE


@pytest.mark.parametrize("name", FIVE)
def test_two_hundred_rounds_of_random_trees_and_paths_leave_no_drift(name):
    rng, target, tokens = np.random.default_rng(1), target_of(name), prompt_of(5, 10)
    cache = fresh(target, tokens)
    for i in range(200):
        tree = some_tree(rng, int(rng.integers(1, 9)))
        path = path_to(tree, int(rng.integers(len(tree))))
        verify(target, cache, tree)
        cache.commit(path)
        tokens += tokens_on(tree, path)
        if i % 50 == 49:
            assert difference(target, cache, tokens) < TOLERANCE
    assert len(tokens) > 400
    assert worst(target, cache, tokens, some_tree(rng)) < TOLERANCE


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "rwkv7"])
def test_a_state_goes_back_into_the_path_of_a_tree_and_forks_keep_paths_of_their_own(name):
    target, prompt, tree = target_of(name), prompt_of(6, 9), of_shape(SHAPES["mixed"])
    for leaf in (8, 9):
        cache = fresh(target, prompt)
        verify(target, cache, tree)
        other, path = cache.fork(), path_to(tree, leaf)
        cache.commit(path)
        other.commit(path[:2])
        tokens = prompt + tokens_on(tree, path)
        assert difference(target, cache, tokens) < TOLERANCE
        assert difference(target, other, tokens[: len(prompt) + 2]) < TOLERANCE
        for length in range(len(tokens), len(prompt) - 1, -1):
            assert cache.nearest(length) == length
            cache.rewind(length)
            assert difference(target, cache, tokens[:length]) < TOLERANCE


@pytest.mark.parametrize("fault", ["one chain", "copies", "places"])
@pytest.mark.parametrize("name", ["falcon_h1", "lfm2", "qwen3_5"])
def test_mixers_that_follow_no_paths_or_wrong_ones_are_noticed(name, fault, monkeypatch):
    of, along = Paths.of, recurrent.RecurrentLayer.along
    faults = {
        "one chain": lambda layer, paths, call: call.changed(
            lambda arg: layer.__class__(len(layer.cache), 0) if arg is mixers.STATE else arg
        )(),
        "copies": along,
        "places": lambda layer, paths, call: along(layer, of(of_shape(SHAPES["comb"])), call),
    }
    monkeypatch.setattr(recurrent.RecurrentLayer, "along", faults[fault])
    if fault == "copies":
        monkeypatch.setattr(Paths, "copies", lambda paths, state: [None] * len(state))
    target, prompt = target_of(name), prompt_of(3, 12)
    assert worst(target, fresh(target, prompt), prompt, of_shape((-1, *[0] * 4, 1, 2, 3, 4))) > 0.01


@pytest.mark.parametrize("name", ["lfm2", "nemotron_h", "qwen3_5"])
def test_quantised_weights_see_every_node_once_whichever_kernels_are_used(name, monkeypatch):
    target, prompt, tree = (
        changed_target(name, 4, **WIDE),
        prompt_of(3, 12),
        of_shape(SHAPES["comb"]),
    )
    stock, sizes = nn.QuantizedLinear.__call__, set()

    def product(linear, x):
        sizes.add(x.size // x.shape[-1])
        return stock(linear, x)

    monkeypatch.setattr(nn.QuantizedLinear, "__call__", product)
    for mode in ("off", "auto", "off"):
        target.use_kernels(mode)
        cache = fresh(target, prompt)
        sizes.clear()
        verify(target, cache, tree)
        assert sizes == {len(tree)}
        cache.discard()
        assert worst(target, cache, prompt, tree) < TOLERANCE


def test_a_tree_that_fails_leaves_mixers_and_states_as_they_were(monkeypatch):
    target = target_of("qwen3_5")
    cache = fresh(target, [1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(Paths, "copies", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            verify(target, cache, of_shape(SHAPES["wide"]))
    cache.discard()
    assert difference(target, cache, [1, 2]) < TOLERANCE


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        (Tree((1, 2), (-1, 0, 1)), ([0, 2], [1], [0, 1, 2, 3], [0, -1])),
        (Tree((1, 2, 3), (-1, 0, 0, 1)), ([1], [0, 3], [0, 2, 3], [0, 1, 3, 4], [0, 9])),
    ],
)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_what_is_no_path_of_the_rows_is_refused(name, tree, paths):
    target = target_of(name)
    cache = fresh(target, prompt_of(8, 5))
    verify(target, cache, tree)
    for path in paths:
        with pytest.raises(ValueError, match="path from the first row"):
            cache.commit(path)


def test_a_tree_wider_than_what_is_kept_of_prompts_can_be_kept_in_part():
    target, prompt = target_of("lfm2"), prompt_of(8, 5)
    nodes = recurrent.MOST_ROWS + 2
    tree = of_shape((-1, *[0] * (nodes - 2), nodes - 2))
    verify(target, cache := fresh(target, prompt), tree)
    cache.commit(path := [0, nodes - 2, nodes - 1])
    assert difference(target, cache, prompt + tokens_on(tree, path)) < TOLERANCE


def test_recurrent_layers_that_were_never_tried_on_branches_verify_chains_alone():
    """Bailing's hand a position of every row to their mixers."""
    assert set(RECURRENT) - TREE_MIXERS == {"bailing_hybrid"}
    target, tree = target_of("bailing_hybrid"), of_shape(SHAPES["wide"])
    reason = 'bailing_hybrid .* never tried on branches.*; use method="dflash" or method="ngram"'
    with pytest.raises(DFlashError, match=reason):
        target.check_trees()
    cache = fresh(target, prompt_of(8, 5))
    with pytest.raises(DFlashError, match=reason):
        verify(target, cache, tree)
    assert not target.takes_trees
    forward(target, cache, [1, 2, 3])


def test_every_family_of_mlx_lm_with_a_state_was_tried_on_branches_or_is_known_not_to_be():
    """Families that wrap one of these make no caches of their own."""
    files = Path(models.__path__[0]).glob("*.py")
    found = {file.stem for file in files if "ArraysCache(" in file.read_text()} - {"cache"}
    assert found == TREE_MIXERS | UNTRIED


def test_gated_delta_nets_that_leave_a_tape_are_those_that_keep_what_qwen3_next_keeps():
    """Its call and Qwen3.5's differ in their products alone."""
    calls = {}
    for name in DELTA_NETS:
        family, kind = name.split(".")
        source = (Path(models.__path__[0]) / f"{family}.py").read_text()
        (made,) = (n for n in ast.parse(source).body if getattr(n, "name", "") == kind)
        (call,) = (n for n in made.body if getattr(n, "name", "") == "__call__")
        calls[name] = ast.unparse(call)
    for call in calls.values():
        kept = re.findall(r"cache\[\d\] = .*", call)
        assert kept == [
            "cache[0] = mx.take_along_axis(conv_input, positions, axis=1)",  # of a batch's lengths
            "cache[0] = mx.contiguous(conv_input[:, -n_keep:, :])",
            "cache[1] = state",
        ]
        update = (
            r"out, state = gated_delta_update\(q, k, v, a, b, self.A_log, self.dt_bias, state, "
        )
        assert re.search(update + r"mask, use_kernel=not self.training\)", call)
        assert re.findall(r".*conv1d\(.*", call) == [
            "    conv_out = nn.silu(self.conv1d(conv_input))"
        ]
