"""Targets with recurrent layers: what is not accepted is taken back, and nothing drifts."""

import io
import re
from itertools import islice

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.exact import lead
from dflash_mlx.verifier import recurrent
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.model import Target
from support.decoding import ids_of, start, tree_of
from support.families import make_model
from support.hybrids import (
    WIDE,
    changed_target,
    difference,
    forward,
    fresh,
    oracle,
    plain_answer,
    rounds,
    some_right,
    target_of,
)
from support.overrides import override
from support.recurrent_families import RECURRENT, UNSUPPORTED
from support.toys import prompt_of
from support.walks import Walk

NAMES = sorted(RECURRENT)
LONG = ["falcon_h1", "lfm2", "nemotron_h", "qwen3_5", "qwen3_next"]  # 200 rounds
SHORT = sorted(set(NAMES) - set(LONG))
FEW = ["falcon_h1", "gear", "nemotron_h", "recurrent_gemma", "rwkv7"]
TOLERANCE = 1e-4
MARGIN = 1e-3  # by which every token of the plain answers leads, so that rounding decides none
PROMPTS = {"bailing_hybrid": 2, "falcon_h1": 6, "granitemoehybrid": 2, "lfm2": 2, "qwen3_5": 4}
PROMPTS |= {"qwen3_next": 2}  # seeds of prompts with such answers; 1 for the others


@pytest.mark.parametrize(("name", "count"), [(n, 200) for n in LONG] + [(n, 20) for n in SHORT])
def test_greedy_answers_equal_plain_decoding_and_the_state_does_not_drift(name, count):
    target, prompt = target_of(name), prompt_of(PROMPTS.get(name, 1), 20)
    case = some_right(2)
    tokens = 1 + sum(1 + right for _, right in (case() for _ in range(count)))
    plain = plain_answer(target, prompt, tokens)
    logits = forward(target, target.new_cache(), prompt + plain[:-1])
    assert lead(logits[len(prompt) - 1 :])[1].min().item() > MARGIN
    drafter = oracle(prompt, plain, some_right(2))
    state = start(target, drafter, prompt)
    made = list(islice(rounds(target, drafter, state, 2 * tokens), 1 + count))
    assert [token for accepted in made for token in accepted.tokens] == plain
    kept = [(len(accepted.path) - 1, len(accepted.tree) - 1) for accepted in made[1:]]
    assert {right for right, _ in kept} == {0, 1, 2, 3, 4}
    assert sum(right == drafted for right, drafted in kept) > count // 4
    assert sum(0 < right < drafted for right, drafted in kept) > count // 10
    assert difference(target, state.cache, prompt + plain[:-1]) < TOLERANCE


def off_after(target, kept):
    """By how much the state is off after the first rows of a pass were kept, behind a prompt."""
    prompt, rows = prompt_of(3, 12), prompt_of(4, 5)
    cache = fresh(target, prompt)
    forward(target, cache, rows)
    cache.commit(range(kept))
    return difference(target, cache, prompt + rows[:kept])


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_accepted_rows_equals_computing_them_alone(name):
    assert np.max([off_after(target_of(name), kept) for kept in range(6)]) < TOLERANCE


@pytest.mark.parametrize("name", ["lfm2", "nemotron_h", "qwen3_5"])
def test_quantised_weights_keys_and_values_are_replayed_as_well(name):
    target = changed_target(name, 4, **WIDE)
    target.kv_bits = 8
    forward(target, cache := target.new_cache(), [1, 2])
    attention = [layer for layer in cache.layers if isinstance(layer, LayerCache)]
    assert attention and all(len(layer.arrays) == 6 for layer in attention)
    assert np.max([off_after(target, kept) for kept in (0, 2, 5)]) < TOLERANCE


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_two_targets_on_one_model_take_drafts_back_alike(name):
    model = make_model(name)
    for target in [Target(model, 512, name) for _ in range(2)]:
        assert off_after(target, 3) < TOLERANCE
        forward(target, cache := target.new_cache(), [1, 2])
        assert len(cache.parts[0]._running.calls) == len(cache.parts[0].parts)


def test_compiled_functions_take_drafts_back_alike():
    mx.enable_compile()
    try:
        assert off_after(Target(make_model("qwen3_5"), 512, ""), 2) < TOLERANCE
    finally:
        mx.disable_compile()


def change_states_in_place(model):
    """Make mixers write their new state into the array that held the old one."""

    def call(mixer, forward, x, mask=None, cache=None):
        before = list(cache.cache)
        output = forward(mixer, x, mask=mask, cache=cache)
        for i, array in enumerate(before):
            if array is not None:
                array += cache[i] - array
                cache[i] = array
        return output

    for mixer in recurrent._mixers(model, "in place"):
        override(mixer, call)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_states_that_are_changed_in_place_can_be_taken_back_too(name):
    model, prompt = make_model(name), prompt_of(3, 12)
    change_states_in_place(model)
    target = Target(model, 512, name)
    assert np.max([off_after(target, kept) for kept in (0, 2, 5)]) < TOLERANCE
    cache = fresh(target, prompt)
    for kept in (0, 2, 5):
        forward(target, cache, prompt_of(4, 5))
        cache.commit(range(kept))
        cache.rewind(12)
        assert difference(target, cache, prompt) < TOLERANCE


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2", "qwen3_5", "rwkv7"])
@pytest.mark.parametrize(
    "fault", ["nothing is put back", "nothing is replayed", "all rows are", "one row too few is"]
)
def test_a_wrong_replay_is_noticed(name, fault, monkeypatch):
    again = recurrent.Call.again
    faults = {
        "nothing is put back": again,
        "nothing is replayed": lambda *args: None,
        "all rows are": lambda call, state, rows, path: again(call, state, rows, range(rows)),
        "one row too few is": lambda call, state, rows, path: again(call, state, rows, path[:-1]),
    }
    monkeypatch.setattr(recurrent.Call, "again", faults[fault])
    if fault == "nothing is put back":
        monkeypatch.setattr(recurrent.RecurrentStates, "_put_back", lambda states, back: None)
    kept = 1 if fault == "nothing is put back" else 3  # short convolutions soon forget
    assert off_after(target_of(name), kept) > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_plain_answers_equal_those_of_mlx_lm(name):
    target, prompt = target_of(name), prompt_of(5, 20)
    plain = plain_answer(target, prompt, 25)
    steps = generate_step(mx.array(prompt), make_model(name), max_tokens=25)
    assert plain == [token for token, _ in steps]


@given(seed=st.integers(0, 10**6))
@settings(max_examples=5)
@pytest.mark.parametrize("name", FEW)
def test_passes_forks_and_ways_back_in_any_order_leave_the_state_of_the_tokens(name, seed):
    walk = Walk(target_of(name), seed)
    for _ in range(10):
        walk.step()
    walk.cache.discard()
    assert difference(walk.target, walk.cache, walk.tokens) < TOLERANCE


def test_there_are_ways_back_to_every_length_of_the_last_rounds_and_to_marked_ones():
    target, prompt = target_of("lfm2"), prompt_of(6, 40)
    cache = fresh(target, prompt[:30])
    forward(target, cache, prompt[30:])
    cache.commit(range(10))
    cache.mark(cache.length)
    said = []
    for i in range(20):
        rows = prompt_of(i, 4)
        forward(target, cache, rows)
        cache.commit(range(3))
        said += rows[:3]
    tokens = prompt + said
    for length in [*range(30, 41), *range(91, 101)]:
        assert cache.nearest(length) == length
        copy = cache.fork()
        copy.rewind(length)
        assert difference(target, copy, tokens[:length]) < TOLERANCE
    assert [cache.nearest(length) for length in (90, 60, 29, 0)] == [40, 40, 0, 0]
    with pytest.raises(ValueError, match="no way back from 100 tokens to 60"):
        cache.rewind(60)


def test_what_is_kept_for_going_back_does_not_grow():
    target = target_of("qwen3_5")
    cache = target.new_cache()
    forward(target, cache, prompt_of(0, recurrent.MOST_ROWS + 1))
    assert cache.parts[0]._running.calls is None
    cache.commit(range(recurrent.MOST_ROWS + 1))
    for i in range(30):
        forward(target, cache, prompt_of(i, 2))
        cache.commit([0])
        if i % 5 == 0:
            cache.mark(cache.length)
        assert len(cache.parts[0]._passes) <= 5


def test_a_long_pass_is_kept_whole_or_not_at_all():
    target, prompt = target_of("nemotron_h"), prompt_of(7, 20)
    cache = fresh(target, prompt)
    rows = recurrent.MOST_ROWS + 1
    forward(target, cache, prompt_of(0, rows))
    with pytest.raises(ValueError, match=f"a pass of {rows} rows can only be kept whole"):
        cache.commit([0])
    cache.discard()
    assert difference(target, cache, prompt) < TOLERANCE


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_models_whose_state_is_in_no_module_of_its_own_are_refused(name):
    with pytest.raises(DFlashError, match=f"layer 0 of {name} "):
        Target(make_model(name), 512, name)


def test_caches_of_other_kinds_are_refused_with_the_layer_and_their_class(monkeypatch):
    from mlx_lm.models.cache import ChunkedKVCache

    model = make_model("llama")
    monkeypatch.setattr(type(model), "make_cache", lambda m: [ChunkedKVCache(8)], raising=False)
    with pytest.raises(DFlashError, match="layer 0 of llama keeps its state in a ChunkedKVCache"):
        Target(model, 512, "llama")


def steps_in(arrays: list[mx.array], kinds: str) -> int:
    """Matrix products, or others, that have yet to be computed for these arrays."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return len(re.findall(rf'label ="(?:{kinds})"', graph.getvalue()))


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("parents", [(-1, 0, 1, 2), (-1, 0, 0, 2)])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_rows_that_stay_are_run_again_without_products_and_if_taped_without_convolutions(
    name, parents, bits
):
    target = changed_target(name, bits)
    path = [0, 1] if parents[2] == 1 else [0, 2, 3]
    states, left = [], []
    for forgotten in ((), ("tapes",), ("tapes", "noted")):
        sequence = target.new_cache()
        target.forward(mx.arange(5), sequence, Block(5))
        sequence.commit(range(5))
        tree = tree_of([1, 2, 3, 4], list(parents))
        mx.eval(target.forward(ids_of(tree), sequence, Block.of(tree))[0])
        running = sequence.parts[0]._running
        for call in running.calls:
            for part in forgotten:
                getattr(call, part).clear()
        sequence.fork().commit(path)  # which takes nothing from the others
        sequence.commit(path)
        kinds = "Matmul|AddMM|QuantizedMatmul", "Convolution"
        left.append([steps_in(sequence.parts[0].arrays, kind) for kind in kinds])
        states.append(sequence.parts[0].arrays)
        kept = sequence.parts[0]._passes[-1].calls
        assert kept and not any(call.noted or call.tapes for call in kept)  # nothing is kept
    (taped, none), (noted, convolved), (anew, _) = left
    assert taped == none == noted == 0 < min(convolved, anew)
    for ours, *others in zip(*states, strict=True):
        for other in others:
            assert mx.abs(ours - other).max().item() < 1e-4


def test_hooks_leave_parameters_alone_and_passes_change_no_class():
    model, target = make_model("qwen3_5"), target_of("qwen3_5")
    names = [[name for name, _ in tree_flatten(m.parameters())] for m in (model, target.model)]
    assert names[0] == names[1]
    tree, classes = tree_of([1, 2, 3], [-1, 0, 0]), []
    for block in (Block.of(tree), Block(3), Block(3, last_only=True), Block.of(tree)):
        target.forward(ids_of(tree), target.new_cache(), block)
        classes.append([type(module) for module in target.model.modules()])
    assert classes[1:] == classes[:1] * 3, "but for the ropes' before the first tree"


def test_a_model_is_used_as_before_outside_the_target():
    target, tokens = target_of("nemotron_h"), mx.array([prompt_of(9, 12)])
    other = make_model("nemotron_h")
    caches = [m.make_cache() for m in (target.model, other)]
    ours, theirs = (m(tokens, cache=c) for m, c in zip((target.model, other), caches, strict=True))
    assert mx.array_equal(ours, theirs)
