"""The networks of all families draft what NumPy says, however their contexts grew.

What is of one family alone stands at the end, or in test_eagle3.py.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.autoregressive import Chain, GrownTree
from dflash_mlx.drafters.block_diffusion import BlockDiffusion, SelectedPath
from dflash_mlx.drafters.dflash.block_model import Ask, FeatureContext
from dflash_mlx.drafters.networks.model import MOST_WAITING
from dflash_mlx.drafters.networks.tokens import CHUNK
from dflash_mlx.drafters.specdiff.drafter import Denoising, SpecDiff, likeliest
from dflash_mlx.verifier.model import Target
from support import drafter_formats, masked_formats, reference_eagle3, reference_mtp
from support.decoding import behind, open_with, start
from support.drafter_formats import HALVES, TAPS, WINDOWS, version_1
from support.drafting import CASES, TOLERANCE, cut, difference, grow, joined
from support.families import VOCAB_SIZE, make_model
from support.toys import prompt_of

FIRST = ["version 1", *WINDOWS]
CONVOLVED = ["version 2", "version 2, three taps", "version 2, sliding"]
EAGLES = ["eagle3, raw", "eagle3, 3.1, norms per layer", "eagle3, speculators, sliding"]
EAGLES += ["eagle3, parallel, raw", "eagle3, parallel, speculators, sliding"]
MASKED = ["specdiff, ours", "specdiff, ours, sliding", "specdiff, fast-dllm"]
HEADS = [
    "mtp, ours",
    "mtp, ours, all variants",
    "mtp, qwen3_5_moe",
    "mtp of deepseek",
    "mtp of nemotron",
]
ONE_OF_EACH = ["version 1", "eagle3, ours", "mtp, ours", "specdiff, ours"]


@pytest.fixture
def made(tmp_path):
    """made(name, target, case, settings): a drafter of its own."""

    def get(name: str, target: Target | None = None, case: Any = None, **settings: Any) -> Any:
        kind, usual = CASES[name]
        return kind(tmp_path, *(case or usual), target, **settings)

    return get


# Against the reference


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=20)
@given(
    splits=st.lists(st.integers(1, 16), max_size=8).filter(lambda s: sum(s) <= 40),
    rows=st.integers(2, 6),
    anchor=st.integers(0, VOCAB_SIZE - 1),
    prefix=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=1).map(tuple),
    seed=st.integers(0, 2**16),
)
def test_a_draft_has_the_logits_of_the_reference(
    drafting, name, splits, rows, anchor, prefix, seed
):
    assume(splits or not name.startswith(("eagle3", "mtp")))  # which drafts behind a token
    subject = drafting(name)
    text, shown = subject.text(sum(splits), seed), prefix[: rows - 2]
    assert subject.error(subject.context(text, *splits), text, anchor, rows, shown) < TOLERANCE


LONG = {
    "windows have moved on": (250, 30, 1, 249),  # cache slots come in steps of 256
    "a draft needs the first of the next slots": (200, 56),
    "a prompt in chunks": (CHUNK + MOST_WAITING + 20,),
    "some of it has waited": (5, MOST_WAITING + 6, 1, 4),
    "all of it waits": (MOST_WAITING,),
}


@pytest.mark.parametrize("name", [*FIRST, *EAGLES, *HEADS, *MASKED, "specdiff, dream"])
@pytest.mark.parametrize("splits", LONG.values(), ids=LONG)
def test_a_draft_behind_a_long_text_has_the_logits_of_the_reference(drafting, name, splits):
    subject = drafting(name)
    text = subject.text(sum(splits), 1)
    context = subject.context(text, *splits)
    for _ in range(2):  # at the second draft nothing waits
        assert subject.error(context, text, 7, 4) < TOLERANCE
        assert context.length == sum(splits)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_embedding_and_the_head_are_those_of_the_target(made, name):
    subject = made(name, Target(make_model("mimo"), 512, "mimo"))
    text = subject.text(9)
    assert difference(*subject.tables) > 0.1
    assert subject.error(subject.context(text), text, 7, 6) < TOLERANCE


@pytest.mark.parametrize("name", [*ONE_OF_EACH, "specdiff, ours, own tables"])
def test_logits_are_of_the_head_s_precision_where_the_network_computes_in_another(made, name):
    target = Target(make_model("llama"), 512, "llama")
    target.model.set_dtype(mx.float16)
    subject = made(name, target)
    subject.model.module.set_dtype(mx.float32)  # as of one that overflows in float16
    context = subject.context(subject.text(1))
    own = name.endswith("own tables")
    assert subject.model.try_out(context).dtype == (mx.float32 if own else mx.float16)


WIDE = {  # heads that can be packed
    "version 1": drafter_formats.case(version_1(head_dim=32)),
    "eagle3, ours": reference_eagle3.case(reference_eagle3.ours(head_dim=32)),
    "mtp, ours": reference_mtp.case(reference_mtp.ours({**reference_mtp.LLAMA, "head_dim": 32})),
    "specdiff, ours": masked_formats.case(masked_formats.ours(head_dim=32)),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize(("bits", "least", "most"), [(4, 1e-3, 0.5), (8, 1e-4, 0.05)])
def test_keys_and_values_are_quantised_as_the_targets_are(made, name, bits, least, most):
    """Rounded a little, and in passes of any width nearly alike."""
    target = Target(make_model("llama"), 512, "llama")
    target.kv_bits = bits
    subject = made(name, target, WIDE[name])
    text = subject.text(258)
    right = subject.expected(text, 7, 6)
    whole, parts = (
        subject.found(subject.context(text, *sizes), 7, 6) for sizes in ((), (20, 21, 217))
    )
    assert least < np.abs(whole - right).mean() < most
    assert np.abs(whole - parts).max() < (0.2 if bits == 4 else 0.02)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_head_of_the_target_s_can_be_limited_to_likely_tokens_and_those_of_the_text(made, name):
    subject = made(name)
    text, likely = subject.text(9), np.roll(np.arange(VOCAB_SIZE), 30)
    subject.model.limit_vocabulary(subject.target, likely, 20)
    found = subject.found(subject.context(text), 7, 5)
    known = np.isfinite(found)
    needed = {*likely[:20].tolist(), *text[0]}
    spare = {*likely[: 20 + len(needed) + 32].tolist(), *text[0]}
    assert all(needed <= {*np.flatnonzero(row)} <= spare for row in known)
    assert np.abs((found - subject.expected(text, 7, 5))[known]).max() < TOLERANCE
    assert not known.all()


# The context


@pytest.mark.parametrize("name", [*FIRST, *EAGLES, *HEADS, *MASKED])
@pytest.mark.parametrize(
    ("length", "drafts"),
    [(0, True), (1, False), (13, True), (16, False), (17, True), (18, False), (29, True), (30, 0)],
)
def test_a_trimmed_context_that_grows_again_equals_a_fresh_one(drafting, name, length, drafts):
    subject = drafting(name)
    text, more = subject.text(30), subject.text(10, seed=1)
    context = subject.context(text, 17, 1, 1, 11)
    if drafts:
        subject.found(context, 7, 6)
    assert context.refill_from(length) == length
    context.trim(length)
    assert context.length == length
    grow(context, more, 3, 7)
    assert subject.error(context, joined(cut(text, 0, length), more), 7, 6) < TOLERANCE


@pytest.mark.parametrize("name", [*FIRST, *EAGLES, *HEADS, *MASKED])
def test_drafts_leave_the_context_as_it_is(drafting, name):
    subject = drafting(name)
    text = subject.text(30)
    context = subject.context(cut(text, 0, 20))
    first = subject.found(context, 7, 6)
    assert context.length == 20
    assert difference(subject.found(context, 7, 6), first) < TOLERANCE
    grow(context, cut(text, 20, 30), 4, 6)
    assert subject.error(context, text, 7, 5) < TOLERANCE


@pytest.mark.parametrize("name", [*ONE_OF_EACH, "eagle3, raw", "eagle3, parallel, raw"])
def test_a_draft_window_is_a_window_of_every_layer(drafting, made, name):
    subject, window = made(name, draft_window=8), ["sliding_attention"]
    windows = window * subject.raw.get("num_hidden_layers", 1)
    subject.raw = {**subject.raw, "layer_types": windows, "sliding_window": 8, "is_causal": False}
    text = subject.text(600)
    context = subject.context(text, 300, 300)
    assert subject.error(context, text, 7, 4) < TOLERANCE
    whole = drafting(name)
    assert whole.error(whole.context(text), text, 7, 4) < TOLERANCE
    assert difference(whole.expected(text, 7, 4), subject.expected(text, 7, 4)) > 10 * TOLERANCE
    assert context.refill_from(599) == 599
    back = context.refill_from(100)
    assert back == 100 if name.startswith("specdiff") else back < 100, "no further than it reaches"
    context.trim(back)
    grow(context, cut(text, back, 100))
    assert subject.error(context, cut(text, 0, 100), 7, 4) < TOLERANCE


@pytest.mark.parametrize(("name", "reaches"), [("both sliding", False), ("version 1", True)])
def test_a_context_goes_back_no_further_than_its_windows_reach(drafting, name, reaches):
    context = drafting(name).context(drafting(name).text(300), 250, 50)
    assert [context.refill_from(length) for length in (299, 0)] == [299, 0]
    assert (context.refill_from(100) == 100) == reaches


# Sizes


def denoising(model, size=None):
    return SpecDiff(model, size, Denoising(), lambda r, at: likeliest(r, at, 200), 3)


DRAFTERS = [
    ("version 1", BlockDiffusion),
    ("version 2", SelectedPath),
    ("eagle3, raw", Chain),
    ("eagle3, raw", lambda *of: GrownTree(*of, 2, 200)),
    ("eagle3, parallel, raw", Chain),
    ("eagle3, parallel, raw", lambda *of: GrownTree(*of, 2, 200)),
    ("domino", SelectedPath),
    ("mtp, ours", Chain),
    ("specdiff, ours", denoising),
]


@pytest.mark.parametrize(("name", "make"), DRAFTERS)
@pytest.mark.parametrize(
    ("remaining", "size", "rows"), [(1, None, 1), (2, None, 2), (5, 3, 3), (3, 5, 3), (99, None, 0)]
)
def test_no_path_is_longer_than_the_block_or_the_room(drafting, name, make, remaining, size, rows):
    model = drafting(name).model
    tree = make(model, size).draft(drafting(name).behind(0, 7), remaining).tree
    assert max(tree.depths) == (rows or model.block_size) - 1


@pytest.mark.parametrize(("name", "make"), DRAFTERS)
def test_a_block_that_the_drafter_was_not_trained_for_is_refused(drafting, name, make):
    model = drafting(name).model
    most = model.block_size
    for size in (-1, 0, 1, most + 1):
        said = f"block_size is {size}, .* blocks of {most}; choose 2 to {most}"
        with pytest.raises(DFlashError, match=said):
            make(model, size)


@pytest.mark.parametrize("name", ["version 1", "full and causal", HALVES])
def test_a_chain_has_the_likeliest_tokens(drafting, name):
    subject = drafting(name)
    tree = BlockDiffusion(subject.model).draft(subject.behind(3, 7), 100).tree
    expected = subject.expected(subject.text(9, 3), 7, subject.model.block_size).argmax(-1)
    assert tree.is_chain and list(tree.drafted) == expected.tolist()


# DFlash: several blocks in one pass


@pytest.mark.parametrize("name", [*FIRST, *CONVOLVED])
def test_blocks_drafted_side_by_side_have_the_logits_of_the_reference(drafting, name):
    subject, anchor = drafting(name), mx.array([9])
    text, rows = subject.text(30, 7), subject.model.config.block_size
    context = subject.context(text)
    prefixes = [(), (3,), tuple(prompt_of(1, rows - 2)), (3, 4)]
    together = np.array(subject.model.logits(context, anchor, rows, prefixes))
    alone = [subject.expected(text, 9, rows, prefix) for prefix in prefixes]
    assert [len(part) for part in alone] == [rows - 1 - len(prefix) for prefix in prefixes]
    assert difference(together, np.concatenate(alone)) < TOLERANCE
    seen = difference(subject.found(context, 9, rows, (4,)), alone[1]) > TOLERANCE
    assert seen == (name != "over one position"), "a mask sees the prefix before it"


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("most", [None, 10])  # of tokens that the head has for all of them
def test_blocks_of_several_sequences_are_drafted_at_once_as_each_alone(drafting, made, name, most):
    subject = made(name) if most else drafting(name)
    model = subject.model
    if most is not None:
        model.limit_vocabulary(subject.target, np.arange(VOCAB_SIZE), most)
    asks = []
    for seed, (length, prefixes) in enumerate([(20, [()]), (3, [(), (4, 5)]), (9, [(8,)])]):
        state = behind(model, 7 + seed, subject.text(length, seed)[1])
        state.context.append(mx.array([50 + seed]), mx.array(subject.text(1, seed + 9)[1]))
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
    assert subject.error(state.context, (prompt, features), 7, 8) < TOLERANCE


# SpecDiff: text that waits, and windows that have passed on


@pytest.mark.parametrize(
    ("name", "settings", "read"),
    [("ours", {"draft_window": 6}, 2 * 5), ("ours, sliding", {}, 200)],
    ids=["all windows", "one window"],
)
def test_a_window_that_has_passed_on_is_read_again_and_the_target_computes_nothing(
    drafting, monkeypatch, name, settings, read
):
    """As far back as it matters: five tokens for each of two windows, or all; time and again."""
    subject = drafting(f"specdiff, {name}", **settings)
    text = subject.text(900, 6)
    context = subject.context(text, *[100] * 9)
    model, rows, embed = subject.model, [], subject.model.embed
    monkeypatch.setattr(model, "embed", lambda tokens: rows.append(tokens.size) or embed(tokens))
    for length in (200, 50):  # the second time behind what was read again
        subject.found(context, 9, 4)
        rows.clear()
        assert context.refill_from(length) == length
        context.trim(length)
        assert context.length == length
        found = subject.found(context, 9, 4)
        assert sum(rows) - 4 == min(read, length)
        fresh = subject.found(subject.context(cut(text, 0, length)), 9, 4)
        assert difference(found, fresh) < TOLERANCE
        grow(context, cut(text, length, length + 300))


def test_a_block_sees_all_of_itself_and_text_that_came_with_another_saw_nothing_of_it(drafting):
    subject = drafting("specdiff, ours")
    text = subject.text(20, 8)
    context, before = subject.context(text), subject.expected(text, 7, 6)
    subject.found(context, 50, 6, (50,) * 5)  # in one pass with the text
    assert difference(subject.found(context, 7, 6), before) < TOLERANCE
    masks = (subject.model.mask,) * 4
    later = subject.found(context, 7, 6, (*masks, 40))
    assert np.abs(later[0] - before[0]).max() > 10 * TOLERANCE
