"""Every mlx-lm attention family as a target: trees, windows, commits, taps."""

import functools
from copy import deepcopy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import SLACK
from dflash_mlx.verifier.model import Target
from support.decoding import answer, ids_of, path_to
from support.families import (
    FAMILIES,
    ONE_BY_ONE,
    POSITION_DEPENDENT,
    SLIDING,
    VOCAB_SIZE,
    make_model,
)
from support.hybrids import fresh, oracle, some_tree, target_of, tokens_on, worst_node
from support.overrides import override
from support.toys import foretold

TREE_FAMILIES = sorted(set(FAMILIES) - set(POSITION_DEPENDENT))
PROMPT_LENGTH = 20
TOLERANCE = 1e-4


def tokens_of(rng, count):
    return rng.integers(VOCAB_SIZE, size=count).tolist()


def plain_logits(target, prompt, path):
    """Logits [n, V] after each token of `path`, behind a prompt, by the model alone."""
    if target.name not in ONE_BY_ONE:
        return np.array(target.model(mx.array([prompt + path]))[0, len(prompt) :])
    caches = deepcopy(prompt_caches(target.name, tuple(prompt)))
    return np.array([target.model(mx.array([[token]]), cache=caches)[0, -1] for token in path])


@functools.cache
def prompt_caches(name, prompt):
    """The model's own, which a prompt went through token by token."""
    model = target_of(name).model
    caches = make_prompt_cache(model)
    for token in prompt:
        mx.eval(model(mx.array([[token]]), cache=caches))
    return caches


def off_alone(target, cache, prompt, tree):
    """By how much any node's logits are off from those of the model alone."""
    return worst_node(target, cache, tree, lambda path: (plain_logits(target, prompt, path), None))


@pytest.mark.parametrize("name", TREE_FAMILIES)
def test_every_node_of_a_random_tree_equals_a_forward_over_its_own_path(name):
    rng = np.random.default_rng(0)
    target, prompt = target_of(name), tokens_of(rng, PROMPT_LENGTH)
    cache = fresh(target, prompt, 9)
    for _ in range(2):
        assert off_alone(target, cache, prompt, some_tree(rng)) < TOLERANCE
        cache.discard()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_of_a_prompt_only_the_last_row_meets_the_head(name):
    target, prompt = Target(make_model(name), 512, name), mx.arange(9)
    rows, blocks = [], (Block(9), Block(9, last_only=True), Block(9))
    override(
        target.model, lambda model, call, *a, **k: rows.append(call(model, *a, **k)) or rows[-1]
    )
    each, last, again = (target.forward(prompt, target.new_cache(), block)[0] for block in blocks)
    some = (
        9 if name in ("afm7", "llama4_text", "seed_oss") else 1
    )  # which multiply without a module
    assert [logits.shape[1] for logits in rows] == [9, some, 9]
    assert last.shape == (1, VOCAB_SIZE) and mx.array_equal(each, again)
    assert mx.abs(last - each[-1:]).max().item() < TOLERANCE


@given(seed=st.integers(0, 10**6), nodes=st.integers(0, 12), length=st.integers(0, 30))
@settings(max_examples=25)
@pytest.mark.parametrize("name", ["llama", "llama_sliding"])
def test_trees_of_any_shape_behind_prompts_of_any_length(name, seed, nodes, length):
    rng = np.random.default_rng(seed)
    target, prompt = target_of(name), tokens_of(rng, length)
    assert off_alone(target, fresh(target, prompt, 9), prompt, some_tree(rng, nodes)) < TOLERANCE


@pytest.mark.parametrize("name", TREE_FAMILIES)
def test_committing_a_path_equals_computing_it_from_scratch(name):
    rng = np.random.default_rng(3)
    target, committed = target_of(name), tokens_of(rng, 6)
    cache = fresh(target, committed, 9)
    for _ in range(12):  # far enough for windows of 8 to wrap
        tree = some_tree(rng)
        target.forward(ids_of(tree), cache, Block.of(tree))
        path = path_to(tree, int(rng.integers(len(tree))))
        cache.commit(path)
        committed = committed + tokens_on(tree, path)
    assert cache.length == len(committed)
    assert off_alone(target, cache, committed, some_tree(rng)) < TOLERANCE


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_chains_need_no_positions_per_row_and_work_on_every_family(name):
    rng = np.random.default_rng(4)
    target, committed = target_of(name), tokens_of(rng, 11)
    cache = fresh(target, committed, 9)
    for rows, accepted in [(5, 2), (1, 1), (7, 7), (3, 1)]:
        tree = Tree.chain(mx.array(tokens_of(rng, rows)))
        logits, _ = target.forward(ids_of(tree), cache, Block.of(tree))
        path = tuple(range(accepted))
        cache.commit(path)
        expected = plain_logits(target, committed, tokens_on(tree, path))[-1]
        committed = committed + tokens_on(tree, path)
        assert np.abs(np.array(logits[accepted - 1]) - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", sorted(set(SLIDING) - set(POSITION_DEPENDENT)))
def test_a_wrapped_window_goes_back_only_as_far_as_its_slots_reach(name):
    rng = np.random.default_rng(5)
    target, committed = target_of(name), tokens_of(rng, 300)
    cache = fresh(target, committed, 100)
    back = 300 - SLACK
    assert (cache.nearest(40), cache.nearest(back)) == (0, back)
    cache.rewind(back)
    assert off_alone(target, cache, committed[:back], some_tree(rng, 3)) < TOLERANCE
    cache.rewind(0)
    assert off_alone(target, cache, [], some_tree(rng)) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma4_text_shared_kv", "qwen3_moe", "cohere2"])
def test_tapped_features_are_the_outputs_of_the_layers_that_were_named(name):
    target = target_of(name)
    tokens = mx.array(tokens_of(np.random.default_rng(6), 12))
    last = target.num_layers - 1
    aux_layers = (0, last, 1)
    target.tap(aux_layers)
    hooked = type(target.model.layers[0])
    target.tap((1, 0))
    assert type(target.model.layers[0]) is hooked, "hooked once"
    _, features = target.forward(tokens, target.new_cache(), Block(12), aux_layers)
    first, final, second = mx.split(features, 3, axis=1)
    inner = target.model.model
    direct = inner(tokens[None])[0]
    assert np.abs(np.array(inner.norm(final) - direct)).max() < TOLERANCE
    if name == "llama":
        states = inner.layers[0](inner.embed_tokens(tokens[None]), "causal")
        assert mx.abs(first - states[0]).max() < TOLERANCE
        assert mx.abs(second - inner.layers[1](states, "causal")[0]).max() < TOLERANCE


def test_two_targets_on_one_model_are_both_right():
    rng = np.random.default_rng(8)
    model, tokens = make_model("llama_sliding"), mx.array(tokens_of(rng, PROMPT_LENGTH))
    both = {(0, 2): Target(model, 512, "first"), (2, 1): Target(model, 512, "second")}
    for aux_layers, target in both.items():
        target.tap(aux_layers)
    alone = target_of("llama_sliding")
    for aux_layers, target in both.items():
        cache = fresh(target, tokens.tolist(), 9)
        assert off_alone(target, cache, tokens.tolist(), some_tree(rng)) < TOLERANCE
        alone.tap(aux_layers)
        ours, theirs = (
            t.forward(tokens, t.new_cache(), Block(len(tokens)), aux_layers)[1]
            for t in (target, alone)
        )
        assert mx.array_equal(ours, theirs)
    stock = type(make_model("llama_sliding").layers[0].self_attn.rope)
    assert type(model.layers[0].self_attn.rope).__mro__[1] is stock  # hooked, and once


@pytest.mark.parametrize("name", ["plamo3", "gemma3n", "afm7", "gemma3_text"])
@pytest.mark.parametrize("length", [3, 12])
def test_answers_are_those_of_the_model_s_own_caches_whatever_is_drafted(name, length):
    """plamo3's masks are wider than its caches; the others' layers share keys."""
    model, prompt = make_model(name), tokens_of(np.random.default_rng(5), length)
    own, expected = make_prompt_cache(model), []
    for token in prompt[:-1]:
        model(mx.array([[token]]), cache=own)
    token = prompt[-1]
    for _ in range(24):
        token = int(mx.argmax(model(mx.array([[token]]), cache=own)[0, -1]).item())
        expected.append(token)
    target, config = Target(model, 512, name), DecodeConfig(max_tokens=24, prefill_step=4)
    assert answer(target, NoDraft(), prompt, config) == expected
    chain = oracle(prompt, expected, lambda: (5, 2))
    assert answer(target, chain, prompt, config) == expected
    if target.takes_trees:
        assert answer(target, foretold(prompt, expected, 1), prompt, config) == expected
