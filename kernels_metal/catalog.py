"""Every kernel with sample launches: what the signature test and the emulator's command line use.

Add an entry for each kernel; samples should cover each template, dtype and side of the limit of 8
elements, below which MLX passes an input as `constant`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from kernels_metal import cache_commit, cascade_attention, draft_head, tree_walk, verify_qmm
from kernels_metal.checks import FLOATS
from kernels_metal.factory import Kernel, Launch, executing


@dataclass(frozen=True)
class Sample:
    """One launch of a kernel: what a wrapper would pass to `launch`."""

    kernel: Kernel
    inputs: tuple[mx.array, ...]
    plan: Launch


@dataclass(frozen=True)
class Entry:
    """A kernel in the catalog.

    `samples` makes a few launches. `run`, given the numbers of `--shape` by their `parameters`
    names and defaults, calls the wrapper on random inputs of that shape.
    """

    samples: Callable[[], Iterator[Sample]]
    run: Callable[..., object]
    parameters: dict[str, int]


def _recorded(kernel: Kernel, calls: Sequence[Callable[[], object]]) -> Iterator[Sample]:
    """The launches of one kernel that these calls of wrappers would make."""
    samples: list[Sample] = []

    def record(kernel: Kernel, inputs: Sequence[mx.array], plan: Launch) -> list[mx.array]:
        samples.append(Sample(kernel, tuple(inputs), plan))
        outputs = zip(plan.output_shapes, plan.output_dtypes, strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]

    with executing(record):
        for call in calls:
            call()
    yield from (sample for sample in samples if sample.kernel is kernel)


def _random(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(0)).astype(dtype)


def _attention(
    rows: int, prefix: int, heads: int, kv_heads: int, dim: int, dtype: mx.Dtype = mx.float16
) -> object:
    """A chain of `rows` behind `prefix` keys."""
    seen = cascade_attention.Visibility(prefix, np.tri(rows, dtype=np.bool_))
    keys = _random((1, kv_heads, prefix + rows, dim), dtype)
    queries = _random((1, heads, rows, dim), dtype)
    return cascade_attention.cascade_attention(queries, keys, keys + 1, seen, dim**-0.5)


def _draft_head(rows: int, vocabulary: int, k: int, dtype: mx.Dtype = mx.float16) -> object:
    return draft_head.draft_head(_random((rows, vocabulary), dtype), k)


def _tree_walk(nodes: int, branches: int, dtype: mx.Dtype = mx.int32) -> object:
    """A tree in which every node has up to `branches` children; the first ones are accepted."""
    node = mx.arange(nodes)
    tokens = (node % branches).astype(dtype)
    parents = (node + branches - 1) // branches - 1
    return tree_walk.tree_walk(mx.ones(nodes, dtype), tokens, parents.astype(mx.int32))


def _cache_commit(
    caches: int, heads: int, dim: int, rows: int, prefix: int, dtype: mx.Dtype = mx.float16
) -> object:
    """Every second row of a block behind `prefix` slots."""
    arrays = [_random((1, heads, prefix + 2 * rows, dim), dtype)] * caches
    return cache_commit.accepted_rows(arrays, range(1, 2 * rows, 2), [prefix] * caches)


def _verify_qmm(
    rows: int, depth: int, columns: int, bits: int, group: int, dtype: mx.Dtype = mx.float16
) -> object:
    weights = mx.random.randint(0, 2**31, (columns, depth * bits // 32), key=mx.random.key(0))
    scales = _random((columns, depth // group), dtype)
    packing = verify_qmm.Packing(bits, group)
    x = _random((rows, depth), dtype)
    return verify_qmm.verify_qmm(x, weights.astype(mx.uint32), scales, scales, packing)


def _attention_entry(kernel: Kernel) -> Entry:
    shapes = [(1, 2, 1, 1), (9, 70, 4, 2)]  # one row: few sums, so they come as `constant`
    calls = [
        partial(_attention, *shape, dim, dtype)
        for dtype in FLOATS
        for dim in cascade_attention.HEAD_DIMS
        for shape in shapes
    ]
    defaults = {"rows": 16, "prefix": 1000, "heads": 8, "kv_heads": 2, "dim": 64}
    return Entry(lambda: _recorded(kernel, calls), _attention, defaults)


def _draft_head_entry(kernel: Kernel) -> Entry:
    shapes = [(1, 7, 4), (1, 40, 4), (3, 9000, 4), (1, 20, 16), (3, 9000, 16)]
    calls = [partial(_draft_head, *shape, dtype) for dtype in FLOATS for shape in shapes]
    return Entry(
        lambda: _recorded(kernel, calls), _draft_head, {"rows": 8, "vocabulary": 32_000, "k": 8}
    )


def _tree_walk_entry(kernel: Kernel) -> Entry:
    calls = [
        partial(_tree_walk, nodes, 2, dtype)
        for dtype in (mx.int32, mx.uint32)
        for nodes in (1, 7, 8, 64)
    ]
    return Entry(lambda: _recorded(kernel, calls), _tree_walk, {"nodes": 64, "branches": 3})


def _cache_commit_entry(kernel: Kernel) -> Entry:
    shapes = [(1, 1, 2, 1, 1), (9, 2, 64, 5, 30)]
    calls = [partial(_cache_commit, *shape, dtype) for dtype in FLOATS for shape in shapes]
    defaults = {"caches": 8, "heads": 2, "dim": 64, "rows": 5, "prefix": 1000}
    return Entry(lambda: _recorded(kernel, calls), _cache_commit, defaults)


def _verify_qmm_entry(kernel: Kernel) -> Entry:
    calls = [
        partial(_verify_qmm, rows, depth, columns, bits, 32, dtype)
        for dtype in FLOATS
        for bits in (4, 8)
        for rows in (2, 9, 17)
        for depth, columns in ((32, 1), (64, 9))
    ]
    defaults = {"rows": 8, "depth": 1024, "columns": 256, "bits": 4, "group": 64}
    return Entry(lambda: _recorded(kernel, calls), _verify_qmm, defaults)


CATALOG: dict[str, Entry] = {
    kernel.name: entry(kernel)
    for kernel, entry in (
        (cascade_attention.CASCADE_ATTENTION, _attention_entry),
        (cascade_attention.CASCADE_MERGE, _attention_entry),
        (draft_head.DRAFT_HEAD, _draft_head_entry),
        (draft_head.DRAFT_HEAD_MERGE, _draft_head_entry),
        (tree_walk.TREE_WALK, _tree_walk_entry),
        (cache_commit.CACHE_COMMIT, _cache_commit_entry),
        (verify_qmm.VERIFY_QMM, _verify_qmm_entry),
    )
}
