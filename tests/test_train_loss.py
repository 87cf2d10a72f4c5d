"""Cross-entropy and the weights of positions are what their definitions say."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx import cpu_math
from dflash_mlx.train.loss import cross_entropy, decay_weights, dpace_weights

ROWS, WIDTH, WORDS = 9, 16, 23


def inputs(seed: int = 0) -> tuple[mx.array, mx.array, mx.array]:
    rng = np.random.default_rng(seed)
    hidden, head = rng.normal(size=(ROWS, WIDTH)), rng.normal(size=(WORDS, WIDTH))
    labels = rng.integers(WORDS, size=ROWS)
    return mx.array(hidden, mx.float32), mx.array(head, mx.float32), mx.array(labels)


def by_mlx(
    hidden: mx.array, head: mx.array, labels: mx.array, softcap: float | None = None
) -> mx.array:
    logits = hidden @ head.T
    if softcap is not None:
        logits = mx.tanh(logits / softcap) * softcap
    return mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, labels[:, None], 1)[:, 0]


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
def test_cross_entropy_and_its_gradient_are_those_of_mlx(softcap):
    hidden, head, labels = inputs()
    assert worst(cross_entropy(hidden, head, labels, softcap), by_mlx(*inputs(), softcap)) < 1e-5
    weights = mx.array(np.random.default_rng(1).normal(size=ROWS), mx.float32)
    ours = mx.grad(lambda h: (weights * cross_entropy(h, head, labels, softcap)).sum())(hidden)
    own = mx.grad(lambda h: (weights * by_mlx(h, head, labels, softcap)).sum())(hidden)
    assert worst(own, mx.zeros_like(own)) > 0.1
    assert worst(ours, own) < 1e-5


@pytest.mark.usefixtures("either")
def test_the_gradient_passes_through_what_made_the_hidden_states():
    hidden, head, labels = inputs()

    def loss(scale: mx.array, function: object) -> mx.array:
        return function(mx.tanh(hidden * scale), head, labels).mean()  # type: ignore[operator]

    scale = mx.array(0.7)
    ours, own = (mx.grad(lambda s, f=f: loss(s, f))(scale) for f in (cross_entropy, by_mlx))
    assert abs(own.item()) > 0.01
    assert worst(ours, own) < 1e-5


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_head_is_frozen(softcap):
    hidden, head, labels = inputs()
    gradient = mx.grad(lambda h: cross_entropy(hidden, h, labels, softcap).sum())(head)
    assert worst(gradient, mx.zeros_like(head)) == 0.0


@pytest.mark.usefixtures("either")
def test_a_hopeless_label_has_a_large_finite_loss_and_a_gradient():
    _, head, _ = inputs()
    sure = mx.array([[1000.0] + [0.0] * (WIDTH - 1)])
    logits = sure @ head.T
    label = mx.argmin(logits, axis=-1)
    loss, gradient = mx.value_and_grad(lambda h: cross_entropy(h, head, label).sum())(sure)
    assert 60.0 < loss.item() < float("inf")
    best = head[mx.argmax(logits, axis=-1)]
    assert worst(gradient, best - head[label]) < 1e-4


# Weights that decay


def test_decaying_weights_begin_at_one_behind_the_anchor():
    weights = decay_weights(np.array([0]), 8, 4.0)[0]
    assert weights.dtype == np.float32
    assert np.allclose(weights, [0.0, *(np.exp(-k / 4.0) for k in range(7))])


@pytest.mark.parametrize("tau", [0.5, 4.0, 7.0])
def test_decaying_weights_begin_at_one_behind_a_visible_prefix(tau):
    prefixes = np.arange(7).reshape(1, 7)
    weights = decay_weights(prefixes, 8, tau)
    assert weights.shape == (1, 7, 8)
    for prefix, row in zip(prefixes[0], weights[0], strict=True):
        expected = [np.exp(-(k - prefix - 1) / tau) if k > prefix else 0.0 for k in range(8)]
        assert np.allclose(row, expected)


# Weights by the drafter's confidence


def dpace_by_loops(losses: np.ndarray, supervised: np.ndarray, alpha: float) -> list[float]:
    """w_j = sum over m >= j of the product over i <= m of (1 - alpha) q_i + alpha, one block."""
    weights = []
    for j in range(len(losses)):
        total = 0.0
        for m in range(j, len(losses)):
            product = 1.0
            for i in range(m + 1):
                if supervised[i]:
                    product *= (1 - alpha) * np.exp(-losses[i]) + alpha
            total += product if supervised[m] else 0.0
        weights.append(total if supervised[j] else 0.0)
    return weights


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.lists(
        st.lists(st.tuples(st.floats(0, 12, width=32), st.booleans()), min_size=6, max_size=6),
        min_size=1,
        max_size=3,
    ),
    alpha=st.floats(0.05, 1.0),
)
def test_confidence_weights_are_sums_of_products(blocks, alpha):
    losses, supervised = (
        np.array(part) for part in zip(*(zip(*b, strict=True) for b in blocks), strict=True)
    )
    losses = np.where(supervised, losses, 0.0).astype(np.float32)
    found = np.array(dpace_weights(mx.array(losses), mx.array(supervised), alpha))
    expected = [dpace_by_loops(a, b, alpha) for a, b in zip(losses, supervised, strict=True)]
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_confidence_weights_of_an_undecided_block_are_those_worked_out_by_hand():
    losses = mx.array([[0.0, np.log(2.0), np.log(4.0), 0.0]])
    supervised = mx.array([[False, True, True, True]])
    found = np.array(dpace_weights(losses, supervised, 0.5))[0]
    first, second = 0.75, 0.75 * 0.625
    third = second * 1.0
    assert np.allclose(found, [0.0, first + second + third, second + third, third])


def test_a_visible_prefix_counts_as_certain():
    losses = np.random.default_rng(0).random((1, 8)).astype(np.float32)
    behind = np.arange(8) > 3
    found = np.array(dpace_weights(mx.array(losses * behind), mx.array(behind[None]), 0.5))[0]
    alone = np.array(dpace_weights(mx.array(losses[:, 4:]), mx.ones((1, 4), mx.bool_), 0.5))[0]
    assert not found[:4].any()
    assert np.allclose(found[4:], alone)


def test_with_an_alpha_of_one_a_weight_counts_the_positions_from_there_on():
    found = dpace_weights(mx.full((1, 4), 3.0), mx.ones((1, 4), mx.bool_), 1.0)
    assert found.tolist() == [[4.0, 3.0, 2.0, 1.0]]


def test_no_gradient_flows_through_the_confidences():
    losses = mx.array([[0.5, 1.0, 2.0]])
    seen = mx.ones((1, 3), mx.bool_)
    gradient = mx.grad(lambda x: (dpace_weights(x, seen, 0.5) * x).sum())(losses)
    assert worst(gradient, dpace_weights(losses, seen, 0.5)) < 1e-6
