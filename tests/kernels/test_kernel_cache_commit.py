"""cache_commit: the kernel in the emulator and its reference against the cache."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.cache_commit import (
    CACHE_COMMIT,
    accepted_rows,
    accepted_rows_reference,
    cache_commit,
)
from kernels_metal.emulator import emulated
from support.kernels import arguments, each_is_found, exact, launches, refused


def test_committed_rows_stand_behind_each_other():
    keys, values = (mx.random.normal((1, 2, 30, 8), key=mx.random.key(i)) for i in range(2))
    ours, rows = [mx.array(keys), mx.array(values)], np.array(keys)[:, :, [10, 12, 13, 17]]
    assert np.array_equal(accepted_rows_reference(ours, [0, 2, 3, 7], [10, 10])[0], rows)
    with emulated():
        cache_commit(ours, [0, 2, 3, 7], [10, 10])
    assert np.array_equal(np.array(ours[0])[:, :, 10:14], rows)
    assert mx.array_equal(ours[1][:, :, 10:14], values[:, :, mx.array([10, 12, 13, 17])])


def test_a_leading_run_of_rows_moves_nothing():
    def gather(*arguments):
        raise AssertionError("gathered")

    caches = [mx.zeros((1, 1, 4, 2))]
    cache_commit(caches, [0, 1, 2], [1], gather)
    with pytest.raises(AssertionError, match="gathered"):
        cache_commit(caches, [0, 2], [1], gather)


def test_eight_caches_take_one_launch():
    assert len(launches(CACHE_COMMIT, *arguments(CACHE_COMMIT, caches=16))) == 2


TWO = [mx.zeros((1, 2, 10, 4))] * 2


@pytest.mark.parametrize(
    ("caches", "path", "first", "message"),
    [
        (TWO, [], [0, 0], r"path is \[\], but must be one or more increasing rows"),
        (TWO, [-1, 2], [0, 0], r"path is \[-1, 2\], but must be one or more increasing rows"),
        (TWO, [0, 2], [0], "length of first is 1, but must be 2"),
        (TWO, [0, 2], [0, 8], r"first\[1\] is 8, but must be 0 to 7, .* inside 10 slots"),
        ([], [1], [], "number of caches is 0, but must be 1 or more"),
        ([TWO[0], TWO[0].astype(mx.float16)], [1], [0, 0], r"caches\[1\] is float16, .* float32"),
    ],
)
def test_what_it_refuses(caches, path, first, message):
    with refused(message):
        accepted_rows(caches, path, first)


def committing():
    """Two launches; unequal caches, each every second number of one stored as [slots, heads, D]."""
    keys = [mx.random.key(i) for i in range(9)]
    shapes = [(1, 20 + i, 2 + i % 3, 16 + i) for i in range(9)]
    stored = [mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True)]
    caches = [cache.swapaxes(1, 2)[..., ::2] for cache in stored]
    given = caches, [0, 2, 5, 9, 10], [i % 9 + 1 for i in range(9)]
    pairs = zip(accepted_rows(*given), accepted_rows_reference(*given), strict=True)
    return [(exact(ours), exact(wanted)) for ours, wanted in pairs]


# By what is wrong: the source, what becomes of it, and what is found
# fmt: off
test_a_fault_is_found = each_is_found(
    ("cache_commit", committing, {
        "one thread too many": ("if (element >= heads", "if (element > heads", "bounds"),
        "one thread too few": ("if (element >= heads * rows * width)",
            "if (element + 1 >= heads * rows * width)", "unwritten"),
        "a cache is written": (
            "    rows0[element] =\n        cache0[",
            "    rows0[element] = 0; ((device float*)cache0)[0] = 0 * \n"
            "        cache0[", "read-only"),
        "the path begins at slot 0": ("sizes[cache * 4 + 2] + path", "path", "result"),
    }),
)
# fmt: on
