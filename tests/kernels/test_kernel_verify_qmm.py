"""verify_qmm: both kernels in the emulator against their reference, and that against NumPy."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal import factory, gpu
from kernels_metal import verify_qmm as module
from kernels_metal.checks import FLOATS
from kernels_metal.emulator import emulated
from kernels_metal.verify_qmm import (
    BITS,
    FEW_ROWS,
    GROUPS,
    VERIFY_QMM,
    Packing,
    Product,
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


def product(rows, depth, columns, bits, group, dtype=mx.float32, **kind):
    """The arguments of a product; kind: invariant, gated (with so many columns of results)."""
    sizes = {"rows": rows, "depth": depth, "columns": columns, "bits": bits, "group": group}
    return arguments(VERIFY_QMM, dtype, seed=rows, **sizes, **kind)


def multiply(x, weights, scales, biases, packing: Packing) -> np.ndarray:
    """The product with every weight unpacked from its word, and gated if it is."""
    words = np.array(weights)
    shifts = np.arange(0, 32, packing.bits, dtype=np.uint32)
    q = (words[:, :, None] >> shifts) & np.uint32(2**packing.bits - 1)
    spread = [np.repeat(exact(a), packing.group, axis=1) for a in (scales, biases)]
    y = exact(x) @ (spread[0] * q.reshape(len(words), -1) + spread[1]).T
    if not packing.gated:
        return y
    gates, values = np.split(y, 2, axis=1)
    return gates / (1 + np.exp(-gates)) * values


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("invariant", [False, True])
def test_the_reference_unpacks_the_weights_as_numpy_does(bits, group, invariant):
    given = product(5, 256, 12, bits, group, invariant=invariant)
    assert_close(verify_qmm_reference(*given), multiply(*given))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [1, 5, 8, 16, 17, 32])
@pytest.mark.parametrize("columns", [5, 64])
def test_gated_products_of_both_kernels_are_those_of_numpy(rows, columns, bits, dtype):
    x, weights, scales, biases, packing = product(rows, 256, columns, bits, 64, dtype, gated=1)
    small = scales / 16, biases / 16  # so that the gates are neither open nor closed
    given = x, weights, *small, packing
    assert weights.shape[0] == 2 * columns
    ways = ["scalar", "matrix"] if rows <= 16 else ["matrix"]
    assert VERIFY_QMM.ways(*given) == tuple(ways)
    for way in ways:
        with emulated() as run:
            ours = verify_qmm(*given, way)
        assert_close(ours, multiply(*given), dtype)
        (counters,) = run.counters
        assert counters.buffers["y"].written == ours.nbytes
        assert columns == 5 or counters.buffers["weights"].read == weights.nbytes
    if dtype == mx.float32:  # the reference rounds after every step
        assert_close(verify_qmm_reference(*given), multiply(*given))


def test_gated_products_of_more_rows_than_lanes_can_hold_are_refused(monkeypatch):
    monkeypatch.setattr(module, "may_use_matrices", lambda: False)
    given = product(17, 64, 8, 4, 64, gated=1)
    with refused("rows of x is 17, but must be 1 to 16"):
        verify_qmm(*given)
    with refused("rows of weights is 15, but must be even"):
        verify_qmm(given[0], *(array[:15] for array in given[1:4]), given[4])


def test_rows_of_the_invariant_reference_are_those_of_single_rows():
    x, *weights = product(9, 512, 20, 4, 64, invariant=True)
    together = verify_qmm_reference(x, *weights)
    for i in range(9):
        assert mx.array_equal(together[i : i + 1], verify_qmm_reference(x[i : i + 1], *weights))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [*(("verify_qmm_matrix", dtype) for dtype in FLOATS), ("verify_qmm", mx.float16)],
)
def test_invariant_rows_have_the_bits_of_single_rows_at_every_width(
    monkeypatch, bits, dtype, kernel
):
    monkeypatch.setattr(module, "may_use_matrices", lambda: kernel == "verify_qmm_matrix")
    x, *weights = product(32, 1088, 9, bits, 64, dtype, invariant=True)
    with emulated() as run:
        single = mx.concatenate([verify_qmm(x[i : i + 1], *weights) for i in range(32)])
        for width in range(2, 33):
            assert mx.array_equal(verify_qmm(x[:width], *weights), single[:width]), width
    assert {counters.kernel for counters in run.counters} == {kernel}


def split(rows: int, columns: int, invariant: bool = False) -> int:
    """How many SIMD-groups share the sum over K of 1,088 weights."""
    given = product(rows, 1088, columns, 4, 64, invariant=invariant)
    ((_, (*_, sizes), _),) = launches(VERIFY_QMM, *given)
    return sizes.tolist()[-1]


def test_invariant_rows_split_their_sums_as_single_rows_do(monkeypatch):
    """With so many columns that a fast scalar product of 32 rows does not split them."""
    monkeypatch.setattr(module, "may_use_matrices", lambda: False)
    kinds = ((1, False), (1, True), (32, True), (32, False))
    assert [split(rows, 1100, invariant) for rows, invariant in kinds] == [4, 4, 4, 1]


def test_through_matrices_sums_are_split_alike_for_all_numbers_of_rows():
    for columns, parts in ((9, 8), (2600, 8), (5000, 4), (17000, 1)):
        assert {split(rows, columns) for rows in range(FEW_ROWS + 1, 33)} == {parts}


@pytest.mark.parametrize(
    ("rows", "columns", "matrices", "way"),
    [
        (FEW_ROWS, 64, True, "scalar"),
        (FEW_ROWS + 1, 64, True, "matrix"),
        (32, 64, True, "matrix"),
        (32, 7, True, "scalar"),
        (32, 64, False, "scalar"),
    ],
)
def test_few_rows_and_gpus_without_safe_matrices_take_the_scalar_kernel(
    monkeypatch, rows, columns, matrices, way
):
    monkeypatch.setattr(module, "may_use_matrices", lambda: matrices)
    assert Product(*product(1, 64, columns, 4, 64)[1:]).way(rows) == way


@pytest.mark.parametrize(
    ("family", "safe"),
    [
        ("applegpu_g13g", True),
        ("applegpu_g16s", True),
        ("applegpu_g17s", False),  # an M5, on which such kernels have hung
        ("applegpu_g18p", False),
        ("applegpu_g12p", False),
        ("none", False),
        ("some other GPU", False),
    ],
)
def test_matrices_are_used_on_an_m1_to_m4_only(monkeypatch, family, safe):
    assert gpu.has_matrices(family) is safe
    monkeypatch.setattr(gpu, "gpu_family", lambda: family)
    monkeypatch.setattr(gpu, "executor", lambda: factory.metal)
    assert gpu.may_use_matrices() is safe


# What is read and written


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 16, 17, 32])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("way", ["scalar", "matrix"])
def test_each_weight_is_read_once_for_all_rows(rows, bits, way):
    given = product(rows, 1024, 32, bits, 32, mx.float16)
    with emulated() as run:
        verify_qmm(*given, way)
    name = "verify_qmm" if way == "scalar" else "verify_qmm_matrix"
    assert bytes_read(run, name, "weights") == given[1].nbytes
    y = run.counters[0].buffers["y"]
    assert y.written == y.size == rows * 32 * 2
    if rows == 8:  # the control: row by row they are read eight times
        with emulated() as run:
            for i in range(rows):
                verify_qmm(given[0][i : i + 1], *given[1:], way)
        assert bytes_read(run, name, "weights") == 8 * given[1].nbytes


@pytest.mark.parametrize("columns", [33, 100])
def test_columns_behind_the_last_cost_less_than_a_tile_for_each_simd_group(columns):
    given = product(16, 1024, columns, 4, 64, mx.float16)
    with emulated() as run:
        verify_qmm(*given)
    each = given[1].nbytes // columns
    read = bytes_read(run, "verify_qmm_matrix", "weights")
    assert columns * each < read <= -(-columns // 16) * 16 * each


@pytest.mark.parametrize("rows", [6, 8, 16, 17, 32])
def test_x_is_read_once_for_sixteen_columns_or_more_in_tiles_of_eight_rows(rows):
    given = product(rows, 512, 64, 4, 64, mx.float16)
    with emulated() as run:
        verify_qmm(*given)
    tiles = -(-rows // 8) * 8
    assert bytes_read(run, "verify_qmm_matrix", "x") == 64 // 16 * tiles * 512 * 2


def test_wide_products_read_x_once_for_32_columns():
    given = product(8, 64, 16384, 4, 64, mx.float16)
    ((_, _, plan),) = launches(VERIFY_QMM, *given)
    assert dict(plan.template)["COLS"] == 4


# Words are unpacked without shifts, so every bit of every word has to arrive where it belongs


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
def test_every_bit_of_every_word_counts_for_its_weight_and_no_other(bits, group, dtype):
    words = group * bits // 32
    single = np.zeros((words * 32, words), np.uint32)  # in each column one bit
    for bit in range(words * 32):
        single[bit, bit // 32] = 1 << bit % 32
    ones, zeros = (mx.full((words * 32, 1), value, dtype) for value in (1, 0))
    wanted = np.zeros((group, words * 32))
    for bit in range(words * 32):
        wanted[bit // bits, bit] = 2 ** (bit % bits)
    weights = Product(mx.array(single), ones, zeros, Packing(bits, group))
    x = mx.eye(group).astype(dtype)
    with emulated():
        found = [weights(x[at : at + 32], "matrix") for at in range(0, group, 32)]
    np.testing.assert_array_equal(exact(mx.concatenate(found)), wanted)


@pytest.mark.parametrize("bits", BITS)
def test_every_value_of_a_weight_is_exact_at_every_place_of_its_word(bits):
    values = np.arange(2**bits, dtype=np.uint64)
    repeated = sum(values << np.uint64(bits * i) for i in range(32 // bits)).astype(np.uint32)
    words = np.repeat(repeated[:, None], bits, axis=1)  # [values, words of a group of 32]
    ones, zeros = (mx.full((2**bits, 1), value) for value in (1.0, 0.0))
    weights = Product(mx.array(words), ones, zeros, Packing(bits, 32))
    with emulated():
        found = weights(mx.eye(32), "matrix")
    np.testing.assert_array_equal(exact(found), np.broadcast_to(values, (32, 2**bits)))


def test_a_product_is_planned_once_for_each_shape_and_takes_leading_dimensions():
    x, *weights = product(6, 128, 40, 4, 64)
    planned = Product(*weights)
    with emulated() as run:
        flat = planned(x)
        assert mx.array_equal(planned(x[None]), flat[None])
        plans = dict(planned._settled)
        planned(x + 1)
    assert len(run.counters) == 3
    assert planned._settled == plans and len(plans) == 2


def test_a_second_call_of_a_shape_checks_nothing_and_makes_no_array(monkeypatch):
    x, *weights = product(6, 128, 40, 4, 64)
    planned, given = Product(*weights), []

    def record(kernel, inputs, plan):
        given.append((inputs, plan))
        return [x]

    with factory.executing(record):
        planned(x)
        for name in ("check_array", "check_range", "Launch", "Prepared"):
            monkeypatch.setattr(module, name, None)
        planned(x)
    (first, plan), (second, again) = given
    assert plan is again and all(a is b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": mx.zeros((33, 128))}, "rows of x is 33, but must be 1 to 32"),
        ({"x": mx.zeros((4, 100))}, r"shape of x is \[4, 100\], but must be \[4, 128\]"),
        ({"x": mx.zeros((2, 17, 128))}, "rows of x is 34, but must be 1 to 32"),
        ({"x": mx.zeros((4, 128), mx.float16)}, "dtype of x is float16, but must be float32"),
        ({"weights": mx.zeros((6, 15), mx.uint32)}, "weights are for is 120, .* multiple of 32"),
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


def multiplying(*products, **kind):
    """products: what `product` is given; gates are made small, so that they are not all open."""

    def compare():
        pairs = []
        for each in products:
            x, *weights = product(*each, **kind)
            x = x / 99 if kind else x
            pairs.append((exact(verify_qmm(x, *weights)), multiply(x, *weights)))
        return pairs

    return compare


SCALAR = multiplying((5, 4160, 11, 4, 32))  # eight SIMD-groups share a sum over K
MATRIX = multiplying((11, 640, 43, 4, 32), (9, 128, 9, 8, 64))
GATED = multiplying((3, 320, 11, 4, 32), gated=1)
GATED_MATRIX = multiplying((11, 320, 43, 4, 32), gated=1)


# By what is wrong: the source, what becomes of it, and what is found
# fmt: off
test_a_fault_is_found = each_is_found(
    ("verify_qmm", SCALAR, {
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
        "a sum in double precision": ("    float both[HALVES];",
            "    double both[HALVES];", "lint"),
        "the lowest bit of a weight is lost": ("((1u << BITS) - 1)",
            "((1u << BITS) - 2)", "result"),
        "part of K is left out": ("k < depth;", "k < depth / 2;", "result"),
    }),
    ("verify_qmm_matrix", MATRIX, {
        "no barrier between the groups' sums": (
            "threadgroup_barrier(mem_flags::mem_threadgroup);\n", "", "uninitialised or race"),
        "all SIMD-groups write one sum": ("(group * WIDTH + i", "(i", "race"),
        "sums start anywhere": ("  totals[i] = float2(0.0f);\n", "", "uninitialised"),
        "the sum of x starts anywhere": ("    x_sums[t] = float2(0.0f);\n", "", "uninitialised"),
        "a row behind the last": ("c + i % 2, rows - 1)", "c + i % 2, rows)", "bounds"),
        "weights behind the last column": ("+ r, columns - 1)", "+ r, columns)", "bounds"),
        "a result behind the last column": ("if (begin + n < columns)",
            "if (begin + n <= columns)", "bounds or race"),
        "some lanes leave out the last group": ("g < groups;",
            "g < groups - lane / 31;", "divergence"),
        "the first of two numbers twice": ("float2(float(first), float(second))",
            "float2(float(first), float(first))", "result"),
        "bits of the neighbour": ("constexpr uint MASK = (1u << BITS) - 1;",
            "constexpr uint MASK = (2u << BITS) - 1;", "result"),
        "x is not scaled for the upper half": ("1.0f / 65536.0f", "1.0f / 32768.0f", "result"),
        "the bias does not count": ("fma(bias, x_sums[t], fma(scale",
            "fma(bias * 0.0f, x_sums[t], fma(scale", "result"),
        "too few sums": ("partial[SIMD_GROUPS * WIDTH * ROWS]",
            "partial[SIMD_GROUPS * WIDTH * 8]", "bounds"),
        "a part is left out": ("p < parts;", "p < parts - 1;", "result"),
        "x of the next eight": ("r % 2 * 4;", "r % 2 * 8;", "result or bounds"),
    }),
    ("verify_qmm", GATED, {
        "gates of the next column": ("c / HELD * columns", "c / HELD * (columns + 1)",
            "result or bounds"),
        "values are gates too": ("h * HELD + n % HELD]", "n % HELD]", "result"),
        "values are not gated": ("swish(both[0])", "both[0]", "result"),
    }),
    ("verify_qmm_matrix", GATED_MATRIX, {
        "gates of the next column": ("j * 8 / HELD * columns", "j * 8 / HELD * (columns + 1)",
            "result or bounds"),
        "values are gates too": ("+ h * HELD + n % HELD;", "+ n % HELD;", "result"),
        "values are not gated": ("swish(both[0])", "both[0]", "result"),
    }),
    ("lanes", GATED, {
        "a gate that grows": ("1.0f + exp(-x)", "1.0f + exp(x)", "result"),
    }),
    ("lanes", MATRIX, {
        "one of four numbers is taken twice": ("float(x[3])", "float(x[2])", "result"),
        "rows of a matrix in another order": ("+ lane / 2 % 4", "+ 3 - lane / 2 % 4", "result"),
    }),
)
# fmt: on
