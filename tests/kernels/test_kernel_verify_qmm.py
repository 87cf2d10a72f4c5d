"""The verify_qmm kernel in the emulator against its reference."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.emulator import emulated
from kernels_metal.verify_qmm import Packing, verify_qmm, verify_qmm_reference
from support import kernel_cases as cases

# rows, K, N, bits, group
SHAPES = [
    (1, 32, 1, 4, 32),
    (2, 32, 2, 8, 32),
    (3, 64, 3, 4, 64),
    (4, 64, 4, 8, 32),
    (5, 96, 5, 4, 32),
    (6, 128, 6, 8, 128),
    (7, 128, 7, 4, 128),
    (8, 192, 8, 8, 64),
    (9, 224, 9, 4, 32),
    (10, 256, 15, 8, 32),
    (11, 256, 16, 4, 64),
    (12, 288, 17, 8, 32),
    (13, 320, 31, 4, 64),
    (14, 384, 32, 8, 128),
    (15, 480, 33, 4, 32),
    (16, 512, 34, 8, 64),
    (17, 512, 35, 4, 128),
    (18, 544, 3, 8, 32),
    (19, 640, 20, 4, 128),
    (20, 768, 9, 8, 128),
    (21, 1024, 8, 4, 64),
    (22, 1024, 4, 8, 32),
    (23, 1056, 11, 4, 32),
    (24, 32, 64, 8, 32),
    (25, 64, 65, 4, 32),
    (26, 128, 63, 8, 64),
    (27, 256, 40, 4, 32),
    (28, 64, 100, 8, 64),
    (29, 96, 70, 4, 32),
    (30, 128, 50, 8, 32),
    (31, 192, 31, 4, 64),
    (32, 256, 33, 8, 128),
    (32, 2048, 5, 4, 64),
    (2, 2048, 12, 4, 128),
    (3, 2080, 6, 8, 32),
    (8, 4096, 9, 4, 64),
    (1, 4096, 13, 8, 64),
    (4, 1536, 70, 4, 32),
    (2, 512, 4100, 4, 64),
    (17, 512, 1030, 8, 128),
    (9, 128, 257, 4, 32),
    (16, 96, 129, 8, 32),
]


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.name)
@pytest.mark.parametrize("invariant", [False, True], ids=["fast", "invariant"])
def test_verify_qmm_equals_its_reference(invariant, dtype):
    rng = np.random.default_rng(0)
    assert len(SHAPES) >= 40
    with emulated():
        for rows, depth, columns, bits, group in SHAPES:
            packing = Packing(bits, group, invariant)
            x, weights, scales, biases, _ = cases.quantised(
                rng, rows, depth, columns, dtype, packing
            )
            result = verify_qmm(x, weights, scales, biases, packing)
            wide = [a.astype(mx.float32) for a in (x, scales, biases)]
            expected = verify_qmm_reference(wide[0], weights, *wide[1:], Packing(bits, group))
            cases.assert_close(result, expected, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.name)
@pytest.mark.parametrize("bits", [4, 8])
def test_invariant_rows_have_the_bits_of_single_rows_at_every_width(bits, dtype):
    packing = Packing(bits, 64, invariant=True)
    x, *weights = cases.quantised(np.random.default_rng(0), 32, 1088, 9, dtype, packing)
    with emulated():
        single = mx.concatenate([verify_qmm(x[i : i + 1], *weights) for i in range(32)])
        for width in range(2, 33):
            assert mx.array_equal(verify_qmm(x[:width], *weights), single[:width]), width


def test_the_fast_mode_splits_otherwise_for_many_rows_so_its_bits_may_differ():
    packing = Packing(4, 64)
    x, *weights = cases.quantised(np.random.default_rng(0), 32, 1024, 1024, mx.float32, packing)
    with emulated():
        wide, single = verify_qmm(x, *weights), verify_qmm(x[:1], *weights)
    assert not mx.array_equal(wide[:1], single)


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 32])
@pytest.mark.parametrize(("bits", "invariant"), [*itertools.product([4, 8], [False, True])])
def test_each_weight_is_read_once_for_all_rows(rows, bits, invariant):
    packing = Packing(bits, 32, invariant)
    x, weights, *rest = cases.quantised(
        np.random.default_rng(0), rows, 1024, 37, mx.float16, packing
    )
    with emulated() as run:
        verify_qmm(x, weights, *rest)
    assert cases.bytes_read(run, "verify_qmm", "weights") == weights.nbytes


def test_one_row_at_a_time_reads_the_weights_once_for_each_row():
    """The control: the same numbers with eight times the traffic."""
    packing = Packing(4, 64, invariant=True)
    x, weights, *rest = cases.quantised(np.random.default_rng(0), 8, 512, 20, mx.float16, packing)
    with emulated() as run:
        single = mx.concatenate([verify_qmm(x[i : i + 1], weights, *rest) for i in range(8)])
        assert cases.bytes_read(run, "verify_qmm", "weights") == 8 * weights.nbytes
        assert mx.array_equal(verify_qmm(x, weights, *rest), single)
