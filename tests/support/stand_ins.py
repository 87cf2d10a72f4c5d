"""MLX's operations in the places of our kernels, so that graphs of them can be traced and computed.

The emulator runs a kernel at once, which no trace can hold. These take a kernel's inputs and give
its outputs, everywhere and inside `mx.compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from kernels_metal import cascade_attention, factory, gpu
from kernels_metal.cascade_attention import Packed, unpacked
from kernels_metal.verify_qmm import Packing, verify_qmm_reference


def _product(given: Any, shapes: Any, **template: Any) -> list[mx.array]:
    x, words, scales, biases = given[:4]
    group = words.shape[1] * 32 // template["BITS"] // scales.shape[1]
    packing = Packing(template["BITS"], group, gated=bool(template["GATED"]))
    return [verify_qmm_reference(x, words, scales, biases, packing)]


def _norm_rope(given: Any, shapes: Any, **template: Any) -> list[mx.array]:
    queries, keys, *weights, positions, periods, epsilon = given
    found = []
    steps = template["STEP"], template["D"]
    for x, weight, step in zip((queries, keys), weights, steps, strict=True):
        heads = x.reshape(x.shape[1], -1, 1, step)[..., : weight.size]
        size = mx.rsqrt(mx.mean(heads * heads, axis=-1, keepdims=True) + epsilon)
        how = {"traditional": False, "base": None, "scale": 1.0, "freqs": periods}
        at = positions[: x.shape[1]]
        found.append(mx.fast.rope(heads * size * weight, 2 * periods.size, offset=at, **how))
    return [x.swapaxes(0, 2) for x in found]


def _attention(given: Any, shapes: Any, **template: Any) -> list[mx.array]:
    queries, keys, values, *packed, visible, sizes, scale, _ = given
    if packed:
        pairs = (keys, *packed[:2]), (values, *packed[2:])
        keys, values = (unpacked(Packed(*each), template["D"]) for each in pairs)
    rows, _, _, _, prefix, last, *_ = np.array(sizes).tolist()
    table = np.array(visible)[:rows]
    bits = np.unpackbits(
        np.ascontiguousarray(table[:, 1:]).view(np.uint8), axis=1, bitorder="little"
    )
    before = np.arange(prefix) >= table[:, :1]
    mask = mx.array(np.hstack([before, bits[:, : last - prefix].astype(bool)]))
    keys, values = keys[:, :, :last], values[:, :, :last]
    found = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale.item(), mask=mask
    )
    result = (
        mx.broadcast_to(found.reshape(shapes[0][-3:]), shapes[0])
        if len(shapes[0]) == 4
        else (mx.broadcast_to(found.reshape(1, -1, found.shape[-1]), shapes[0]))
    )
    return [result, mx.zeros(shapes[1])]


def _merge(given: Any, shapes: Any, **template: Any) -> list[mx.array]:
    return [given[0][0].reshape(shapes[0])]


def _delta_inputs(given: Any, shapes: Any, **template: Any) -> list[mx.array]:
    qkv, a, b, convolved, weight, rates, biases, sources = given
    rows, taps, dim = qkv.shape[1], weight.shape[1], template["D"]
    window = mx.concatenate([convolved, qkv], axis=1)
    paths = window[0][sources[: rows * taps]].reshape(rows, taps, -1)
    found = mx.sum(paths * weight[:, :, 0].T, axis=1)
    ends = [template["HK"] * dim, 2 * template["HK"] * dim]
    parts = mx.split(found * mx.sigmoid(found), ends, axis=-1)
    q, k, v = (x.reshape(1, rows, -1, dim) for x in parts)
    q, k = (x * mx.rsqrt(mx.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    decays = mx.exp(-mx.exp(rates) * mx.logaddexp(a + biases, mx.array(0.0)))
    return [dim**-0.5 * q, k, v, decays, mx.sigmoid(b), window]


def _gated_delta(given: Any, shapes: Any, **template: Any) -> list[mx.array]:
    """With orders that a trace does not know: what is no order any more changes nothing."""
    q, k, v, decays, beta, state, *taped, orders = given
    shared, rows = template["HV"] // template["HK"], mx.arange(v.shape[1])[:, None, None]
    q, k, taped_k = (mx.repeat(x, shared, -2)[0] if x.ndim > 1 else x for x in (q, k, taped[0]))
    y, deltas, now = mx.zeros(v.shape[1:]), mx.zeros(v.shape[1:]), state[0]
    root = now
    for at in range(orders.size - 2):
        order, again, walked = orders[2 + at], at < orders[0], at < orders[0] + orders[1]
        if taped_k.ndim > 1:
            row = mx.minimum(order, taped_k.shape[0] - 1)
            behind = now * taped[1][0, row][:, None, None]
            behind = behind + taped_k[row][:, None] * taped[2][0, row][..., None]
            now, root = mx.where(again, behind, now), mx.where(again, behind, root)
        node = mx.minimum(order // 4, v.shape[1] - 1)
        held = mx.where(order // 2 % 2, root, now) * decays[0, node][:, None, None]
        key, known = k[node][:, None], order % 2
        delta = (v[0, node] - (held * key).sum(-1)) * beta[0, node][:, None]
        delta = mx.where(known, deltas[node], delta)
        held = held + key * delta[..., None]
        goes = walked & ~again
        now = mx.where(goes, held, now)
        here = goes & (rows == node)
        y = mx.where(here, (held * q[node][:, None]).sum(-1), y)
        deltas = mx.where(here, delta, deltas)
    return [y[None], root[None], deltas[None]]


_STAND_INS: dict[str, Callable[..., list[mx.array]]] = {
    "verify_qmm": _product,
    "verify_qmm_matrix": _product,
    "norm_rope": _norm_rope,
    "cascade_attention": _attention,
    "cascade_merge": _merge,
    "delta_inputs": _delta_inputs,
    "gated_delta": _gated_delta,
}


@contextmanager
def stand_ins() -> Iterator[list[str]]:
    """Inside, "Metal" runs kernels by MLX; gives the names of those that were called, or traced."""
    called: list[str] = []

    def compiled(kernel: factory.Kernel, template: Any) -> Callable[..., list[mx.array]]:
        def call(inputs: Any, output_shapes: Any, **_: Any) -> list[mx.array]:
            called.append(kernel.name)
            return _STAND_INS[kernel.name](inputs, output_shapes, **dict(template))

        return call

    with (
        mock.patch.object(factory, "_compiled", compiled),
        mock.patch.object(gpu, "gpu_family", lambda: "applegpu_g15s"),
        factory.executing(factory.metal),
    ):
        cascade_attention._prepared.cache_clear()
        yield called
        cascade_attention._prepared.cache_clear()
