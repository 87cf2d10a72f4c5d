"""Cross-entropy and the weights of positions are what their definitions say."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.system import cpu_math
from dflash_mlx.train.loss import cross_entropy, decay_weights, dpace_weights, soft_shares
from support.dpace import dpace_by_loops

ROWS, WIDTH, WORDS = 9, 16, 23
PADDED = (2, 5)  # rows whose last two labels are word 0 without a share, as the trainer pads


def inputs(count: int = 1, seed: int = 0) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Hidden states, a head, and `count` labels per row with their shares."""
    rng = np.random.default_rng(seed)
    hidden, head = rng.normal(size=(ROWS, WIDTH)), rng.normal(size=(WORDS, WIDTH))
    labels = np.stack([rng.permutation(WORDS)[:count] for _ in range(ROWS)])
    shares = rng.random(labels.shape)
    if count > 2:
        for row in PADDED:
            labels[row] = [*range(count - 2), 0, 0]
            shares[row, -2:] = 0.0
    shares /= shares.sum(axis=-1, keepdims=True)
    floats = [mx.array(values, mx.float32) for values in (hidden, head, shares)]
    return floats[0], floats[1], mx.array(labels), floats[2]


def logits_of(hidden: mx.array, head: mx.array, softcap: float | None) -> mx.array:
    logits = hidden @ head.T
    return logits if softcap is None else mx.tanh(logits / softcap) * softcap


def by_mlx(
    hidden: mx.array,
    head: mx.array,
    labels: mx.array,
    shares: mx.array,
    softcap: float | None = None,
) -> tuple[mx.array, mx.array]:
    """The losses by MLX's cross-entropy with a share for every word, and the confidences."""
    p = np.zeros((len(np.array(labels)), head.shape[0]), np.float32)
    rows = np.arange(len(p))[:, None]
    np.add.at(p, (rows, np.array(labels)), np.array(shares))
    logits = logits_of(hidden, head, softcap)
    confidences = mx.take_along_axis(mx.softmax(logits, axis=-1), labels[:, :1], axis=-1)[:, 0]
    return nn.losses.cross_entropy(logits, mx.array(p)), confidences


def worst(a: mx.array, b: mx.array) -> float:
    assert a.shape == b.shape
    return float(mx.abs(a - b).max().item())


@pytest.fixture(params=["NumPy's functions", "MLX's functions"])
def either(request, monkeypatch):
    """With and without `cpu_math`, as on a CPU and on a GPU."""
    if request.param == "MLX's functions":
        monkeypatch.setattr(cpu_math, "applies", lambda: False)
    elif not cpu_math.applies():
        pytest.skip("MLX computes on a GPU here")


# Cross-entropy


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_cross_entropy_and_its_gradient_are_those_of_mlx(softcap, count):
    hidden, head, labels, shares = inputs(count)
    found = cross_entropy(hidden, head, labels, shares, softcap)
    expected = by_mlx(*inputs(count), softcap)
    assert found[0].dtype == found[1].dtype == mx.float32
    assert worst(found[0], expected[0]) < 1e-5
    assert worst(found[1], expected[1]) < 1e-6
    weights = mx.array(np.random.default_rng(1).normal(size=ROWS), mx.float32)

    def slopes(function: Any) -> mx.array:
        rest = (head, labels, shares, softcap)
        return mx.grad(lambda h: (weights * function(h, *rest)[0]).sum())(hidden)

    ours, own = slopes(cross_entropy), slopes(by_mlx)
    for row in range(ROWS):
        assert worst(own[row], mx.zeros_like(own[row])) > 0.01
    assert worst(ours, own) < 1e-5


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("share", [1.0, 0.0])
def test_a_hopeless_word_has_a_large_finite_loss_or_none_without_a_share(share):
    head = inputs()[1]
    sure = mx.array([[1000.0] + [0.0] * (WIDTH - 1)])
    logits = sure @ head.T
    best, hopeless = mx.argmax(logits, axis=-1), mx.argmin(logits, axis=-1)
    given = (head, mx.stack([best, hopeless], axis=-1), mx.array([[1.0 - share, share]]))
    loss, gradient = mx.value_and_grad(lambda h: cross_entropy(h, *given)[0].sum())(sure)
    assert (60.0 < loss.item() < float("inf")) if share else abs(loss.item()) < 1e-4
    assert worst(gradient, share * (head[best] - head[hopeless])) < 1e-4


# What the labels share


def considered(rows: int = ROWS, count: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities that fall and are not 1 in all, and which of those words are drafted."""
    rng = np.random.default_rng(3)
    shares = -np.sort(-rng.random((rows, count)), axis=-1).astype(np.float32) / count
    usable = rng.random((rows, count)) < 0.5
    usable[:, 0] = True
    assert not usable.all() and usable[:, 1:].any()
    return shares, usable


@pytest.mark.parametrize("soft", [0.0, 0.25, 1.0])
def test_shares_are_part_the_targets_and_the_rest_the_first_words(soft):
    shares, usable = considered()
    before = shares.copy()
    found = soft_shares(shares, usable, soft)
    assert found.dtype == np.float32 and found.shape == shares.shape
    for n, row in enumerate(found):
        total = sum(float(p) for p, kept in zip(shares[n], usable[n], strict=True) if kept)
        for k, share in enumerate(row):
            expected = soft * float(shares[n, k]) / total if usable[n, k] else 0.0
            assert share == pytest.approx(expected + (1 - soft if k == 0 else 0.0), abs=1e-6)
    assert np.allclose(found.sum(axis=-1), 1.0, atol=1e-6)
    assert not found[~usable].any()
    assert np.array_equal(shares, before)
    usable[:, 1:] = False
    alone = soft_shares(shares, usable, soft)
    assert np.allclose(alone[:, 0], 1.0) and not alone[:, 1:].any()


# Weights that decay


@pytest.mark.parametrize("tau", [0.5, 4.0])
def test_decaying_weights_begin_at_one_behind_the_anchor_and_its_visible_prefix(tau):
    prefixes = np.arange(7).reshape(1, 7)
    weights = decay_weights(prefixes, 8, tau)
    assert weights.shape == (1, 7, 8) and weights.dtype == np.float32
    for prefix, row in zip(prefixes[0], weights[0], strict=True):
        expected = [np.exp(-(k - prefix - 1) / tau) if k > prefix else 0.0 for k in range(8)]
        assert np.allclose(row, expected)


# Weights by the drafter's confidence


@settings(max_examples=60)
@given(
    blocks=st.lists(
        st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=6, max_size=6),
        min_size=1,
        max_size=3,
    ),
    alpha=st.floats(0.05, 1.0),
)
def test_confidence_weights_are_sums_of_products(blocks, alpha):
    confidences, supervised = (
        np.array(part) for part in zip(*(zip(*b, strict=True) for b in blocks), strict=True)
    )
    confidences = np.where(supervised, confidences, 0.0).astype(np.float32)
    found = np.array(dpace_weights(mx.array(confidences), mx.array(supervised), alpha))
    expected = [dpace_by_loops(a, b, alpha) for a, b in zip(confidences, supervised, strict=True)]
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-6)
