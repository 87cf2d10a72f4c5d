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
from kernels_metal.verify_qmm import Packing, verify_qmm_reference


def _product(given: Any, shapes: Any, **template: Any) -> list[mx.array]:
    x, words, scales, biases = given[:4]
    group = words.shape[1] * 32 // template["BITS"] // scales.shape[1]
    packing = Packing(template["BITS"], group, gated=bool(template["GATED"]))
    return [verify_qmm_reference(x, words, scales, biases, packing)]


def _norm_rope(given: Any, shapes: Any, **template: Any) -> list[mx.array]:
    queries, keys, *weights, positions, periods, epsilon = given
    found = []
    for x, weight in zip((queries, keys), weights, strict=True):
        heads = x.reshape(x.shape[1], -1, 1, weight.size)
        size = mx.rsqrt(mx.mean(heads * heads, axis=-1, keepdims=True) + epsilon)
        how = {"traditional": False, "base": None, "scale": 1.0, "freqs": periods}
        at = positions[: x.shape[1]]
        found.append(mx.fast.rope(heads * size * weight, weight.size, offset=at, **how))
    return [x.swapaxes(0, 2) for x in found]


def _attention(given: Any, shapes: Any, **template: Any) -> list[mx.array]:
    queries, keys, values, *_, visible, sizes, scale, _ = given
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


_STAND_INS: dict[str, Callable[..., list[mx.array]]] = {
    "verify_qmm": _product,
    "verify_qmm_matrix": _product,
    "norm_rope": _norm_rope,
    "cascade_attention": _attention,
    "cascade_merge": _merge,
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
