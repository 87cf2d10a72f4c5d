"""Masked diffusion drafters in every format have the reference's logits, however text comes in."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.drafters.networks.model import MOST_WAITING
from dflash_mlx.drafters.specdiff.model import CHUNK
from dflash_mlx.verifier.model import Target
from support.drafter_formats import written
from support.families import VOCAB_SIZE, make_model
from support.masked_formats import (
    FORMATS,
    behind,
    block_of,
    logits,
    ours,
    tensors,
)
from support.toys import prompt_of

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def target():
    return Target(make_model("llama"), 512, "llama")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory, target):
    made = {}

    def get(name: str, **settings):
        key = name, *settings.items()
        if key not in made:
            made[key] = written(
                tmp_path_factory.mktemp("drafter"), *FORMATS[name], target, **settings
            )
        return made[key]

    return get


def expected(target, name, text, block):
    table = np.array(target.embedding().weight)
    return logits(*FORMATS[name], (table, table), text, block)


def found(model, context, block):
    places = range(1, len(block))
    return np.array(model.logits(context, mx.array(block), places))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("length", "rows"), [(0, 2), (1, 6), (23, 6), (70, 3)])
def test_a_block_has_the_logits_of_the_reference(model_of, target, name, length, rows):
    text, model = prompt_of(length, length), model_of(name)
    block = block_of(7, rows, **({"_3": 11} if rows > 3 else {}))
    right = expected(target, name, text, block)
    assert right.shape == (rows - 1, VOCAB_SIZE)
    assert np.abs(found(model, behind(model, text), block) - right).max() < TOLERANCE


@pytest.mark.parametrize("name", ["ours", "ours, sliding", "dream"])
def test_a_long_prompt_is_taken_in_in_chunks(model_of, target, name):
    text, model = prompt_of(1, CHUNK + MOST_WAITING + 20), model_of(name)
    context = behind(model, text)
    assert context.length == len(text)
    assert context.arrays[-1].size == 0, "nothing of a prompt waits"
    assert context.arrays[0].shape[2] >= (9 if "sliding" in name else len(text))
    block = block_of(3, 6)
    difference = found(model, context, block) - expected(target, name, text, block)
    assert np.abs(difference).max() < TOLERANCE


@pytest.mark.parametrize("name", ["ours", "ours, sliding", "ours, shifted", "a2d-qwen3"])
@pytest.mark.parametrize("cuts", [(), (1,), (10, 11, 12), (64,), (65,), (5, 75, 76)])
def test_tokens_that_waited_and_tokens_that_did_not_say_the_same(model_of, target, name, cuts):
    text, model, block = prompt_of(2, 80), model_of(name), block_of(7, 6)
    right = expected(target, name, text, block)
    context = behind(model, text, *cuts)
    for _ in range(2):  # at the second draft nothing waits
        assert np.abs(found(model, context, block) - right).max() < TOLERANCE
        assert context.length == len(text)


@pytest.mark.parametrize("name", ["ours", "ours, sliding", "fast-dllm"])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("back", [1, 5, 30])
def test_what_is_taken_back_leaves_no_trace(model_of, target, name, drafts, back):
    model, block = model_of(name), block_of(9, 4)
    text, other = prompt_of(4, 40), prompt_of(5, 12)
    context = behind(model, text, 32)
    if drafts:
        found(model, context, block)
    length = len(text) - back
    assert context.refill_from(length) == length
    context.trim(length)
    assert context.length == length
    context.append(mx.array(other), None)
    right = expected(target, name, [*text[:length], *other], block)
    assert np.abs(found(model, context, block) - right).max() < TOLERANCE


@pytest.mark.parametrize(
    ("name", "settings", "read"),
    [("ours", {"draft_window": 6}, 2 * 5), ("ours, sliding", {}, 200)],
    ids=["all windows", "one window"],
)
def test_a_window_that_has_passed_on_is_read_again_and_the_target_computes_nothing(
    model_of, monkeypatch, name, settings, read
):
    """As far back as it matters: five tokens for each of two windows, or all; time and again."""
    model, block, text = model_of(name, **settings), block_of(9, 4), prompt_of(6, 900)
    context = behind(model, text, *range(100, 900, 100))
    found(model, context, block)
    rows, embed = [], context._embed
    monkeypatch.setattr(context, "_embed", lambda tokens: rows.append(tokens.size) or embed(tokens))
    for length in (200, 50):  # the second time behind what was read again
        rows.clear()
        assert context.refill_from(length) == length
        context.trim(length)
        assert context.length == length
        fresh = behind(model, text[:length])
        assert np.abs(found(model, context, block) - found(model, fresh, block)).max() < TOLERANCE
        assert sum(rows) - len(block) == min(read, length)
        context.append(mx.array(text[length : length + 300]), None)
        found(model, context, block)


def test_a_draft_window_limits_what_is_seen_and_kept(model_of):
    model, block = model_of("ours", draft_window=6), block_of(9, 4)
    text = prompt_of(6, 300)
    alike = [*prompt_of(7, 200), *text[200:]]
    same, other = (found(model, behind(model, each), block) for each in (text, alike))
    assert np.abs(same - other).max() < TOLERANCE
    whole = model_of("ours")
    same, other = (found(whole, behind(whole, each), block) for each in (text, alike))
    assert np.abs(same - other).max() > 10 * TOLERANCE


def test_text_never_sees_a_block_and_a_block_sees_all_of_itself(model_of):
    model, text, first = model_of("ours"), prompt_of(8, 20), block_of(7, 6)
    before, context = found(model, behind(model, text), first), behind(model, text)
    found(model, context, [50] * 6)  # in one pass with the text
    assert np.abs(found(model, context, first) - before).max() < TOLERANCE
    later = found(model, context, block_of(7, 6, _5=40))
    assert np.abs(later[0] - before[0]).max() > 10 * TOLERANCE


@pytest.mark.parametrize("bits", [4, 8])
def test_keys_and_values_are_quantised_as_the_targets_are(tmp_path, target, bits):
    """Rounded a little, and in passes of any width alike."""
    text, block, raw = prompt_of(3, 60), block_of(7, 6), ours(head_dim=32)
    target.kv_bits = bits
    try:
        model = written(tmp_path, raw, tensors(raw), target)
    finally:
        target.kv_bits = None
    table = np.array(target.embedding().weight)
    right = logits(raw, tensors(raw), (table, table), text, block)
    rounded = found(model, behind(model, text), block)
    again = found(model, behind(model, text, 20, 21), block)
    assert 1e-3 < np.abs(rounded - right).mean() < (0.5 if bits == 4 else 0.05)
    assert np.abs(rounded - again).max() < (0.2 if bits == 4 else 0.02)


@pytest.mark.parametrize("name", ["ours", "ours, own tables"])
def test_logits_are_of_the_heads_precision_where_the_network_computes_in_another(tmp_path, name):
    target = Target(make_model("llama"), 512, "llama")
    target.model.set_dtype(mx.float16)
    model = written(tmp_path, *FORMATS[name], target)
    model.module.set_dtype(mx.float32)  # as of one that overflows in float16
    own = name == "ours, own tables"
    said = model.logits(model.new_context(), mx.array(block_of(9, 4)), range(1, 4))
    assert said.dtype == (mx.float32 if own else mx.float16)


def test_a_partial_head_drafts_likely_tokens_and_those_of_the_conversation(tmp_path, target):
    model = written(tmp_path, *FORMATS["ours"], target)
    model.limit_vocabulary(target, np.arange(VOCAB_SIZE), 10)
    finite = np.isfinite(found(model, behind(model, [90, 91]), block_of(92, 6)))
    assert finite.shape == (5, VOCAB_SIZE) and finite[:, [90, 91]].all()
    assert 12 <= finite[0].sum() < VOCAB_SIZE
