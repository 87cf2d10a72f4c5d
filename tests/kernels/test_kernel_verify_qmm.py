"""verify_qmm: both kernels in the emulator against their reference, and that against NumPy."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal import factory, gpu
from kernels_metal import verify_qmm as module
from kernels_metal.checks import FLOATS
from kernels_metal.emulator import emulated
from kernels_metal.verify_qmm import (
    FEW_ROWS,
    PACKINGS,
    UNPACKED,
    VERIFY_QMM,
    Packing,
    Product,
    verify_qmm,
    verify_qmm_reference,
)
from support.kernels import (
    against,
    assert_close,
    bytes_read,
    each_is_found,
    exact,
    launches,
    refused,
)
from support.packings import KINDS, dequantised, of, product, sizes, told


def multiply(x, weights, scales, biases, packing: Packing) -> np.ndarray:
    """The product with every weight unpacked from its word, and gated if it is."""
    y = exact(x) @ dequantised(weights, scales, biases, packing).T
    if not packing.gated:
        return y
    gates, values = np.split(y, 2, axis=1)
    return gates / (1 + np.exp(-gates)) * values


@pytest.mark.parametrize("packing", PACKINGS, ids=told)
@pytest.mark.parametrize("kind", [{}, {"invariant": 1}, {"gated": 1}], ids=str)
def test_the_reference_is_the_product_of_numpy_and_rows_may_be_apart(packing, kind):
    x, *weights = product(5, 256, 12, packing, **kind)
    together = verify_qmm_reference(x, *weights)
    assert_close(together, multiply(x, *weights))
    for i in range(5 if "invariant" in kind else 0):
        assert mx.array_equal(together[i : i + 1], verify_qmm_reference(x[i : i + 1], *weights))


@pytest.mark.parametrize(
    ("packing", "kernel", "dtype"),
    [
        *((Packing(4, 64), "verify_qmm_matrix", dtype) for dtype in FLOATS),
        *(
            (kind, kernel, mx.float16)
            for kind in KINDS
            for kernel in ("verify_qmm", "verify_qmm_matrix")
        ),
    ],
    ids=str,
)
def test_invariant_rows_have_the_bits_of_single_rows_at_every_width(
    monkeypatch, packing, dtype, kernel
):
    monkeypatch.setattr(module, "may_use_matrices", lambda: kernel == "verify_qmm_matrix")
    x, *weights = product(32, 1088, 9, packing, dtype, invariant=True)
    with emulated() as run:
        single = mx.concatenate([verify_qmm(x[i : i + 1], *weights) for i in range(32)])
        for width in range(2, 33):
            assert mx.array_equal(verify_qmm(x[:width], *weights), single[:width]), width
    assert {counters.kernel for counters in run.counters} == {kernel}


@pytest.mark.parametrize(
    ("matrices", "kinds"),
    [
        # A fast scalar product of 32 rows does not split the sums of so many columns
        (False, [(1, 1100, 0, 4), (1, 1100, 1, 4), (32, 1100, 1, 4), (32, 1100, 0, 1)]),
        # Through matrices all numbers of rows and columns are split alike
        (True, [(rows, n, 0, 8) for rows in range(FEW_ROWS + 1, 33) for n in (9, 2600, 17000)]),
    ],
)
def test_so_many_simd_groups_share_the_sum_over_k(monkeypatch, matrices, kinds):
    monkeypatch.setattr(module, "may_use_matrices", lambda: matrices)
    for rows, columns, invariant, parts in kinds:
        given = product(rows, 1088, columns, Packing(4, 64), invariant=invariant)
        ((_, (*_, sizes), _),) = launches(VERIFY_QMM, *given)
        assert sizes.tolist()[-1] == parts


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
    assert Product(*product(1, 64, columns, Packing(4, 64))[1:]).way(rows) == way


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


@pytest.mark.parametrize("rows", [1, 5, 6, 8, 9, 16, 17, 32])
@pytest.mark.parametrize("packing", KINDS, ids=told)
@pytest.mark.parametrize("gated", [0, 1])
def test_each_weight_is_read_once_for_all_rows_and_x_by_tiles(rows, packing, gated):
    given = product(rows, 1024, 32, packing, mx.float16, gated=gated)
    ways = VERIFY_QMM.ways(*given)
    assert ways == (("matrix",) if gated and rows > 16 else ("scalar", "matrix"))
    for way in ways:
        with emulated() as run:
            verify_qmm(*given, way)
        (counters,) = run.counters
        buffers = counters.buffers
        assert buffers["weights"].read == given[1].nbytes
        assert buffers["y"].written == buffers["y"].size == rows * 32 * 2
        if packing == UNPACKED:
            assert buffers["scales"].read == buffers["biases"].read == 0
        elif packing.mode != "affine":
            assert buffers["scales"].read > buffers["biases"].read == 0
        if way == "matrix":  # once for eight columns of each half, eight rows at a time
            tiles = 32 * (1 + gated) // 8 * -(-rows // 8)
            assert buffers["x"].read == 32 // 8 * -(-rows // 8) * 8 * 1024 * 2
            # A product for eight weights along K, and for the biases one of a group and all columns
            sums = 1024 // packing.group if packing.mode == "affine" else 0
            assert counters.matrix_products == tiles * 1024 // 8 + tiles // (1 + gated) * sums


@pytest.mark.parametrize("columns", [33, 100])
def test_columns_behind_the_last_cost_less_than_a_tile_for_each_simd_group(columns):
    given = product(16, 1024, columns, Packing(4, 64), mx.float16)
    with emulated() as run:
        verify_qmm(*given)
    each = given[1].nbytes // columns
    read = bytes_read(run, "verify_qmm_matrix", "weights")
    assert columns * each < read <= -(-columns // 8) * 8 * each


# By rows, K, columns of y, and whether gated: threadgroups, tiles across, parts. An M3 Ultra
# of 80 cores wants some 160 threadgroups, of eight SIMD-groups each.
GEOMETRY = {
    (8, 5120, 17408, 0): (544, 4, 8),  # a 27B's gate
    (16, 5120, 17408, 0): (544, 4, 8),
    (17, 5120, 17408, 0): (1088, 2, 8),
    (8, 17408, 5120, 0): (160, 4, 8),  # its down
    (8, 5120, 17408, 1): (1088, 4, 8),  # gate and up as one
    (8, 4096, 1024, 0): (32, 4, 8),
    (8, 4096, 1023, 0): (128, 1, 8),
    (8, 5120, 48, 0): (6, 1, 8),
    (8, 5120, 48, 1): (6, 2, 8),
    (8, 192, 4096, 0): (32, 4, 2),  # K has three groups
}


@pytest.mark.parametrize(("shape", "wanted"), GEOMETRY.items(), ids=str)
def test_products_of_any_size_fill_a_large_gpu(shape, wanted):
    rows, depth, columns, gated = shape
    held = columns * (1 + gated)
    words, scales = mx.zeros((held, depth // 8), mx.uint32), mx.zeros((held, depth // 64))
    weights = Product(words, scales, scales, Packing(4, 64, gated=bool(gated)))
    run, sizes = weights._plan(mx.zeros((rows, depth)), "matrix")
    plan = run.plan
    tiles = dict(plan.template)["COLS"]
    assert (plan.grid[0] // plan.threadgroup[0], tiles, sizes.tolist()[-1]) == wanted


@pytest.mark.parametrize(
    ("family", "most"),
    [("applegpu_g13s", 32), ("applegpu_g14d", 32), ("applegpu_g15c", 24), ("applegpu_g16s", 24)],
)
def test_more_rows_than_pay_on_a_gpu_are_left_to_stock(monkeypatch, family, most):
    monkeypatch.setattr(gpu, "gpu_family", lambda: family)
    monkeypatch.setattr(gpu, "executor", lambda: factory.metal)
    VERIFY_QMM.check(*product(most, 64, 16, Packing(4, 64)))
    if most < 32:
        with refused(f"the rows of x is {most + 1}, but must be 1 to {most}"):
            VERIFY_QMM.check(*product(most + 1, 64, 16, Packing(4, 64)))
        VERIFY_QMM.check(*product(32, 64, 16, Packing(4, 64), invariant=True))


@pytest.mark.parametrize("family", ["applegpu_g17s", "some other GPU"])
def test_on_an_m5_and_on_what_nobody_named_products_are_stock(monkeypatch, family):
    monkeypatch.setattr(gpu, "gpu_family", lambda: family)
    monkeypatch.setattr(gpu, "executor", lambda: factory.metal)
    with refused("the GPU is one whose own product is faster"):
        VERIFY_QMM.check(*product(4, 64, 16, Packing(4, 64)))


@pytest.mark.parametrize(("family", "least"), [("applegpu_g14d", 2), ("applegpu_g15c", 6)])
def test_unpacked_weights_are_left_to_stock_where_it_reads_them_once(monkeypatch, family, least):
    monkeypatch.setattr(gpu, "gpu_family", lambda: family)
    monkeypatch.setattr(gpu, "executor", lambda: factory.metal)
    VERIFY_QMM.check(*product(least, 64, 16, UNPACKED))
    with refused(f"the rows of x is {least - 1}, but must be {least} to"):
        VERIFY_QMM.check(*product(least - 1, 64, 16, UNPACKED))
    VERIFY_QMM.check(*product(1, 64, 16, Packing(4, 64)))


def test_a_product_is_planned_once_for_each_shape_and_takes_leading_dimensions():
    x, *weights = product(6, 128, 40, Packing(4, 64))
    planned = Product(*weights)
    with emulated() as run:
        flat = planned(x)
        assert mx.array_equal(planned(x[None]), flat[None])
        plans = dict(planned._settled)
        planned(x + 1)
    assert len(run.counters) == 3
    assert planned._settled == plans and len(plans) == 2


INTS = Packing(4, 32)
SCALAR = against(VERIFY_QMM, sizes(5, 4160, 11, INTS))  # eight SIMD-groups share a sum over K
MATRIX = against(VERIFY_QMM, sizes(11, 640, 43, INTS), sizes(9, 128, 9, Packing(8, 64)))
GATED, GATED_MATRIX = (of(INTS, (rows, 320, n), gated=1) for rows, n in ((3, 11), (11, 43)))


# By what is wrong: the source, what becomes of it, and what is found
# fmt: off
test_a_fault_is_found = each_is_found(
    ("verify_qmm", SCALAR, {
        "no barrier between the groups' sums": (
            "threadgroup_barrier(mem_flags::mem_threadgroup);\n", "", "uninitialised or race"),
        "all SIMD-groups write one sum": ("group_sums[group * 32 + m", "group_sums[m", "race"),
        "only the first lanes add up": (
            "  if (m < rows) {\n"
            "    #pragma clang loop unroll(full)\n"
            "    for (int c = 0; c < COLS; ++c) {\n"
            "      const float sum = simd_sum",
            "  if (m < rows && lane < 16) {\n"
            "    #pragma clang loop unroll(full)\n"
            "    for (int c = 0; c < COLS; ++c) {\n"
            "      const float sum = simd_sum", "divergence"),
        "a column behind the last": ("if (begin + n < columns)",
            "if (begin + n <= columns)", "bounds or race"),
        "too few sums": ("group_sums[SIMD_GROUPS * 32]", "group_sums[SIMD_GROUPS * 16]", "bounds"),
        "sums start anywhere": ("  sums[i] = 0.0f;\n", "", "uninitialised"),
        "a sum in double precision": ("    float both[HALVES];",
            "    double both[HALVES];", "lint"),
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
        "the bias does not count": ("float2(bias), x_sums", "float2(0.0f), x_sums", "result"),
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
    ("lanes", SCALAR, {
        "the lowest bit of a weight is lost": ("((1u << BITS) - 1)",
            "((1u << BITS) - 2)", "result"),
    }),
    ("lanes", GATED, {
        "a gate that grows": ("1.0f + exp(-x)", "1.0f + exp(x)", "result"),
    }),
    ("lanes", MATRIX, {
        "the first of two numbers twice": ("float(b & (BITS == 4 ? mask << 16 : mask))",
            "float(a & mask)", "result"),
        "bits of the neighbour": ("((1u << BITS) - 1) <<", "((2u << BITS) - 1) <<", "result"),
        "x is not scaled for the upper half": ("1.0f / 65536.0f", "1.0f / 32768.0f", "result"),
        "one of four numbers is taken twice": ("float(x[3])", "float(x[2])", "result"),
        "rows of a matrix in another order": ("+ lane / 2 % 4", "+ 3 - lane / 2 % 4", "result"),
    }),
)
# fmt: on
