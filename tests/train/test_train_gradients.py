"""What blocks see, the loss of a training step and its gradients, as NumPy works them out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.drafters.networks.files import parameters_of
from dflash_mlx.system import cpu_math
from dflash_mlx.train.blocks import Blocks, cut_blocks
from dflash_mlx.train.data import Texts
from dflash_mlx.train.loss import cross_entropy
from dflash_mlx.train.paired import EagleTrainee, HeadTrainee
from dflash_mlx.train.specdiff import SpecDiffTrainee
from dflash_mlx.train.trainee import Trainee
from dflash_mlx.verifier.model import Target
from support import masked_formats, published_heads, reference_eagle3, reference_mtp
from support.drafting import TOLERANCE, PublishedHeads, difference
from support.families import VOCAB_SIZE, make_model
from support.family_configs import sliding
from support.masked_formats import ours as masked
from support.reference_dflash import hidden_states
from support.tiny_training import (
    drafter_config,
    eagle_of,
    greedy_rows,
    head_of,
    make_trainee,
    masked_of,
    sampled_row,
    seen_by,
    texts_of,
    tiny_target,
    trainer_of,
)

BLOCK = 5
STEP = 1e-4
ANCHORS = np.array([[5, 9, 17], [12, 7, 29]])  # the last block passes the end of its text
NONE, SOME = np.zeros((2, 3), np.int64), np.array([[0, 3, 1], [2, 0, 1]])  # visible drafts
SCALED = {"input_embedding_scale": 2.0, "output_multiplier": 0.6, "final_logit_softcapping": 3.0}
LAYERS = {
    "full": drafter_config(),
    "mixed, scaled and capped": drafter_config(**sliding("SF", 4), dflash_config=SCALED),
    "causal": drafter_config(is_causal=True),
    "sliding": drafter_config(**sliding("SS", 12)),
    "shorter than the block": drafter_config(**sliding("SS", 3)),
    "shorter, not causal": drafter_config(**sliding("SS", 3), is_causal=False),
    "sliding over one position": drafter_config(**sliding("SS", 1)),
    "mixed": drafter_config(**sliding("SFS", 6), num_key_value_heads=1),
    "a key for every head": drafter_config(num_key_value_heads=4, rope_theta=500.0),
}
EAGLES: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle, sliding": sliding("S", 4),
    "eagle 3.1": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
}
HEADS: dict[str, dict[str, Any]] = {
    "head": {"hidden_normed": False, "feeds_normed": False},
    "head, normed and hidden first": {"hidden_first": True},
    "head of qwen3_5": {"text": reference_mtp.QWEN},
}
MASKED = {
    "masked": masked(),
    "masked, head norms and biases": masked(head_norms=True, attention_bias=True),
    "masked, sliding": masked(**masked_formats.SLIDING),
    "masked, all sliding": masked(**sliding("SS", 5)),
    "masked, shorter than the block": masked(**sliding("SS", 2)),
    "masked, one key": masked(num_key_value_heads=1, final_logit_softcapping=3.0),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # of which drafter, and with what settings
    "decay, labels all soft": ("full", {"loss": "decay", "soft": 1.0}),
    "decay, variable prefix": ("full", {"mode": "variable-prefix", "loss": "decay", "tau": 0.7}),
    "dpace, variable prefix": ("full", {"mode": "variable-prefix"}),
    "dpace, hard labels": ("full", {"soft": 0.0, "alpha": 0.2}),
    "a small draft vocabulary": ("full", {"draft_vocabulary": 20, "soft": 0.7}),
    "capped": ("mixed, scaled and capped", {"mode": "variable-prefix"}),
    **{
        name: (name, {"loss": "decay"})
        for name in ("eagle", "eagle 3.1", *HEADS, "masked, sliding")
    },
    "biased": ("masked, head norms and biases", {}),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    greedy, other = greedy_rows(2, 26)
    return texts_of(tmp_path_factory.mktemp("features"), [greedy, sampled_row("b", other)])


def trainee_of(kind: str) -> Trainee:
    if kind in EAGLES:
        return eagle_of(**EAGLES[kind])
    if kind in HEADS:
        return head_of(**HEADS[kind])
    return masked_of(MASKED[kind]) if kind in MASKED else make_trainee(LAYERS[kind])


def blocks_of(
    texts: Texts, trainee: Trainee, prefixes: Any = NONE, size: int = BLOCK, anchors: Any = ANCHORS
) -> Blocks:
    """Those of a masked drafter show some of their tokens, in all places."""
    blocks = cut_blocks(texts.texts, np.array([0, 1]), anchors, size, prefixes)
    if not isinstance(trainee, SpecDiffTrainee):
        return blocks
    shown = np.random.default_rng(0).random(blocks.tokens.shape) < 0.3
    return replace(blocks, revealed=shown, supervised=blocks.supervised & ~shown)


class Loss:
    """The loss of some blocks in float64, as a function of the drafter's weights."""

    def __init__(self, trainee: Trainee, texts: Texts, blocks: Blocks, **settings: Any) -> None:
        self.raw, self.trainee, self.texts, self.blocks = trainee.raw, trainee, texts, blocks
        self.settings = {"loss": "dpace", "soft": 0.5, **settings}
        weights = parameters_of(trainee.network).items()
        self.tensors = {name: np.array(array, np.float64) for name, array in weights}
        self.table = np.array(tiny_target().embedding().weight, np.float64)
        counts = Counter(int(t) for s in texts.texts for t in s.tokens[s.prompt_length :])
        by_frequency = sorted(range(VOCAB_SIZE), key=lambda token: (-counts[token], token))
        self.words = by_frequency[: settings.get("draft_vocabulary", VOCAB_SIZE)]
        self.trained = blocks.supervised & np.isin(blocks.labels, self.words)
        self.weights = self._weights(np.exp(-self.losses(soft=0.0)))

    def logits(self, s: int, a: int) -> np.ndarray:
        """[B - 1, V] of a block that is drafted alone, behind its anchor."""
        anchor, tables = int(self.blocks.anchors[s, a]), (self.table, self.table)
        before, tokens = self.texts.texts[s].tokens[:anchor], self.blocks.tokens[s, a]
        given, dflash = (self.tensors, self.raw), self.raw.get("dflash_config", {})
        if isinstance(self.trainee, SpecDiffTrainee):
            shown = self.blocks.inputs(masked_formats.MASK)[s, a]
            return masked_formats.logits(*given[::-1], tables, before, shown)
        features = np.array(self.texts.features([s], np.zeros(1, int), anchor)[0], np.float64)
        if isinstance(self.trainee, EagleTrainee):
            known = *given, tables, before, features
            steps = range(1, len(tokens))
            return np.stack([reference_eagle3.logits(*known, tokens[:n]) for n in steps])
        if isinstance(self.trainee, HeadTrainee):
            norm = np.array(tiny_target().model.model.norm.weight)
            known = *given, (*tables, norm), before, features
            steps = range(1, len(tokens))
            return np.stack([reference_mtp.logits(*known, tokens[:n]) for n in steps])
        x = self.table[self.blocks.inputs(dflash["mask_token_id"])[s, a]]
        hidden = hidden_states(*given, x * dflash.get("input_embedding_scale", 1.0), features)
        logits = hidden[1:] @ self.table.T * dflash.get("output_multiplier", 1.0)
        cap = dflash.get("final_logit_softcapping")
        return np.tanh(logits / cap) * cap if cap else logits

    def losses(self, soft: float | None = None) -> np.ndarray:
        """- sum of p(word) * log q(word) where it is trained, 0 elsewhere; [S, A, B]."""
        result = np.zeros(self.trained.shape)
        for s, a in np.ndindex(self.blocks.anchors.shape):
            logits = self.logits(s, a)[:, self.words]
            for k in np.flatnonzero(self.trained[s, a]):
                for word, share in self.shares((s, a, k), soft).items():
                    row = logits[k - 1]
                    log_q = row[self.words.index(word)] - np.log(np.exp(row).sum())
                    result[s, a, k] -= share * log_q
        return result

    def shares(self, at: tuple[int, int, int], soft: float | None) -> dict[int, float]:
        """What the drafter should give the words at a position: all of them, 1."""
        soft = self.settings["soft"] if soft is None else soft
        likely, p = self.blocks.likely[at].tolist(), self.blocks.shares[at].tolist()
        kept = {word: share for word, share in zip(likely, p, strict=True) if word in self.words}
        result = {word: soft * share / sum(kept.values()) for word, share in kept.items()}
        result[likely[0]] += 1 - soft
        return result

    def __call__(self) -> float:
        """The weighted mean; the weights stay those of the weights given first."""
        return float((self.weights * self.losses()).sum() / self.weights.sum())

    def slope(self, name: str, at: tuple[int, ...]) -> float:
        """D loss / d weight by a central difference."""
        tensor, values = self.tensors[name], []
        before = tensor[at]
        for step in (STEP, -STEP):
            tensor[at] = before + step
            values.append(self())
        tensor[at] = before
        return (values[0] - values[1]) / (2 * STEP)

    def _weights(self, confidences: np.ndarray) -> np.ndarray:
        result = np.zeros(confidences.shape)
        for s, a in np.ndindex(self.blocks.anchors.shape):
            trained, first = self.trained[s, a], self.blocks.prefixes[s, a] + 1
            if self.settings["loss"] == "decay":
                tau = self.settings.get("tau", 4.0)
                result[s, a] = np.exp(-(np.arange(trained.size) - first) / tau) * trained
                continue
            alpha, known = self.settings.get("alpha", 0.5), np.flatnonzero(trained)
            for j in known:  # the sum over m >= j of the product over i <= m
                for m in known[known >= j]:
                    factors = (1 - alpha) * confidences[s, a, known[known <= m]] + alpha
                    result[s, a, j] += factors.prod()
        return result


def gradients(
    trainee: Trainee, texts: Texts, blocks: Blocks, **settings: Any
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of a training step, and its gradient for every tensor."""
    trainer = trainer_of(trainee, texts, **{"soft": 0.5, **settings})
    loss, found = trainer._gradients(trainer.batch(blocks))
    return float(loss), {name: np.array(array) for name, array in tree_flatten(found)}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_slopes_of_the_loss(texts, case, monkeypatch):
    kind, settings = CASES[case]
    trainee = trainee_of(kind)
    texts = seen_by(trainee, texts)
    blocks = blocks_of(texts, trainee, SOME if "mode" in settings else NONE)
    value, found = gradients(trainee, texts, blocks, **settings)
    loss = Loss(trainee, texts, blocks, **settings)
    assert abs(value - loss()) < 1e-5
    assert found.keys() == loss.tensors.keys()
    rng = np.random.default_rng(0)
    for name, gradient in found.items():
        largest = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        assert abs(gradient[largest]) > 1e-5
        for at in (largest, tuple(rng.integers(gradient.shape))):
            error = abs(loss.slope(name, at) - gradient[at])
            assert error < 1e-3 * abs(gradient[largest]), (name, at)
    monkeypatch.setattr(cpu_math, "applies", lambda: False)  # MLX's own functions
    other_value, other = gradients(trainee, texts, blocks, **settings)
    assert abs(value - other_value) < 1e-5
    for name, gradient in found.items():
        assert np.abs(gradient - other[name]).max() < 1e-4 * np.abs(gradient).max(), name


@pytest.mark.parametrize("kind", [*LAYERS, *EAGLES, *HEADS, *MASKED])
def test_blocks_in_one_pass_have_the_logits_that_each_has_alone(texts, kind):
    trainee = trainee_of(kind)
    texts = seen_by(trainee, texts)
    size, prefixes = (8, SOME) if kind in LAYERS else (6, NONE)
    blocks = blocks_of(texts, trainee, prefixes, size)
    states = trainee.states(*trainee.inputs(texts, blocks))
    found, loss = np.array(trainee.logits(states)), Loss(trainee, texts, blocks)
    for s, a in np.ndindex(ANCHORS.shape):
        assert np.abs(found[s, a, 1:] - loss.logits(s, a)).max() < 1e-4


@pytest.mark.parametrize("loss", ["decay", "dpace"])
@pytest.mark.parametrize("anchors", [ANCHORS, NONE], ids=["", "no context"])
def test_a_shorter_block_has_the_loss_of_its_own_positions(texts, loss, anchors):
    trainee = make_trainee()
    blocks = blocks_of(texts, trainee, size=3, anchors=anchors)
    value, _ = gradients(trainee, texts, blocks, loss=loss)
    assert abs(value - Loss(trainee, texts, blocks, loss=loss)()) < 1e-5


def test_blocks_that_have_nothing_to_learn_change_nothing(texts):
    last = np.array([[len(text.tokens) - 2] * 3 for text in texts.texts])
    trainee = make_trainee()
    blocks = blocks_of(texts, trainee, np.full(last.shape, 2), anchors=last)
    value, found = gradients(trainee, texts, blocks)
    assert not blocks.supervised.any()
    assert value == 0.0
    assert not any(gradient.any() for gradient in found.values())


@pytest.mark.parametrize("on_cpu", sorted({cpu_math.applies(), False}))
@pytest.mark.parametrize("share", [1.0, 0.0])
def test_a_hopeless_word_has_a_large_finite_loss_or_none_without_a_share(
    monkeypatch, share, on_cpu
):
    monkeypatch.setattr(cpu_math, "applies", lambda: on_cpu)
    head = mx.array(np.random.default_rng(0).normal(size=(23, 16)), mx.float32)
    sure = mx.array([[1000.0] + [0.0] * 15])
    logits = sure @ head.T
    best, hopeless = mx.argmax(logits, axis=-1), mx.argmin(logits, axis=-1)
    given = mx.stack([best, hopeless], axis=-1), mx.array([[1.0 - share, share]])
    loss, gradient = mx.value_and_grad(lambda h: cross_entropy(h @ head.T, *given)[0].sum())(sure)
    assert (60.0 < loss.item() < float("inf")) if share else abs(loss.item()) < 1e-4
    assert mx.abs(gradient - share * (head[best] - head[hopeless])).max().item() < 1e-4


def test_a_head_of_two_blocks_says_in_training_what_it_says_in_drafts(tmp_path):
    """Of Nemotron-H: attention, and experts behind it."""
    raw, tensors = published_heads.FORMATS["nemotron"]
    target = Target(make_model("llama", **raw), 1000, "tiny")
    subject = PublishedHeads(tmp_path, raw, tensors, target)
    trainee = HeadTrainee.read(subject.folder, target)
    tokens, features = text = subject.text(9)
    path, behind = [7, 3, 50], np.array([*tokens[1:], 7])
    h, x = mx.array(features)[None], trainee.embed(np.array(path))[None, None]
    states = trainee.states(h, trainee.embed(behind)[None], mx.array([[9]]), x)
    draft = subject.model.begin(subject.state(7, text))
    expected = np.stack([draft.logits(mx.array([t]), [i - 1])[0] for i, t in enumerate(path)])
    assert difference(np.array(trainee.logits(states))[0, 0, 1:], expected) < TOLERANCE
