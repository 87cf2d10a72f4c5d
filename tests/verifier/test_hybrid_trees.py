"""Trees on targets with recurrent layers: every node follows its own path, and nothing drifts."""

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
from dflash_mlx.verifier.mixers import TREE_MIXERS, UNTRIED, Paths
from dflash_mlx.verifier.model import Target
from support.decoding import path_to
from support.families import VOCAB_SIZE, make_model
from support.hybrids import difference, forward, fresh, target_of
from support.recurrent_families import RECURRENT
from support.toys import prompt_of, random_tree

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


def some_tree(rng, nodes=8):
    tokens, parents = random_tree(rng, nodes, VOCAB_SIZE)
    return Tree(tuple(tokens), (-1, *parents))


def of_shape(parents):
    return Tree(tuple(prompt_of(len(parents), len(parents) - 1)), parents)


def verify(target, cache, tree, aux_layers=()):
    """Logits, features and tokens of a pass over a tree behind an anchor."""
    ids = tree.ids(mx.array([7]))
    return *target.forward(ids, cache, Block.of(tree), aux_layers), ids.tolist()


def worst(target, cache, before, tree):
    """By how much any node's logits or features are off, the latter over the largest of theirs."""
    aux_layers = tuple(range(target.num_layers))
    target.tap(aux_layers)
    logits, features, ids = verify(target, cache, tree, aux_layers)
    off = []
    for leaf in set(range(len(tree))) - set(tree.parents):
        path = mx.array(path_to(tree, leaf))
        tokens = before + [ids[n] for n in path.tolist()]
        given = mx.array(tokens), target.new_cache(), Block(len(tokens)), aux_layers
        expected, states = (found[len(before) :] for found in target.forward(*given))
        off.append(mx.abs(logits[path] - expected).max().item())
        apart = mx.abs(features[path] - states).max(axis=-1) / mx.abs(states).max(axis=-1)
        off.append(apart.max().item())
    return np.max(off)  # no number, where any of these is none


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
        _, _, ids = verify(target, cache, tree)
        path = path_to(tree, int(rng.integers(len(tree))))
        cache.commit(path)
        tokens += [ids[node] for node in path]
        if i % 50 == 49:
            assert difference(target, cache, tokens) < TOLERANCE
    assert len(tokens) > 400
    assert worst(target, cache, tokens, some_tree(rng)) < TOLERANCE


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "rwkv7"])
def test_a_state_goes_back_into_the_path_of_a_tree_and_forks_keep_paths_of_their_own(name):
    target, prompt, tree = target_of(name), prompt_of(6, 9), of_shape(SHAPES["mixed"])
    for leaf in (8, 9):
        cache = fresh(target, prompt)
        _, _, ids = verify(target, cache, tree)
        other, path = cache.fork(), path_to(tree, leaf)
        cache.commit(path)
        other.commit(path[:2])
        tokens = prompt + [ids[node] for node in path]
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
        "one chain": lambda layer, paths, call: call.on(
            lambda arg: layer.__class__(len(layer.cache), 0) if arg is mixers.STATE else arg
        ),
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
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    monkeypatch.setitem(RECURRENT, name, {**RECURRENT[name], **heads})
    model, prompt, tree = make_model(name), prompt_of(3, 12), of_shape(SHAPES["comb"])
    nn.quantize(model, group_size=32, bits=4)
    stock, sizes = nn.QuantizedLinear.__call__, set()

    def product(linear, x):
        sizes.add(x.size // x.shape[-1])
        return stock(linear, x)

    monkeypatch.setattr(nn.QuantizedLinear, "__call__", product)
    target = Target(model, 512, name)
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


@pytest.mark.parametrize("path", [[1], [0, 3], [0, 2, 3], [0, 1, 3, 4], [0, 9]])
def test_what_is_no_path_of_the_tree_is_refused(path):
    target = target_of("lfm2")
    cache = fresh(target, prompt_of(8, 5))
    verify(target, cache, Tree((1, 2, 3), (-1, 0, 0, 1)))
    with pytest.raises(ValueError, match="path from the first row"):
        cache.commit(path)


def test_a_tree_wider_than_what_is_kept_of_prompts_can_be_kept_in_part():
    target, prompt = target_of("lfm2"), prompt_of(8, 5)
    nodes = recurrent.MOST_ROWS + 2
    tree = of_shape((-1, *[0] * (nodes - 2), nodes - 2))
    _, _, ids = verify(target, cache := fresh(target, prompt), tree)
    cache.commit([0, nodes - 2, nodes - 1])
    assert difference(target, cache, [*prompt, ids[0], *ids[-2:]]) < TOLERANCE


def test_recurrent_layers_that_were_never_tried_on_branches_verify_chains_alone():
    """Bailing's hand a position of every row to their mixers."""
    assert set(RECURRENT) - TREE_MIXERS == {"bailing_hybrid"}
    target, tree = target_of("bailing_hybrid"), of_shape(SHAPES["wide"])
    reason = r"bailing_hybrid .* never tried on branches.*; use --method dflash or --method ngram"
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
