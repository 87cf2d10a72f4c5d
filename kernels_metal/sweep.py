"""Every operation at random shapes: how far its kernel is from its reference.

for trial in trials(seed=0, each=40):
    print(trial.label, error(trial))  # above 1: further than rounding explains
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kernels_metal import operations
from kernels_metal.cascade_attention import HEAD_DIMS, Visibility
from kernels_metal.checks import FLOATS
from kernels_metal.dispatch import Operation, dtype_name
from kernels_metal.verify_qmm import Packing

FLOAT32 = 1e-5  # error of a sum, as a share of the largest number in the result
ROUNDOFF = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}  # of one rounded result
ROWS = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96)
PREFIXES = (0, 1, 7, 8, 31, 32, 33, 63, 64, 100, 255, 500, 1000, 2047, 5000)


@dataclass(frozen=True)
class Trial:
    """One call of an operation on random arguments."""

    operation: Operation
    arguments: tuple[Any, ...]
    label: str


def trials(seed: int, each: int) -> Iterator[Trial]:
    """`each` calls of every operation, dtypes in turn; the same for the same seed."""
    rng = random.Random(seed)
    for operation, make in _MAKERS:
        for i in range(each):
            dtype = FLOATS[i % len(FLOATS)]
            shape, arguments = make(rng, dtype)
            sizes = " ".join(f"{name} {size}" for name, size in shape.items())
            label = f"{operation.name} {dtype_name(dtype)}: {sizes}"
            yield Trial(operation, arguments, label)


def error(trial: Trial) -> float:
    """The largest difference between kernel and float32 reference, 1 being what rounding explains.

    The reference runs on the CPU: newer GPUs round the factors of float32 products to TF32.
    Infinite for results that are not numbers, and for integers that differ.
    """
    operation = trial.operation
    ours = operation.compared(operation.kernel(*trial.arguments), *trial.arguments)
    with mx.stream(mx.cpu):
        arguments = [_widened(a) for a in trial.arguments]
        wide = operation.compared(operation.reference(*arguments), *arguments)
    return max(_share(a, b) for a, b in zip(ours, wide, strict=True))


def _share(ours: mx.array, reference: mx.array) -> float:
    if not mx.issubdtype(ours.dtype, mx.floating):
        return 0.0 if mx.array_equal(ours, reference).item() else float("inf")
    size = mx.abs(reference)
    bound = FLOAT32 * size.max() + ROUNDOFF.get(ours.dtype, 0.0) * size
    apart = mx.abs(ours.astype(mx.float32) - reference) / (bound + 2.0**-25)
    worst = float(apart.max().item())  # type: ignore[arg-type]
    return worst if worst == worst else float("inf")


def _widened(argument: Any) -> Any:
    if isinstance(argument, list):
        return [_widened(item) for item in argument]
    if isinstance(argument, mx.array) and mx.issubdtype(argument.dtype, mx.floating):
        return argument.astype(mx.float32)
    return argument


def _normal(rng: random.Random, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(rng.getrandbits(32))).astype(dtype)


def _parents(rng: random.Random, nodes: int) -> list[int]:
    return [-1, *(max(0, i - 1 - int(rng.expovariate(0.5))) for i in range(1, nodes))]


def _attention(rng: random.Random, dtype: mx.Dtype) -> tuple[dict[str, int], tuple[Any, ...]]:
    rows, prefix, dim = rng.choice(ROWS), rng.choice(PREFIXES), rng.choice(HEAD_DIMS)
    kv_heads = rng.choice((1, 2, 3))
    heads = kv_heads * rng.choice((1, 2, 4, 8))
    local = np.eye(rows, dtype=np.bool_)
    for node, parent in enumerate(_parents(rng, rows)[1:], start=1):
        local[node] |= local[parent]
    window = rng.random() < 0.3
    first = tuple(rng.randint(0, prefix) for _ in range(rows)) if window else None
    seen = Visibility(prefix, local, first)
    slots = prefix + rows + rng.choice((0, 1, 200))
    keys, values = (_normal(rng, (1, kv_heads, slots, dim), dtype) for _ in range(2))
    queries = _normal(rng, (1, heads, rows, dim), dtype)
    sinks = _normal(rng, (heads,), dtype) if rng.random() < 0.3 else None
    sizes = {"rows": rows, "prefix": prefix, "heads": heads, "kv_heads": kv_heads, "dim": dim}
    return sizes | {"window": window}, (queries, keys, values, seen, dim**-0.5, sinks)


def _draft_head(rng: random.Random, dtype: mx.Dtype) -> tuple[dict[str, int], tuple[Any, ...]]:
    rows, k = rng.choice(ROWS), rng.randint(1, 16)
    vocabulary = rng.choice((17, 100, 255, 257, 1000, 8193, 32_000 if rows < 9 else 2000))
    return {"rows": rows, "V": vocabulary, "k": k}, (_normal(rng, (rows, vocabulary), dtype), k)


def _tree_walk(rng: random.Random, dtype: mx.Dtype) -> tuple[dict[str, int], tuple[Any, ...]]:
    """The dtype plays no part."""
    nodes = rng.choice((*ROWS, 128, 1000))
    tokens = [rng.randrange(3) for _ in range(nodes)]
    parents = _parents(rng, nodes)
    choices = [rng.randrange(3) for _ in range(nodes)]
    for node in range(1, nodes):
        if rng.random() < 0.8:
            choices[parents[node]] = tokens[node]
    return {"nodes": nodes}, (mx.array(choices), mx.array(tokens), mx.array(parents))


def _cache_commit(rng: random.Random, dtype: mx.Dtype) -> tuple[dict[str, int], tuple[Any, ...]]:
    count, heads, dim = rng.randint(1, 20), rng.choice((1, 2, 8)), rng.choice((4, 64, 80, 128))
    path = sorted(rng.sample(range(64), rng.randint(1, 16)))
    first = [rng.choice(PREFIXES[:12]) for _ in range(count)]
    caches = [_normal(rng, (1, heads, slot + 64, dim), dtype) for slot in first]
    return {"caches": count, "heads": heads, "dim": dim, "rows": len(path)}, (caches, path, first)


def _verify_qmm(rng: random.Random, dtype: mx.Dtype) -> tuple[dict[str, int], tuple[Any, ...]]:
    group, bits, rows = rng.choice((32, 64, 128)), rng.choice((4, 8)), rng.randint(1, 32)
    depth, columns = group * rng.randint(1, 20), rng.choice((5, 8, 31, 33, 64, 100, 257))
    weights = mx.random.randint(
        0, 2**32, (columns, depth * bits // 32), mx.uint32, key=mx.random.key(rng.getrandbits(32))
    )
    scales, biases = (_normal(rng, (columns, depth // group), dtype) for _ in range(2))
    x, packing = _normal(rng, (rows, depth), dtype), Packing(bits, group, rng.random() < 0.5)
    sizes = {"rows": rows, "K": depth, "N": columns, "bits": bits, "group": group}
    return sizes, (x, weights, scales * 2.0**-bits, biases, packing)


_Maker = Callable[[random.Random, mx.Dtype], tuple[dict[str, int], tuple[Any, ...]]]
_MAKERS: tuple[tuple[Operation, _Maker], ...] = (
    (operations.CASCADE_ATTENTION, _attention),
    (operations.DRAFT_HEAD, _draft_head),
    (operations.TREE_WALK, _tree_walk),
    (operations.CACHE_COMMIT, _cache_commit),
    (operations.VERIFY_QMM, _verify_qmm),
)
