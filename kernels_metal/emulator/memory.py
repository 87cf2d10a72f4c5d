"""MLX arrays as plain memory, and back."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Memory:
    """An array's bytes as a kernel would find them.

    `origin` is the byte of the first element. What lies between the elements of a strided array
    belongs to something else; there `holes` has a 1 for each item.
    """

    data: Bytes
    holes: Bytes | None
    origin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements


def _numbers(x: mx.array) -> npt.NDArray[np.generic]:
    """The same memory as a NumPy array; bfloat16 as the integers of its bits."""
    same = mx.view(x, mx.uint16) if x.dtype == mx.bfloat16 else x
    mx.eval(same)
    return np.asarray(same)


def read_array(x: mx.array, row_contiguous: bool) -> Memory:
    """Of an input; `row_contiguous` copies a strided one first, as MLX would."""
    numbers = _numbers(x)
    if row_contiguous:
        numbers = np.ascontiguousarray(numbers).reshape(x.shape)
    strides = numbers.strides
    reach = [s * (n - 1) for s, n in zip(strides, numbers.shape, strict=True)]
    origin = -sum(r for r in reach if r < 0)
    last = sum(r for r in reach if r > 0)
    size = origin + last + numbers.itemsize if numbers.size else 0
    data = np.full(size, 0xFF, np.uint8)
    holes = None
    if numbers.size:
        np.ndarray(numbers.shape, numbers.dtype, data.data, origin, strides)[...] = numbers
        if size > numbers.nbytes:
            holes = np.ones(size // numbers.itemsize, np.uint8)
            steps = tuple(s // numbers.itemsize for s in strides)
            first = origin // numbers.itemsize
            np.ndarray(numbers.shape, np.uint8, holes.data, first, steps)[...] = 0
    elements = tuple(s // numbers.itemsize for s in strides)
    return Memory(data, holes, origin, tuple(x.shape), elements)


def read_integers(values: tuple[int, ...], dtype: type[np.generic]) -> Memory:
    """Of a shape or of strides."""
    data = np.array(values, dtype).view(np.uint8)
    return Memory(data, None, 0, (len(values),), (1,))


def new_output(shape: tuple[int, ...], dtype: mx.Dtype) -> Bytes:
    """An output before the kernel runs: the pattern of uninitialised memory."""
    return np.full(int(np.prod(shape)) * dtype.size, 0xFF, np.uint8)


def write_array(data: Bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """The output that a kernel left in memory."""
    return mx.view(mx.array(data), dtype).reshape(shape) if data.size else mx.zeros(shape, dtype)
