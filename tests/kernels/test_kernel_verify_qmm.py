"""verify_qmm: the kernel in the emulator against its reference, and that against NumPy."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.checks import FLOATS
from kernels_metal.emulator import emulated
from kernels_metal.verify_qmm import (
    BITS,
    GROUPS,
    VERIFY_QMM,
    Packing,
    verify_qmm,
    verify_qmm_reference,
)
from support.kernels import (
    arguments,
    assert_close,
    bytes_read,
    each_is_found,
    exact,
    launches,
    refused,
)


def product(rows, depth, columns, bits, group, dtype=mx.float32, invariant=False):
    """The arguments of a product."""
    sizes = {"rows": rows, "depth": depth, "columns": columns, "bits": bits, "group": group}
    return arguments(VERIFY_QMM, dtype, seed=rows, **sizes, invariant=invariant)


def multiply(x, weights, scales, biases, packing: Packing) -> np.ndarray:
    """The product with every weight unpacked from its word."""
    words = np.array(weights)
    shifts = np.arange(0, 32, packing.bits, dtype=np.uint32)
    q = (words[:, :, None] >> shifts) & np.uint32(2**packing.bits - 1)
    spread = [np.repeat(exact(a), packing.group, axis=1) for a in (scales, biases)]
    return exact(x) @ (spread[0] * q.reshape(len(words), -1) + spread[1]).T


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("invariant", [False, True])
def test_the_reference_unpacks_the_weights_as_numpy_does(bits, group, invariant):
    given = product(5, 256, 12, bits, group, invariant=invariant)
    assert_close(verify_qmm_reference(*given), multiply(*given))


def test_rows_of_the_invariant_reference_are_those_of_single_rows():
    x, *weights = product(9, 512, 20, 4, 64, invariant=True)
    together = verify_qmm_reference(x, *weights)
    for i in range(9):
        assert mx.array_equal(together[i : i + 1], verify_qmm_reference(x[i : i + 1], *weights))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_invariant_rows_have_the_bits_of_single_rows_at_every_width(bits, dtype):
    x, *weights = product(32, 1088, 9, bits, 64, dtype, invariant=True)
    with emulated():
        single = mx.concatenate([verify_qmm(x[i : i + 1], *weights) for i in range(32)])
        for width in range(2, 33):
            assert mx.array_equal(verify_qmm(x[:width], *weights), single[:width]), width


def test_invariant_rows_split_their_sums_as_single_rows_do():
    """With so many columns that a fast product of 32 rows does not split them."""
    parts = []
    for rows, invariant in ((1, False), (1, True), (32, True), (32, False)):
        given = product(rows, 1088, 1100, 4, 64, invariant=invariant)
        ((_, (*_, sizes), _),) = launches(VERIFY_QMM, *given)
        parts.append(sizes[-1].item())
    assert parts == [4, 4, 4, 1]


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 32])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("invariant", [False, True])
def test_each_weight_is_read_once_for_all_rows(rows, bits, invariant):
    given = product(rows, 1024, 37, bits, 32, mx.float16, invariant)
    with emulated() as run:
        verify_qmm(*given)
    assert bytes_read(run, "verify_qmm", "weights") == given[1].nbytes
    if rows == 8:  # the control: row by row they are read eight times
        with emulated() as run:
            for i in range(rows):
                verify_qmm(given[0][i : i + 1], *given[1:])
        assert bytes_read(run, "verify_qmm", "weights") == 8 * given[1].nbytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": mx.zeros((33, 128))}, "rows of x is 33, but must be 1 to 32"),
        ({"x": mx.zeros((4, 100))}, "columns of x is 100, but must be a multiple of 32"),
        ({"x": mx.zeros((4, 160))}, r"shape of weights is \[6, 16\], but must be \[any, 20\]"),
        ({"x": mx.zeros((4, 128), mx.float16)}, "dtype of scales is float32, but must be float16"),
        ({"weights": mx.zeros((6, 16), mx.int32)}, "dtype of weights is int32, but must be uint32"),
        ({"biases": mx.zeros((6, 5))}, r"shape of biases is \[6, 5\], but must be \[6, 4\]"),
        ({"weights": mx.zeros((16, 6), mx.uint32).T}, r"strides is \(4, 24\), .* contiguous"),
        ({"scales": mx.zeros((6, 8))[:, ::2]}, r"strides is \(32, 8\), but must be contiguous"),
    ],
)
def test_what_it_refuses(changes, message):
    *arrays, packing = product(4, 128, 6, 4, 32)
    given = dict(zip(("x", "weights", "scales", "biases"), arrays, strict=True)) | changes
    with refused(message):
        verify_qmm(*given.values(), packing)
    with refused("bits is 3, but must be one of 4, 8"):
        Packing(3, 32)
    with refused("group is 16, but must be one of 32, 64, 128"):
        Packing(4, 16)


def multiplying():
    given = product(5, 4160, 11, 4, 32)  # eight SIMD-groups share a sum over K
    return [(exact(verify_qmm(*given)), multiply(*given))]


# By what is wrong: the source, what becomes of it, and what is found
# fmt: off
test_a_fault_is_found = each_is_found(
    ("verify_qmm", multiplying, {
        "no barrier between the groups' sums": (
            "threadgroup_barrier(mem_flags::mem_threadgroup);\n", "", "uninitialised or race"),
        "all SIMD-groups write one sum": ("group_sums[group * 32 + m", "group_sums[m", "race"),
        "only the first lanes add up": (
            "  if (m < rows) {\n"
            "    for (int c = 0; c < COLS; ++c) {\n"
            "      const float sum = simd_sum",
            "  if (m < rows && lane < 16) {\n"
            "    for (int c = 0; c < COLS; ++c) {\n"
            "      const float sum = simd_sum", "divergence"),
        "a column behind the last": ("if (begin + n < columns)",
            "if (begin + n <= columns)", "bounds or race"),
        "too few sums": ("group_sums[SIMD_GROUPS * 32]", "group_sums[SIMD_GROUPS * 16]", "bounds"),
        "sums start anywhere": ("  sums[i] = 0.0f;\n", "", "uninitialised"),
        "a sum in double precision": ("    float sum = 0.0f;", "    double sum = 0.0;", "lint"),
        "the lowest bit of a weight is lost": ("((1u << BITS) - 1)",
            "((1u << BITS) - 2)", "result"),
        "part of K is left out": ("k < depth;", "k < depth / 2;", "result"),
    }),
    ("widen", multiplying, {
        "one of four numbers is taken twice": ("float(x[3])", "float(x[2])", "result"),
    }),
)
# fmt: on
