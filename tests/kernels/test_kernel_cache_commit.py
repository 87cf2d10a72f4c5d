"""The cache_commit kernel in the emulator against its reference."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.cache_commit import accepted_rows, accepted_rows_reference, cache_commit
from kernels_metal.emulator import emulated
from support import kernel_cases as cases

# caches, heads, D, rows of the path, first slot
SHAPES = [
    (caches, 1 + caches % 4, (1, 3, 8, 64, 80)[(caches + rows) % 5], rows, (0, 5, 33)[rows % 3])
    for caches in (1, 2, 3, 7, 8, 9, 16, 17)
    for rows in (1, 2, 7, 8, 9)
] + [(2, 2, 64, 96, 100), (4, 1, 128, 31, 4900), (1, 8, 256, 3, 0)]


def make(shape, dtype, strided=False):
    """Caches of unequal heads and slots, some of them views of stored [slots, heads, D]."""
    caches, heads, width, rows, first = shape
    rng = np.random.default_rng(rows)
    path = np.cumsum(1 + rng.integers(0, 3, rows)).tolist()
    slots = first + caches + path[-1] + 1
    arrays, starts = [], []
    for i in range(caches):
        if strided and i % 2 == 0:
            wide = cases.normal(rng, (1, slots, heads + i % 3, width + i % 2), dtype)
            arrays.append(wide.swapaxes(1, 2))
        else:
            arrays.append(cases.normal(rng, (1, heads + i % 3, slots, width + i % 2), dtype))
        starts.append(first + i)
    return arrays, path, starts


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.name)
def test_gathered_rows_equal_the_references(dtype):
    with emulated():
        for i, shape in enumerate(SHAPES):
            arguments = make(shape, dtype, strided=i % 3 == 0)
            result = accepted_rows(*arguments)
            for ours, reference in zip(result, accepted_rows_reference(*arguments), strict=True):
                assert ours.dtype == dtype
                assert mx.array_equal(ours, reference), shape
    assert len(SHAPES) >= 40


def test_the_commit_leaves_the_same_caches_as_mlx_indexing():
    ours, path, first = make((5, 2, 8, 4, 3), mx.float16)
    theirs = [mx.array(cache) for cache in ours]
    with emulated():
        cache_commit(ours, [0, *path], first)
    cache_commit(theirs, [0, *path], first, accepted_rows_reference)
    for a, b in zip(ours, theirs, strict=True):
        assert mx.array_equal(a, b)


def test_eight_caches_take_one_launch_and_only_the_rows_are_read():
    arguments = make((16, 2, 64, 5, 30), mx.float16)
    with emulated() as run:
        accepted_rows(*arguments)
    assert len(run.counters) == 2
