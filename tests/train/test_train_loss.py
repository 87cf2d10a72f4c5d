"""Cross-entropy is that of MLX; test_train_gradients.py has the weights and the labels."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash_mlx.system import cpu_math
from dflash_mlx.train.loss import cross_entropy

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
