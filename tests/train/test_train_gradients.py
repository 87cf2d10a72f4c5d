"""The loss of a training step and its gradients are as worked out in NumPy float64."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.system import cpu_math
from dflash_mlx.train.blocks import Blocks, cut_blocks
from dflash_mlx.train.data import Texts
from dflash_mlx.train.loss import cross_entropy
from support.families import VOCAB_SIZE
from support.family_configs import sliding
from support.reference_dflash import hidden_states, random_drafter
from support.tiny_training import (
    drafter_config,
    greedy_rows,
    make_trainer,
    sampled_row,
    texts_of,
    tiny_target,
)

BLOCK = 5
ENTRIES = 1  # drawn in every tensor, beside the one with the largest gradient
STEP = 1e-4
ANCHORS = np.array([[5, 9, 17], [12, 7, 29]])  # the last block passes the end of its text
PREFIXES = {
    "dflash": np.zeros((2, 3), np.int64),
    "variable-prefix": np.array([[0, 3, 1], [2, 0, 1]]),
}

SOFT = 0.5  # where a case does not say
CASES = {
    "decay, labels all soft": {"loss": "decay", "soft": 1.0},
    "decay, variable prefix": {"loss": "decay", "mode": "variable-prefix", "tau": 0.7},
    "dpace, variable prefix": {"loss": "dpace", "mode": "variable-prefix"},
    "dpace, hard labels": {"loss": "dpace", "soft": 0.0, "alpha": 0.2},
    "a small draft vocabulary": {"loss": "dpace", "draft_vocabulary": 20, "soft": 0.7},
}
CONFIGS = {
    "full": drafter_config(block_size=BLOCK),
    "mixed, scaled and capped": drafter_config(
        block_size=BLOCK,
        **sliding("SF", 4),
        dflash_config={
            "input_embedding_scale": 2.0,
            "output_multiplier": 0.6,
            "final_logit_softcapping": 3.0,
        },
    ),
}
LAYERS = {
    "causal": drafter_config(is_causal=True),
    "sliding": drafter_config(**sliding("SS", 12)),
    "shorter than the block": drafter_config(**sliding("SS", 3)),
    "shorter, not causal": drafter_config(**sliding("SS", 3), is_causal=False),
    "sliding over one position": drafter_config(**sliding("SS", 1)),
    "mixed": drafter_config(**sliding("SFS", 6), num_key_value_heads=1),
    "a key for every head": drafter_config(num_key_value_heads=4, rope_theta=500.0),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    greedy, other = greedy_rows(2, 26)
    return texts_of(tmp_path_factory.mktemp("features"), [greedy, sampled_row("b", other)])


class Loss:
    """The loss of some blocks in float64, as a function of the drafter's weights."""

    def __init__(self, raw: dict[str, Any], texts: Texts, blocks: Blocks, **settings: Any) -> None:
        self.raw, self.texts, self.blocks, self.settings = raw, texts, blocks, settings
        self.tensors = {k: v.astype(np.float64) for k, v in random_drafter(raw).items()}
        self.embedding = np.array(tiny_target().embedding().weight, np.float64)
        answers = [int(t) for s in texts.texts for t in s.tokens[s.prompt_length :]]
        counts = Counter(answers)
        by_frequency = sorted(range(VOCAB_SIZE), key=lambda token: (-counts[token], token))
        self.words = by_frequency[: settings.get("draft_vocabulary", VOCAB_SIZE)]
        self.trained = blocks.supervised & np.isin(blocks.labels, self.words)
        self.weights = self._weights(np.exp(-self.losses(soft=0.0)))

    def losses(self, soft: float | None = None) -> np.ndarray:
        """- sum of p(word) * log q(word) where it is trained, 0 elsewhere; [S, A, B]."""
        dflash, result = self.raw["dflash_config"], np.zeros(self.trained.shape)
        inputs = self.blocks.inputs(dflash["mask_token_id"])
        for s, a in np.ndindex(self.blocks.anchors.shape):
            anchor = int(self.blocks.anchors[s, a])
            features = np.array(self.texts.features([s], np.zeros(1, int), anchor)[0], np.float64)
            x = self.embedding[inputs[s, a]] * dflash.get("input_embedding_scale", 1.0)
            hidden = hidden_states(self.tensors, self.raw, x, features)
            logits = hidden @ self.embedding[self.words].T * dflash.get("output_multiplier", 1.0)
            if cap := dflash.get("final_logit_softcapping"):
                logits = np.tanh(logits / cap) * cap
            for k in np.flatnonzero(self.trained[s, a]):
                for word, share in self.shares((s, a, k), soft).items():
                    log_q = logits[k, self.words.index(word)] - np.log(np.exp(logits[k]).sum())
                    result[s, a, k] -= share * log_q
        return result

    def shares(self, at: tuple[int, int, int], soft: float | None) -> dict[int, float]:
        """What the drafter should give the words at a position: all of them, 1."""
        soft = self.settings.get("soft", SOFT) if soft is None else soft
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


def blocks_of(texts: Texts, mode: str = "dflash", size: int = BLOCK) -> Blocks:
    return cut_blocks(texts.texts, np.array([0, 1]), ANCHORS, size, PREFIXES[mode])


def gradients(
    texts: Texts, raw: dict[str, Any], blocks: Blocks, **settings: Any
) -> tuple[float, Any]:
    """The loss of a training step, and its gradient for every tensor."""
    trainer = make_trainer(texts, raw, **{"soft": SOFT, **settings})
    loss, found = trainer._gradients(trainer.batch(blocks))
    return float(loss), {name: np.array(array) for name, array in tree_flatten(found)}


@pytest.mark.parametrize(
    ("case", "config"),
    [*((case, "full") for case in CASES), ("dpace, variable prefix", "mixed, scaled and capped")],
)
def test_gradients_are_the_slopes_of_the_loss(texts, config, case):
    settings = CASES[case]
    blocks = blocks_of(texts, settings.get("mode", "dflash"))
    value, found = gradients(texts, CONFIGS[config], blocks, **settings)
    loss = Loss(CONFIGS[config], texts, blocks, **settings)
    assert abs(value - loss()) < 1e-5
    assert found.keys() == loss.tensors.keys()
    rng = np.random.default_rng(0)
    for name, gradient in found.items():
        largest = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        places = [tuple(rng.integers(gradient.shape)) for _ in range(ENTRIES)]
        assert abs(gradient[largest]) > 1e-5
        for at in [largest, *places]:
            error = abs(loss.slope(name, at) - gradient[at])
            assert error < 1e-3 * abs(gradient[largest]), (name, at)


@pytest.mark.parametrize("case", CASES)
def test_mlx_own_functions_give_the_same_gradients(texts, case, monkeypatch):
    given = CONFIGS["full"], blocks_of(texts, CASES[case].get("mode", "dflash"))
    value, found = gradients(texts, *given, **CASES[case])
    monkeypatch.setattr(cpu_math, "applies", lambda: False)
    other_value, other = gradients(texts, *given, **CASES[case])
    assert abs(value - other_value) < 1e-5
    for name, gradient in found.items():
        assert np.abs(gradient - other[name]).max() < 1e-4 * np.abs(gradient).max(), name


@pytest.mark.parametrize("loss", ["decay", "dpace"])
@pytest.mark.parametrize("anchors", [ANCHORS, np.zeros((2, 3), np.int64)], ids=["", "no context"])
def test_a_shorter_block_has_the_loss_of_its_own_positions(texts, loss, anchors):
    blocks = cut_blocks(texts.texts, np.array([0, 1]), anchors, 3, PREFIXES["dflash"])
    value, _ = gradients(texts, CONFIGS["full"], blocks, loss=loss)
    assert abs(value - Loss(CONFIGS["full"], texts, blocks, loss=loss)()) < 1e-5


@pytest.mark.parametrize("kind", LAYERS)
def test_blocks_in_one_pass_see_what_each_sees_alone(texts, kind):
    raw = LAYERS[kind]
    blocks = blocks_of(texts, "variable-prefix", size=8)
    value, _ = gradients(texts, raw, blocks, loss="decay")
    assert abs(value - Loss(raw, texts, blocks, loss="decay")()) < 1e-5


def test_blocks_that_have_nothing_to_learn_change_nothing(texts):
    last = np.array([[len(text.tokens) - 2] * 3 for text in texts.texts])
    behind = np.full(last.shape, 2)
    blocks = cut_blocks(texts.texts, np.array([0, 1]), last, BLOCK, behind)
    value, found = gradients(texts, CONFIGS["full"], blocks)
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
    given = (head, mx.stack([best, hopeless], axis=-1), mx.array([[1.0 - share, share]]))
    loss, gradient = mx.value_and_grad(lambda h: cross_entropy(h, *given)[0].sum())(sure)
    assert (60.0 < loss.item() < float("inf")) if share else abs(loss.item()) < 1e-4
    assert mx.abs(gradient - share * (head[best] - head[hopeless])).max().item() < 1e-4
