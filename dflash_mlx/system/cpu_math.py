"""Exponentials on MLX's CPU backend, by NumPy.

MLX 0.32 computes `exp` on x86 one number at a time: 17 ns each here on 2026-11-21, against 0.5 in
NumPy, which makes a softmax or a SwiGLU dearer than the matrix products around it. NumPy has to
wait for what it is given, so few numbers are MLX's: callers ask `pays`. Batch work (features,
corpora, training) runs inside `vectorised()`, where all go to NumPy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

ENOUGH = 30_000  # exponentials that take as long as waiting for the numbers
_custom: Any = mx.custom_function  # whose result mypy takes for a plain object
_fast_attention = mx.fast.scaled_dot_product_attention  # before `vectorised` puts ours there


def applies() -> bool:
    """Whether MLX computes on the CPU here, as it does on Linux without a GPU."""
    return bool(mx.default_device() == mx.Device(mx.cpu))


def pays(exponentials: int) -> bool:
    """Whether so many are computed faster here than by MLX."""
    return exponentials >= ENOUGH and applies()


def _float32(x: mx.array) -> Any:
    return np.asarray(x.astype(mx.float32))


@_custom  # type: ignore[untyped-decorator]
def _softmax(x: mx.array) -> mx.array:
    values = _float32(x)
    result = values - values.max(axis=-1, keepdims=True)
    np.exp(result, out=result)
    result /= result.sum(axis=-1, keepdims=True)
    return mx.array(result).astype(x.dtype)


@_softmax.vjp  # type: ignore[untyped-decorator]
def _softmax_vjp(x: mx.array, cotangent: mx.array, p: mx.array) -> mx.array:
    weighted = p * cotangent
    return weighted - p * weighted.sum(axis=-1, keepdims=True)


@_custom  # type: ignore[untyped-decorator]
def _sigmoid(x: mx.array) -> mx.array:
    result = -_float32(x)
    with np.errstate(over="ignore"):  # exp(-x) is inf where the sigmoid is 0
        np.exp(result, out=result)
    result += 1
    np.reciprocal(result, out=result)
    return mx.array(result).astype(x.dtype)


@_sigmoid.vjp  # type: ignore[untyped-decorator]
def _sigmoid_vjp(x: mx.array, cotangent: mx.array, s: mx.array) -> mx.array:
    return cotangent * s * (1 - s)


def softmax(x: mx.array) -> mx.array:
    """Softmax over the last axis, differentiable."""
    return cast(mx.array, _softmax(x)) if applies() else mx.softmax(x, axis=-1)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x, differentiable."""
    return (gate * cast(mx.array, _sigmoid(gate)) if applies() else nn.silu(gate)) * x


def attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, **other: Any
) -> mx.array:
    """Grouped-query attention as `mx.fast.scaled_dot_product_attention` computes it.

    q [B, H, N, D]; k, v [B, Hkv, T, D]; mask: boolean, additive, "causal" or None.
    """
    if other.get("sinks") is not None:  # of the rare model that has them
        return _fast_attention(q, k, v, scale=scale, mask=mask, **other)
    groups = q.shape[1] // k.shape[1]
    queries = mx.unflatten(q * scale, 1, (-1, groups))
    scores = queries @ mx.expand_dims(k, 2).swapaxes(-1, -2)
    rows, columns = scores.shape[-2:]
    if isinstance(mask, str):
        mask = mx.arange(columns)[None] <= mx.arange(columns - rows, columns)[:, None]
    if mask is not None:
        if mask.ndim == 4:
            mask = mx.unflatten(mask, 1, (-1, groups if mask.shape[1] > 1 else 1))
        scores = mx.where(mask, scores, -1e9) if mask.dtype == mx.bool_ else scores + mask
    return (softmax(scores) @ mx.expand_dims(v, 2)).flatten(1, 2)


def logsumexp(x: mx.array, axis: Any = None, keepdims: bool = False) -> mx.array:
    """As `mx.logsumexp`, but not differentiable."""
    values = _float32(x)
    top = values.max(axis=axis, keepdims=True)
    result = np.log(np.exp(values - top).sum(axis=axis, keepdims=True)) + top
    return mx.array(result if keepdims else np.squeeze(result, axis)).astype(x.dtype)


@contextmanager
def vectorised() -> Iterator[None]:
    """On the CPU backend, let mlx-lm's models use these functions until the block is left.

    Not for threads: other models that run meanwhile use them too.
    """
    if not applies():
        yield
        return
    from mlx_lm.models import activations

    original = activations.swiglu
    swap: list[tuple[Any, str, Any]] = [
        (mx.fast, "scaled_dot_product_attention", attention),
        (mx, "logsumexp", logsumexp),
    ]
    models = [module for name, module in sys.modules.items() if name.startswith("mlx_lm.models")]
    swap += [(m, "swiglu", swiglu) for m in models if getattr(m, "swiglu", None) is original]
    before = [getattr(module, name) for module, name, _ in swap]
    for module, name, function in swap:
        setattr(module, name, function)
    try:
        yield
    finally:
        for (module, name, _), function in zip(swap, before, strict=True):
            setattr(module, name, function)
