"""Accepted rows of a block, moved to consecutive slots of the caches of all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kernels_metal.checks import check, check_array
from kernels_metal.factory import Kernel, Launch, launch
from kernels_metal.operation import PREFIXES, Case, Draw, Operation, case_of

TOGETHER = 8  # caches of one launch: with strides and outputs 26 of Metal's 31 buffers
KERNEL = Kernel(
    "cache_commit",
    inputs=(*(f"cache{i}" for i in range(TOGETHER)), "path", "sizes"),
    outputs=tuple(f"rows{i}" for i in range(TOGETHER)),
    ensure_row_contiguous=False,
)
Gather = Callable[[Sequence[mx.array], Sequence[int], Sequence[int]], list[mx.array]]


def accepted_rows(
    caches: Sequence[mx.array], path: Sequence[int], first: Sequence[int]
) -> list[mx.array]:
    """Rows `path` of the block that begins at slot first[i] of caches[i]: [1, heads, n, D] each.

    caches: keys and values of any layers, [1, heads, slots, D], all of one dtype (float32, float16
    or bfloat16) and any strides. path: n increasing rows. Eight caches take one launch.
    Raises ValueError for other shapes and dtypes, and for rows behind the last slot.
    """
    check_arguments(caches, path, first)
    rows: list[mx.array] = []
    for start in range(0, len(caches), TOGETHER):
        stop = start + TOGETHER
        rows += _launch(caches[start:stop], path, first[start:stop])
    return rows


def accepted_rows_reference(
    caches: Sequence[mx.array], path: Sequence[int], first: Sequence[int]
) -> list[mx.array]:
    """As `accepted_rows`, one gather for each cache."""
    rows = {slot: mx.array([slot + row for row in path]) for slot in set(first)}
    return [mx.take(cache, rows[slot], axis=2) for cache, slot in zip(caches, first, strict=True)]


def cache_commit(
    caches: Sequence[mx.array],
    path: Sequence[int],
    first: Sequence[int],
    gather: Gather = accepted_rows,
) -> None:
    """Move the rows `path` of a block to its first slots, in place; arguments of `accepted_rows`.

    Rows that are there already stay: a leading run of rows costs nothing. Each array object holds
    the new contents afterwards, as after an assignment to a slice.
    """
    kept = next((i for i, row in enumerate(path) if i != row), len(path))
    if kept == len(path):
        return
    moved = gather(caches, path[kept:], first)
    for cache, rows, slot in zip(caches, moved, first, strict=True):
        cache[..., slot + kept : slot + len(path), :] = rows


def _launch(
    caches: Sequence[mx.array], path: Sequence[int], first: Sequence[int]
) -> list[mx.array]:
    """One launch; the places of missing caches copy a single number."""
    missing = TOGETHER - len(caches)
    sizes = [
        (cache.shape[1], cache.shape[3], slot, len(path))
        for cache, slot in zip(caches, first, strict=True)
    ]
    shapes = [(1, heads, rows, width) for heads, width, _, rows in sizes]
    sizes += [(1, 1, 0, 1)] * missing
    shapes += [(1, 1, 1, 1)] * missing
    padded = np.zeros(max(len(path), 8), np.int32)  # eight or more, so always in device memory
    padded[: len(path)] = path
    plan = Launch(
        grid=(max(int(np.prod(shape)) for shape in shapes), TOGETHER, 1),
        threadgroup=(256, 1, 1),
        output_shapes=tuple(shapes),
        output_dtypes=(caches[0].dtype,) * TOGETHER,
    )
    inputs = [*caches, *([caches[0]] * missing), mx.array(padded), mx.array(sizes, dtype=mx.int32)]
    return launch(KERNEL, inputs, plan)[: len(caches)]


def check_arguments(caches: Sequence[mx.array], path: Sequence[int], first: Sequence[int]) -> None:
    """Raise ValueError for arguments the kernel does not take."""
    increasing = all(a < b for a, b in zip((-1, *path), path, strict=False))
    check(len(path) > 0 and increasing, "path", list(path), "one or more increasing rows from 0 on")
    check(len(caches) > 0, "the number of caches", len(caches), "1 or more")
    check(len(first) == len(caches), "the length of first", len(first), f"{len(caches)}, one each")
    check_array("caches[0]", caches[0], (1, None, None, None))
    for i, (cache, slot) in enumerate(zip(caches, first, strict=True)):
        check_array(f"caches[{i}]", cache, (1, None, None, None), (caches[0].dtype,))
        last = cache.shape[2] - path[-1] - 1
        limit = f"0 to {last}, for row {path[-1]} to be inside {cache.shape[2]} slots"
        check(0 <= slot <= last, f"first[{i}]", slot, limit)


def _case(caches: Sequence[mx.array], path: Sequence[int], first: Sequence[int]) -> Case:
    return case_of(len(path), (len(caches), caches[0].shape[1], caches[0].shape[3]), caches)


def _arguments(draw: Draw) -> tuple[Any, ...]:
    count, heads = draw.size("caches", range(1, 21)), draw.size("heads", (1, 2, 8))
    dim, rows = draw.size("dim", (4, 64, 80, 128)), draw.size("rows", range(1, 17))
    block = 2 * rows if draw.given else 64
    path = sorted(draw.rng.sample(range(block), rows))
    first = [draw.extra("prefix", PREFIXES[:12]) for _ in range(count)]
    caches = [draw.normal(1, heads, slot + block, dim) for slot in first]
    return caches, path, first


CACHE_COMMIT = Operation(
    name="cache_commit",
    kernel=accepted_rows,
    reference=accepted_rows_reference,
    check=check_arguments,
    case=_case,
    kernels=(KERNEL,),
    arguments=_arguments,
    defaults={"caches": 8, "heads": 2, "dim": 64, "rows": 5, "prefix": 1000},
    compared=lambda rows, *args: rows,
)
