"""Arguments for the kernels' tests, and each operation once more in plain NumPy and float64."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from kernels_metal.cascade_attention import Visibility
from kernels_metal.emulator import Run
from kernels_metal.verify_qmm import Packing

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
ROUNDOFF = {mx.float32: 0.0, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
FLOAT32 = 1e-5  # of sums in float32, as a share of a row's largest number


def name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def normal(rng: np.random.Generator, shape, dtype=mx.float32) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def exact(array: mx.array) -> np.ndarray:
    """The same numbers in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def assert_close(actual: mx.array, expected, dtype: mx.Dtype = mx.float32) -> None:
    """Within 1e-5 of the row's largest number, and the rounding of one result to `dtype`."""
    wanted = expected if isinstance(expected, np.ndarray) else exact(expected)
    assert actual.dtype == dtype
    assert actual.shape == wanted.shape
    bound = FLOAT32 * np.abs(wanted).max(axis=-1, keepdims=True) + ROUNDOFF[dtype] * np.abs(wanted)
    error = np.abs(exact(actual) - wanted)
    assert np.all(error <= bound + 2.0**-25), f"{error.max()} beyond {bound.min()}"


def bytes_read(run: Run, kernel: str, buffer: str) -> int:
    """From one buffer, by all launches of one kernel."""
    return sum(launch.buffers[buffer].read for launch in run.of(kernel))


@dataclass(frozen=True)
class Attention:
    """One call of cascade attention: sizes and kinds, from which the arguments are made."""

    dim: int
    heads: int
    kv_heads: int
    rows: int
    prefix: int
    columns: int = 0  # as many as rows
    mask: str = "tree"
    window: bool = False
    sinks: bool = False
    start: int = 0  # of the keys inside a larger cache
    slack: int = 0  # slots behind the last key
    transposed: bool = False  # stored as [slots, heads, D]

    def arguments(self, dtype: mx.Dtype):
        rng = np.random.default_rng(self.rows * 10_007 + self.prefix)
        seen = self.visibility(rng)
        queries = normal(rng, (1, self.heads, self.rows, self.dim), dtype)
        keys, values = (self._cache(rng, seen.keys, dtype) for _ in "kv")
        sinks = normal(rng, (self.heads,), dtype) if self.sinks else None
        return queries, keys, values, seen, self.dim**-0.5, sinks

    def visibility(self, rng: np.random.Generator) -> Visibility:
        columns = self.columns or self.rows
        first = None
        if self.window:
            low = rng.integers(self.prefix // 2 + 1)
            first = tuple(int(low + rng.integers(self.prefix - low + 1)) for _ in range(self.rows))
        return Visibility(self.prefix, local_mask(self.mask, self.rows, columns, rng), first)

    def _cache(self, rng: np.random.Generator, keys: int, dtype: mx.Dtype) -> mx.array:
        slots = self.start + keys + self.slack
        if self.transposed:
            array = normal(rng, (1, slots, self.kv_heads, self.dim), dtype).swapaxes(1, 2)
        else:
            array = normal(rng, (1, self.kv_heads, slots, self.dim), dtype)
        return array[:, :, self.start :]


def local_mask(kind: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Which of the local keys each row sees; every row sees at least one."""
    row, column = np.arange(rows)[:, None], np.arange(columns)[None]
    if kind == "all":
        return np.ones((rows, columns), bool)
    if kind == "causal":
        return np.maximum(row, 0) >= column
    if kind == "branches":
        return row % columns // 4 == column // 4
    mask = row % columns == column
    for node in range(1, min(rows, columns)):
        mask[node] |= mask[rng.integers(node)]
    return mask


def attend(queries, keys, values, seen: Visibility, scale: float, sinks=None) -> np.ndarray:
    """Softmax attention, one query row at a time."""
    q, k, v = exact(queries)[0], exact(keys)[0], exact(values)[0]
    out = np.zeros_like(q)
    for head in range(q.shape[0]):
        shared = head // (q.shape[0] // k.shape[0])
        for row in range(q.shape[1]):
            prefix = range(seen.starts[row], seen.prefix)
            shown = [*prefix, *(seen.prefix + np.flatnonzero(seen.local[row]))]
            scores = scale * (k[shared, shown] @ q[head, row])
            top = scores.max()
            weights = np.exp(scores - top)
            total = weights.sum()
            if sinks is not None:
                total += np.exp(exact(sinks)[head] - top)
            out[head, row] = weights @ v[shared, shown] / total
    return out[None]


def log_sum_exp(logits: mx.array) -> np.ndarray:
    values = exact(logits)
    top = values.max(axis=-1, keepdims=True)
    return np.log(np.exp(values - top).sum(axis=-1)) + top[:, 0]


def walk(choices, tokens, parents) -> list[int]:
    """Count, next anchor, path and padding: the loop of acceptance, one node at a time."""
    path = [0]
    while True:
        here = path[-1]
        below = [i for i, p in enumerate(parents) if p == here and tokens[i] == choices[here]]
        if not below:
            return [len(path), choices[here], *path, *[-1] * (len(parents) - len(path))]
        path.append(below[0])


def random_tree(rng: np.random.Generator, nodes: int, deep: bool):
    """Choices, tokens and parents with many matches; `deep` makes long paths likely."""
    parents = [-1]
    parents += [
        i - 1 if deep and rng.random() < 0.9 else int(rng.integers(i)) for i in range(1, nodes)
    ]
    tokens = rng.integers(0, 3, nodes)
    choices = rng.integers(0, 3, nodes)
    for node in range(1, nodes):
        if rng.random() < (0.95 if deep else 0.5):
            choices[parents[node]] = tokens[node]
    return choices.tolist(), tokens.tolist(), parents


def quantised(
    rng: np.random.Generator, rows: int, depth: int, columns: int, dtype, packing: Packing
):
    """Rows and random weights with scales and biases: the arguments of `verify_qmm`."""
    x = normal(rng, (rows, depth), dtype)
    words = rng.integers(0, 2**32, (columns, depth * packing.bits // 32), dtype=np.uint32)
    scales = normal(rng, (columns, depth // packing.group)) * 2.0**-packing.bits
    biases = normal(rng, (columns, depth // packing.group))
    return x, mx.array(words), scales.astype(dtype), biases.astype(dtype), packing


def multiply(x, weights, scales, biases, packing: Packing) -> np.ndarray:
    """The product with every weight unpacked from its word."""
    words = np.array(weights)
    shifts = np.arange(0, 32, packing.bits, dtype=np.uint32)
    q = (words[:, :, None] >> shifts) & np.uint32(2**packing.bits - 1)
    spread = [np.repeat(exact(a), packing.group, axis=1) for a in (scales, biases)]
    return exact(x) @ (spread[0] * q.reshape(len(words), -1) + spread[1]).T
