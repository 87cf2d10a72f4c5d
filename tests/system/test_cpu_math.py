"""NumPy's exponentials give the values and gradients of MLX's own functions."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.system import cpu_math

pytestmark = pytest.mark.skipif(
    not cpu_math.applies(), reason="MLX computes on a GPU here, by its own functions"
)
HARD = [-1e4, -200.0, -88.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 88.0, 200.0, 1e4]


PAIRS = [
    (cpu_math.softmax, partial(mx.softmax, axis=-1), 1),
    (cpu_math.swiglu, lambda gate, x: nn.silu(gate) * x, 2),
]


def random(*shape: int, seed: int = 0, scale: float = 3.0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape) * scale, mx.float32)


def gradients(function: Any, *arrays: mx.array) -> tuple[mx.array, ...]:
    """Of a sum with uneven weights, so that no row's gradients cancel."""

    def weighted(*inputs: mx.array) -> mx.array:
        result = function(*inputs)
        return (result * random(*result.shape, seed=9)).sum()

    found = mx.grad(weighted, argnums=tuple(range(len(arrays))))(*arrays)
    return tuple(found)


def same(a: mx.array, b: mx.array, tolerance: float = 1e-5) -> bool:
    assert a.shape == b.shape and a.dtype == b.dtype
    x, y = (np.array(array.astype(mx.float32)) for array in (a, b))
    return bool(np.isfinite(x).all()) and float(np.abs(x - y).max()) <= tolerance


SHAPES = [(5,), (3, 7), (2, 3, 4, 5), (1, 1)]
NORMAL = [(random(*shape), random(*shape, seed=1)) for shape in SHAPES]
INPUTS = [(arrays, 1e-5) for arrays in NORMAL]
INPUTS += [((mx.array([HARD]), random(1, len(HARD))), 1e-3)]  # exponentials overflow
for dtype in (mx.bfloat16, mx.float16):
    INPUTS += [(tuple(a.astype(dtype) for a in NORMAL[1]), 0.05)]


def agree(ours: Any, own: Any, arrays: Any, of_values: float, of_gradients: float) -> None:
    assert same(ours(*arrays), own(*arrays), of_values)
    for mine, theirs in zip(gradients(ours, *arrays), gradients(own, *arrays), strict=True):
        assert same(mine, theirs, of_gradients)


@pytest.mark.parametrize(("ours", "own", "count"), PAIRS)
@pytest.mark.parametrize(("arrays", "tolerance"), INPUTS)
def test_values_and_gradients_are_those_of_mlx(ours, own, count, arrays, tolerance):
    agree(ours, own, arrays[:count], tolerance, tolerance)


@pytest.mark.parametrize(("ours", "own", "count"), PAIRS)
def test_elsewhere_the_functions_are_mlx_own(ours, own, count, monkeypatch):
    monkeypatch.setattr(cpu_math, "applies", lambda: False)
    monkeypatch.setattr(cpu_math.np, "exp", lambda *_, **__: pytest.fail("NumPy was used"))
    assert same(ours(*NORMAL[1][:count]), own(*NORMAL[1][:count]), 0.0)


# Attention

ATTENTIONS = (cpu_math.attention, mx.fast.scaled_dot_product_attention)


def masks(B: int, H: int, N: int, T: int) -> dict[str, Any]:
    visible = np.random.default_rng(5).random((B, H, N, T)) < 0.6
    visible[..., 0] = True
    return {
        "none": None,
        "causal": "causal",
        "one": mx.array(visible[0, 0]),
        "one of each sequence": mx.array(visible[:, :1]),
        "one of each head": mx.array(visible),
        "additive": random(N, T),
        "additive of each sequence": random(B, 1, N, T),
    }


@pytest.mark.parametrize("kind", masks(1, 1, 1, 1))
@settings(max_examples=8)
@given(
    B=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    N=st.integers(1, 5),
    before=st.integers(0, 6),
)
def test_attention_is_that_of_mlx(kind, B, kv_heads, groups, N, before):
    H, T, D = kv_heads * groups, N + before, 8
    shapes = (B, H, N, D), (B, kv_heads, T, D), (B, kv_heads, T, D)
    arrays = [random(*shape, seed=seed, scale=1.0) for seed, shape in enumerate(shapes)]
    settings = {"scale": 0.3, "mask": masks(B, H, N, T)[kind]}
    ours, own = (partial(function, **settings) for function in ATTENTIONS)
    agree(ours, own, arrays, 1e-5, 1e-4)


def test_sinks_are_left_to_mlx():
    q, k, v = (random(1, heads, 3, 8, seed=heads) for heads in (4, 2, 2))
    how = {"scale": 0.3, "mask": "causal", "sinks": random(4)}
    assert same(*(function(q, k, v, **how) for function in ATTENTIONS))
