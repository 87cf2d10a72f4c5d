"""The drafter network drafts what the NumPy reference drafts, however its context grew."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.block_diffusion import BlockDiffusion
from dflash_mlx.drafters.dflash.block_model import Ask, FeatureContext
from dflash_mlx.verifier.model import Target
from support.decoding import behind, feed, open_with, start
from support.drafter_formats import (
    FORMATS,
    TAPS,
    WINDOWS,
    Drafting,
    difference,
    features_of,
    written,
)
from support.families import VOCAB_SIZE, make_model
from support.toys import prompt_of

TOLERANCE = 1e-4
BLOCK = 8
FIRST = ["version 1", *WINDOWS]
CONVOLVED = ["version 2", "version 2, three taps", "version 2, sliding"]


# Several sequences


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("most", [None, 10])  # of tokens that the head has for all of them
def test_blocks_of_several_sequences_are_drafted_at_once_as_each_alone(drafting, name, most):
    subject = drafting(name)
    model = subject.model
    if most is not None:
        model = written(subject.folder, subject.raw, subject.tensors, subject.target)
        model.limit_vocabulary(subject.target, np.arange(VOCAB_SIZE), most)
    asks = []
    for seed, (length, prefixes) in enumerate([(20, [()]), (3, [(), (4, 5)]), (9, [(8,)])]):
        state = behind(model, 7 + seed, features_of(length, seed))
        state.context.append(mx.array([50 + seed]), mx.array(features_of(1, seed + 9)))
        asks.append(Ask(state.context, state.anchor, 6, prefixes))
    together = model.choices(asks, 5)
    for ask, found in zip(asks, together, strict=True):
        (alone,) = model.choices([ask], 5)
        for one, other in zip(found, alone, strict=True):
            for depth in range(7):
                a, b = one((0,) * depth), other((0,) * depth)
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    assert a[0] == b[0]
                    np.testing.assert_allclose(a[1], b[1], atol=TOLERANCE)


# Against the reference


@pytest.mark.parametrize("name", [*FORMATS, *WINDOWS])
@settings(max_examples=20)
@given(
    splits=st.lists(st.integers(1, 16), max_size=8).filter(lambda s: sum(s) <= 40),
    rows=st.integers(2, BLOCK),
    anchor=st.integers(0, VOCAB_SIZE - 1),
    seed=st.integers(0, 2**16),
)
def test_a_block_has_the_logits_of_the_reference(drafting, name, splits, rows, anchor, seed):
    features = features_of(sum(splits), seed)
    assert drafting(name).error(features, anchor, rows, *splits) < TOLERANCE


@pytest.mark.parametrize("name", FIRST)
def test_a_block_has_the_logits_of_the_reference_after_windows_have_moved_on(drafting, name):
    splits = [250, 30, 1, 249]  # cache slots come in steps of 256
    assert drafting(name).error(features_of(530), 7, 8, *splits) < TOLERANCE


def test_the_embedding_and_the_head_are_those_of_the_target(tmp_path):
    subject = Drafting(tmp_path, *FORMATS["version 1"], Target(make_model("mimo"), 512, "mimo"))
    assert difference(*subject.tables) > 0.1
    assert subject.error(features_of(9), 7, 8) < TOLERANCE


@pytest.mark.parametrize("name", [*FIRST, *CONVOLVED])
def test_blocks_drafted_side_by_side_have_the_logits_of_the_reference(drafting, name):
    subject, features = drafting(name), features_of(30, 7)
    state, rows = subject.state(9, features), subject.model.config.block_size
    prefixes = [(), (3,), tuple(prompt_of(1, rows - 2)), (3, 4)]
    together = subject.logits(state, rows, *prefixes)
    alone = [subject.expected(features, 9, rows, prefix) for prefix in prefixes]
    assert [len(part) for part in alone] == [rows - 1 - len(prefix) for prefix in prefixes]
    assert difference(together, np.concatenate(alone)) < TOLERANCE
    seen = difference(subject.logits(state, rows, (4,)), alone[1]) > TOLERANCE
    assert seen == (name != "over one position"), "a mask sees the prefix before it"


# Trees


@pytest.mark.parametrize(
    ("remaining", "size", "rows"),
    [(1, None, 1), (2, None, 2), (5, None, 5), (8, None, 8), (100, None, 8)]
    + [(100, 2, 2), (100, 3, 3), (100, 8, 8), (2, 3, 2)],
)
def test_a_chain_has_the_block_s_size_or_that_asked_for_and_fits_the_room(
    drafting, remaining, size, rows
):
    subject, features = drafting("version 1"), features_of(11)
    drafter = BlockDiffusion(subject.model, size)
    tree = drafter.draft(subject.state(7, features), remaining).tree
    assert tree.is_chain and len(tree) == rows
    expected = [] if rows == 1 else subject.expected(features, 7, rows).argmax(-1).tolist()
    assert tree.drafted == tuple(expected)


@pytest.mark.parametrize("size", [-1, 0, 1, 9])
def test_a_block_that_the_drafter_was_not_trained_for_is_refused(drafting, size):
    with pytest.raises(DFlashError, match=f"block_size is {size}, .* blocks of 8; choose 2 to 8"):
        BlockDiffusion(drafting("version 1").model, size)


# The context


@pytest.mark.parametrize("name", FIRST)
def test_the_rows_of_a_block_never_reach_the_context(drafting, name):
    subject, features = drafting(name), features_of(30)
    state = subject.state(7, features[:20])
    first = subject.logits(state, 8)
    assert state.context.length == 20
    assert np.array_equal(subject.logits(state, 8), first)
    feed(state.context, mx.array(features[20:]))
    fresh = subject.state(7, features, 20, 10)
    found, expected = subject.logits(state, 5), subject.logits(fresh, 5)
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-4), "sums in another order at most"


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("length", [0, 1, 13, 29, 30])
def test_a_trimmed_context_that_grows_again_equals_a_fresh_one(drafting, name, length):
    subject, features = drafting(name), features_of(30)
    other = np.concatenate([features[:length], features_of(10, seed=1)])
    state = subject.state(7, features, 17, 13)
    assert state.context.refill_from(length) == length
    state.context.trim(length)
    assert state.context.length == length
    feed(state.context, mx.array(other[length:]))
    assert difference(subject.logits(state, 8), subject.expected(other, 7, 8)) < TOLERANCE


def test_a_context_goes_back_no_further_than_its_windows_reach(drafting):
    context = drafting("both sliding").state(7, features_of(300), 250, 50).context
    assert [context.refill_from(length) for length in (299, 0)] == [299, 0]
    assert context.refill_from(100) < 100
    whole = drafting("version 1").state(7, features_of(300), 250, 50).context
    assert whole.refill_from(100) == 100


# The target's features


def layer_outputs(model: Any, tokens: list[int]) -> list[np.ndarray]:
    """The states after every layer of a tiny llama, one layer after the other."""
    hidden, outputs = model.model.embed_tokens(mx.array([tokens])), []
    for layer in model.model.layers:
        hidden = layer(hidden, "causal")
        outputs.append(np.array(hidden[0]))
    return outputs


@pytest.mark.parametrize(("name", "step"), [("version 1", 1), ("version 1", 5), ("mixed", 512)])
def test_a_prefilled_block_reads_the_outputs_of_the_tapped_layers(
    drafting, monkeypatch, name, step
):
    subject, prompt = drafting(name), prompt_of(23, 23)
    told, append = [], FeatureContext.append

    def recorded(context, tokens, features):
        told.extend(tokens.tolist())
        append(context, tokens, features)

    monkeypatch.setattr(FeatureContext, "append", recorded)
    drafter = BlockDiffusion(subject.model)
    state = start(subject.target, drafter, prompt, DecodeConfig(prefill_step=step))
    outputs = layer_outputs(make_model("llama"), prompt)
    features = np.concatenate([outputs[tap] for tap in TAPS], axis=-1)
    assert told == prompt
    assert state.position == state.context.length == 23
    open_with(state, 7)
    assert difference(subject.logits(state, 8), subject.expected(features, 7, 8)) < TOLERANCE
