"""The drafter network drafts what the NumPy reference drafts, however its context grew."""

from __future__ import annotations

from types import SimpleNamespace
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
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.model import Target
from support.decoding import behind, feed, open_with, start
from support.drafter_formats import TAPS, WIDTH, version_1, written
from support.families import VOCAB_SIZE, make_model
from support.reference_dflash import draft_logits, random_drafter
from support.tiny_training import sliding
from support.toys import prompt_of

TOLERANCE = 1e-4
BLOCK = 8


NEWER_ROPE = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}

CONFIGS = {
    "full": version_1(),
    "full and causal": version_1(is_causal=True),
    "sliding": version_1(**sliding("SS", 12)),
    "sliding, shorter than the block": version_1(**sliding("SS", 3)),
    "sliding over one position": version_1(**sliding("SS", 1)),
    "sliding, not causal": version_1(**sliding("SS", 12), is_causal=False),
    "sliding, shorter than the block, not causal": version_1(**sliding("SS", 3), is_causal=False),
    "mixed": version_1(**sliding("SFS", 6)),
    "mixed and causal": version_1(**sliding("FSF", 6), is_causal=True),
    "newer rope": {
        k: v for k, v in version_1(**NEWER_ROPE).items() if k not in ("rope_theta", "rope_scaling")
    },
    "scaled and capped": version_1(
        dflash_config={
            "input_embedding_scale": 3.0,
            "output_multiplier": 0.4,
            "final_logit_softcapping": 2.0,
        }
    ),
    "block size inside": version_1(dflash_config={"block_size": 6}),
}


class Drafting:
    """One drafter of `config`, and the reference with the same weights and target."""

    def __init__(self, folder: Any, config: dict[str, Any], target: Target) -> None:
        self.config, self.target, self.folder = config, target, folder
        self.tensors = random_drafter(config)
        self.model = written(folder, config, self.tensors, target)
        self.drafter = BlockDiffusion(self.model)
        self.embedding = np.array(target.embedding().weight)
        head = target.model if hasattr(target.model, "lm_head") else None
        self.head = self.embedding if head is None else np.array(head.lm_head.weight)

    def state(self, features: np.ndarray, splits: list[int], anchor: int) -> State:
        """A state whose drafter context took the features in at these lengths."""
        return behind(self.drafter, anchor, *np.split(features, np.cumsum(splits))[: len(splits)])

    def logits(self, state: State, rows: int, *prefixes: tuple[int, ...]) -> np.ndarray:
        found = self.model.logits(state.context, state.anchor, rows, prefixes or ((),))
        return np.array(found)

    def reference(self, features: np.ndarray, anchor: int, rows: int) -> np.ndarray:
        weights = self.tensors, self.config, self.embedding, self.head
        return draft_logits(*weights, features, anchor, rows)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    target, made = Target(make_model("llama"), 512, "llama"), {}

    def get(name: str) -> Drafting:
        if name not in made:
            made[name] = Drafting(tmp_path_factory.mktemp("drafter"), CONFIGS[name], target)
        return made[name]

    return get


def random_features(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(length, WIDTH)).astype(np.float32)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


# Several sequences


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("most", [None, 10])  # of tokens that the head has for all of them
def test_blocks_of_several_sequences_are_drafted_at_once_as_each_alone(drafting, name, most):
    subject = drafting(name)
    if most is not None:
        limited = written(subject.folder, subject.config, subject.tensors, subject.target)
        limited.limit_vocabulary(subject.target, np.arange(VOCAB_SIZE), most)
        subject = SimpleNamespace(model=limited, drafter=BlockDiffusion(limited))
    asks = []
    for seed, (length, prefixes) in enumerate([(20, [()]), (3, [(), (4, 5)]), (9, [(8,)])]):
        state = behind(subject.drafter, 7 + seed, random_features(length, seed))
        state.context.append(mx.array([50 + seed]), mx.array(random_features(1, seed + 9)))
        asks.append(Ask(state.context, state.anchor, 6, prefixes))
    together = subject.model.choices(asks, 5)
    for ask, found in zip(asks, together, strict=True):
        (alone,) = subject.model.choices([ask], 5)
        for one, other in zip(found, alone, strict=True):
            for depth in range(7):
                a, b = one((0,) * depth), other((0,) * depth)
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    assert a[0] == b[0]
                    np.testing.assert_allclose(a[1], b[1], atol=TOLERANCE)


# Against the reference


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=20)
@given(
    splits=st.lists(st.integers(1, 16), max_size=8).filter(lambda s: sum(s) <= 40),
    rows=st.integers(2, BLOCK),
    anchor=st.integers(0, VOCAB_SIZE - 1),
    seed=st.integers(0, 2**16),
)
def test_a_block_has_the_logits_of_the_reference(drafting, name, splits, rows, anchor, seed):
    subject, features = drafting(name), random_features(sum(splits), seed)
    state = subject.state(features, splits, anchor)
    expected = subject.reference(features, anchor, rows)
    assert expected.shape == (rows - 1, VOCAB_SIZE)
    assert difference(subject.logits(state, rows), expected) < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_a_block_has_the_logits_of_the_reference_after_windows_have_moved_on(drafting, name):
    subject, features = drafting(name), random_features(530)
    splits = [250, 30, 1, 249]  # cache slots come in steps of 256
    state = subject.state(features, splits, 7)
    assert difference(subject.logits(state, 8), subject.reference(features, 7, 8)) < TOLERANCE


def test_the_embedding_and_the_head_are_those_of_the_target(tmp_path):
    target = Target(make_model("mimo"), 512, "mimo")
    subject = Drafting(tmp_path, CONFIGS["full"], target)
    assert difference(subject.embedding, subject.head) > 0.1
    features = random_features(9)
    logits = subject.logits(subject.state(features, [9], 7), 8)
    assert difference(logits, subject.reference(features, 7, 8)) < TOLERANCE


# Trees


@pytest.mark.parametrize(
    ("remaining", "size", "rows"),
    [(1, None, 1), (2, None, 2), (5, None, 5), (8, None, 8), (100, None, 8)]
    + [(100, 2, 2), (100, 3, 3), (100, 8, 8), (2, 3, 2)],
)
def test_a_chain_has_the_block_s_size_or_that_asked_for_and_fits_the_room(
    drafting, remaining, size, rows
):
    subject, features = drafting("full"), random_features(11)
    state = subject.state(features, [11], 7)
    tree = BlockDiffusion(subject.model, size).draft(state, remaining).tree
    assert tree.is_chain and len(tree) == rows
    expected = [] if rows == 1 else subject.reference(features, 7, rows).argmax(-1).tolist()
    assert tree.drafted == tuple(expected)


@pytest.mark.parametrize("size", [-1, 0, 1, 9])
def test_a_block_that_the_drafter_was_not_trained_for_is_refused(drafting, size):
    subject = drafting("full")
    with pytest.raises(DFlashError, match=f"block_size is {size}, .* blocks of 8; choose 2 to 8"):
        BlockDiffusion(subject.model, size)


# The context


@pytest.mark.parametrize("name", CONFIGS)
def test_the_rows_of_a_block_never_reach_the_context(drafting, name):
    subject, features = drafting(name), random_features(30)
    state = subject.state(features[:20], [20], 7)
    first = subject.logits(state, 8)
    assert state.context.length == 20
    assert np.array_equal(subject.logits(state, 8), first)
    feed(state.context, mx.array(features[20:]))
    fresh = subject.state(features, [20, 10], 7)
    found, expected = subject.logits(state, 5), subject.logits(fresh, 5)
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-4), "sums in another order at most"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("length", [0, 1, 13, 29, 30])
def test_a_trimmed_context_that_grows_again_equals_a_fresh_one(drafting, name, length):
    subject, features = drafting(name), random_features(30)
    other = np.concatenate([features[:length], random_features(10, seed=1)])
    state = subject.state(features, [17, 13], 7)
    assert state.context.refill_from(length) == length
    state.context.trim(length)
    assert state.context.length == length
    feed(state.context, mx.array(other[length:]))
    expected = subject.reference(other, 7, 8)
    assert difference(subject.logits(state, 8), expected) < TOLERANCE


def test_a_context_goes_back_no_further_than_its_windows_reach(drafting):
    subject, features = drafting("sliding"), random_features(300)
    context = subject.state(features, [250, 50], 7).context
    assert [context.refill_from(length) for length in (299, 0)] == [299, 0]
    assert context.refill_from(100) < 100
    assert drafting("full").state(features, [250, 50], 7).context.refill_from(100) == 100


# The target's features


def layer_outputs(model: Any, tokens: list[int]) -> list[np.ndarray]:
    """The states after every layer of a tiny llama, one layer after the other."""
    hidden, outputs = model.model.embed_tokens(mx.array([tokens])), []
    for layer in model.model.layers:
        hidden = layer(hidden, "causal")
        outputs.append(np.array(hidden[0]))
    return outputs


@pytest.mark.parametrize(("name", "step"), [("full", 1), ("full", 5), ("mixed", 512)])
def test_a_prefilled_block_reads_the_outputs_of_the_tapped_layers(
    drafting, monkeypatch, name, step
):
    subject, prompt = drafting(name), prompt_of(23, 23)
    told, append = [], FeatureContext.append

    def recorded(context, tokens, features):
        told.extend(tokens.tolist())
        append(context, tokens, features)

    monkeypatch.setattr(FeatureContext, "append", recorded)
    state = start(subject.target, subject.drafter, prompt, DecodeConfig(prefill_step=step))
    outputs = layer_outputs(make_model("llama"), prompt)
    expected = np.concatenate([outputs[tap] for tap in TAPS], axis=-1)
    assert told == prompt
    assert state.position == state.context.length == 23
    open_with(state, 7)
    block = subject.reference(expected, 7, 8)
    assert difference(subject.logits(state, 8), block) < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_drafted_side_by_side_equal_blocks_drafted_alone(drafting, name):
    subject = drafting(name)
    state = subject.state(random_features(30, 7), [30], anchor=9)
    rows = subject.model.config.block_size
    prefixes = [(), (3,), tuple(prompt_of(1, rows - 2)), (3, 4)]
    together = subject.logits(state, rows, *prefixes)
    alone = [subject.logits(state, rows, prefix) for prefix in prefixes]
    assert [len(part) for part in alone] == [rows - 1 - len(prefix) for prefix in prefixes]
    assert difference(together, np.concatenate(alone)) < TOLERANCE
    seen = difference(subject.logits(state, rows, (4,)), alone[1]) > TOLERANCE
    assert seen == (name != "sliding over one position"), "a mask sees the prefix before it"
