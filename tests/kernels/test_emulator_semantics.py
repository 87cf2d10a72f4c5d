"""Types, SIMD-groups and matrices as in Metal; how arrays reach a kernel, and what is counted."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.emulator import Counters, emulated
from kernels_metal.factory import TYPES, Kernel, Launch, executor, launch
from support.emulator_tiny import RAMP, array, assert_gives, fault, of_type, run
from support.kernels import exact

INT = {"outputs": (((32,), mx.int32),)}
MATRIX = {"outputs": (((8, 8), mx.float32),)}
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
RNG = np.random.default_rng(0)
I = np.arange(32)  # noqa: E741
V = I[:, None] + np.arange(4)
SQUARE = np.arange(256, dtype=np.float32).reshape(16, 16)


def float32(values) -> np.ndarray:
    return np.asarray(values, np.float32)


X = float32(1 + 2.0**-12 * I)
# By name: body, what it gives, inputs and settings
GIVES = {
    "NaN in bfloat": (
        "o[i] = T(a[i]);", np.nan, [mx.full((32,), float("nan"))], of_type(mx.bfloat16)),
    "constants in single precision": (
        "o[i] = 0.1 * a[i] + 1e-3;", float32(0.1) * float32(I) + float32(1e-3), [RAMP], {}),
    "literals of half": ("o[i] = float(0.1h) + 0.1h;", 2 * np.float64(np.float16(0.1)), [], {}),
    "multiply and add in two operations": (
        "o[i] = a[i] * a[i] - 1.0f;", X * X - float32(1), [array(X)], {}),
    "fma in one": (
        "o[i] = fma(a[i], a[i], -1.0f);", float32(X.astype(np.float64) ** 2 - 1), [array(X)], {}),
    "integers have Metal's sizes and wrap": (
        "uchar c = uchar(i + 250); ushort s = ushort(i + 65530); uint u = i - 1; "
        "o[i] = int(c) + int(s) + int(u) + sizeof(long) + sizeof(half);",
        (I + 250) % 256 + (I + 65530) % 65536 + (I - 1) + 8 + 2, [], INT),
    "as_type keeps the bits": (
        "o[i] = as_type<int>(a[i]);", float32(I).view(np.int32), [RAMP], INT),
    "vectors made of scalars and vectors, and converted": (
        "float2 p = float2(a[i], 2.7); float4 q = float4(p, p.yx); int4 n = int4(q); "
        "half4 h = half4(n);\nusing V = vec<T, 4>; V v = V(q); v += V(T(1)); "
        "v = v * vec<T, 4>(T(1), T(2), T(3), T(4));\n"
        "o[i] = n.x + 10 * n.y + int(h.w) + int(v.z) + sizeof(float3);",
        I + 20 + I + 3 * (2 + 1) + 16, [RAMP], of_type(mx.int32)),
    "arithmetic, comparison and functions of vectors": (
        "float4 v = float4(a[i]) + float4(0, 1, 2, 3); "
        "float4 w = max(v, float4(3)) * 2.0f - v;\n"
        "o[i] = dot(w, float4(1)) + precise::exp(v - v).x;",
        (2 * np.maximum(V, 3) - V).sum(1) + 1, [RAMP], {}),
    "a scalar comes as a reference": (
        "o[i] = a + b;", 5.5, [mx.array(2.5), mx.array(3, mx.int8)], {}),
    "what other threads wrote to device memory before a barrier": (
        "p[i] = a[i];\nthreadgroup_barrier(mem_flags::mem_device);\no[i] = p[31 - i];", I[::-1],
        [RAMP], {"outputs": (((32,), mx.float32), ((32,), mx.float32))}),
    "halves of one word are two places": (
        "threadgroup half s[32];\ns[i] = a[i];\n" + BARRIER + "o[i] = s[31 - i];", I[::-1],
        [RAMP.astype(mx.float16)], {}),
    **{f"SIMD operations of {dtype}": (
        "o[i] = simd_max(a[i]) + simd_sum(T(1));", 63, [RAMP.astype(dtype)], of_type(dtype))
       for dtype in (mx.float16, mx.bfloat16, mx.int32)},
    "a matrix from one value is diagonal": (
        "simdgroup_matrix<float, 8, 8> z(3.0f);\nsimdgroup_store(z, o, 8);", 3 * np.eye(8), [],
        MATRIX),
    "a matrix in threadgroup memory, with origin and its elements": (
        "threadgroup float s[16 * 16];\nfor (int n = i; n < 256; n += 32) s[n] = a[n];\n" + BARRIER
        + "simdgroup_float8x8 z;\nsimdgroup_load(z, s, 16, ulong2(8, 4));\n"
        "z.thread_elements()[0] *= 2;\nsimdgroup_store(z, o, 8);",
        SQUARE[4:12, 8:16] * (2 - I[:8] % 2), [array(SQUARE)], MATRIX),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVES)
def test_a_kernel_gives(name):
    body, expected, inputs, settings = GIVES[name]
    assert_gives(expected, body, *inputs, **settings)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_types_round_after_every_operation_and_conversion(dtype):
    a, b = (array(RNG.standard_normal(32) * 9, dtype) for _ in range(2))
    expected = exact(a * b + a / b)  # MLX rounds each result
    assert_gives(expected, "T x = a[i] * b[i]; o[i] = x + a[i] / b[i];", a, b, **of_type(dtype))
    ties = 1 + 2.0 ** (-10 if dtype == mx.float16 else -7) * (np.arange(16) + 0.5)  # to even
    values = array(np.concatenate([ties, RNG.standard_normal(14) * 1e3, [np.inf, -np.inf]]))
    assert_gives(exact(values.astype(dtype)), "o[i] = T(a[i]);", values, **of_type(dtype))


MATHS = {
    "exp2(x)": np.exp2,
    "log2(x + 1)": lambda x: np.log2(x + 1),
    "sqrt(x)": np.sqrt,
    "rsqrt(x + 1)": lambda x: 1 / np.sqrt(x + 1),
    "tanh(x)": np.tanh,
    "precise::sin(x)": np.sin,
    "precise::cos(9 * x)": lambda x: np.cos(9 * x),
    "floor(x)": np.floor,
    "ceil(x)": np.ceil,
    "round(x)": lambda x: np.floor(x + 0.5),
    "trunc(-x)": lambda x: np.trunc(-x),
    "abs(x - 1)": lambda x: np.abs(x - 1),
    "pow(x, 1.5f)": lambda x: x**1.5,
    "metal::precise::exp(x)": np.exp,
    "fast::exp(-x)": lambda x: np.exp(-x),
}


def assert_columns(wanted, rtol: float, inputs=(RAMP,), before: str = "") -> Counters:
    """One column of the output for each expression; `before` stands before them."""
    width = len(wanted)
    body = before + "\n".join(f"o[i * {width} + {n}] = {f};" for n, f in enumerate(wanted))
    output, counters = run(body, *inputs, outputs=(((32, width), mx.float32),))
    columns = np.stack(np.broadcast_arrays(*wanted.values()), axis=1)
    np.testing.assert_allclose(exact(output), columns, rtol=rtol, atol=2e-6)
    return counters


def test_functions_of_one_number():
    x = np.linspace(0, 3, 32).astype(np.float32)
    wanted = {name: f(x.astype(np.float64)) for name, f in MATHS.items()}
    assert_columns(wanted, 2e-6, [array(x)], "float x = a[i];\n")


@pytest.mark.parametrize("angle", [2.0, 9000.0])
@pytest.mark.parametrize("name", ["sin", "cos"])
def test_functions_that_nobody_asked_to_be_precise_are_not(name, angle):
    x = np.linspace(angle / 2, angle, 32).astype(np.float32)
    off = [f"abs({kind}{name}(a[i]) - precise::{name}(a[i]))" for kind in ("", "fast::")]
    output, _ = run(f"o[i] = min({off[0]}, {off[1]});", array(x))
    assert (exact(output[0]) > 2.0**-14).all() and (exact(output[0]) < 2.0**-10).all()


# SIMD-groups

SIMD = {
    "simd_shuffle(a[i], ushort(31 - lane))": I[::-1],
    "simd_shuffle_xor(a[i], ushort(5))": I ^ 5,
    "simd_shuffle_up(a[i], ushort(3))": np.where(I < 3, I, I - 3),
    "simd_shuffle_down(a[i], ushort(3))": np.where(I > 28, I, I + 3),
    "simd_broadcast(a[i], ushort(7))": 7,
    "simd_sum(float2(a[i], 1)).x": 496,
}


def test_simd_operations_of_a_full_group():
    assert assert_columns(SIMD, 1e-5).simd_operations == len(SIMD)


@pytest.mark.parametrize("count", [1, 7, 31, 33, 45])
def test_simd_operations_of_a_group_that_is_not_full(count):
    body = "o[i * 3] = simd_sum(a[i]); o[i * 3 + 1] = simd_max(a[i]);\n"
    body += "o[i * 3 + 2] = simd_min(a[i]);"
    a, groups = np.arange(count) + 1, []
    for first in range(0, count, 32):
        part = a[first : first + 32]
        columns = (part.sum(), part.max(), part.min())
        groups.append(np.stack([np.broadcast_to(column, part.shape) for column in columns], 1))
    settings = {"grid": (count, 1, 1), "threadgroup": (64, 1, 1)}
    outputs = (((count, 3), mx.float32),)
    assert_gives(np.concatenate(groups), body, array(a), **settings, outputs=outputs)


def test_the_position_attributes():
    x, y = np.arange(60) % 10, np.arange(60) // 10
    width = np.minimum(4, 10 - x // 4 * 4)
    index = x % 4 + y * width
    wanted = {
        "thread_position_in_threadgroup.y": y,
        "threadgroup_position_in_grid.x": x // 4,
        "thread_index_in_threadgroup": index,
        "simdgroup_index_in_threadgroup": index // 32,
        "thread_index_in_simdgroup": index % 32,
        "threads_per_threadgroup.x": width,
        "threads_per_grid.y": 6,
        "threadgroups_per_grid.x": 3,
        "simdgroups_per_threadgroup": (width * 6 + 31) // 32,
        "dispatch_threads_per_threadgroup.x": 4,
        "thread_execution_width": 32,
    }
    body = "uint at = thread_position_in_grid.y * 10 + i;\n"
    body += "\n".join(f"o[at * {len(wanted)} + {n}] = {name};" for n, name in enumerate(wanted))
    rows = np.stack(np.broadcast_arrays(*wanted.values()), axis=1)
    settings = {"grid": (10, 6, 1), "threadgroup": (4, 6, 1)}
    assert_gives(rows, body, **settings, outputs=((rows.shape, mx.uint32),))


# SIMD-group matrices

LOADS = """
simdgroup_matrix<T, 8, 8> x, y;
simdgroup_matrix<float, 8, 8> z = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
"""


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_matrices_multiply_and_add(dtype):
    a, b = (array(RNG.standard_normal((8, 8)), dtype) for _ in range(2))
    body = LOADS + "simdgroup_load(x, a, 8);\nsimdgroup_load(y, b, 8, ulong2(0, 0), true);\n"
    body += "simdgroup_multiply_accumulate(z, x, y, z);\nsimdgroup_store(z, o, 8);"
    output, counters = run(body, a, b, template=(("T", dtype),), outputs=(((8, 8), mx.float32),))
    np.testing.assert_allclose(exact(output), exact(a) @ exact(b).T + 1, rtol=1e-5, atol=1e-5)
    assert counters.buffers["a"].read == 64 * dtype.size
    assert (counters.simd_operations, counters.matrix_products) == (4, 1)


# Constant or device


def test_an_input_below_8_elements_is_constant_and_from_8_on_device():
    seven, eight = mx.arange(7).astype(mx.float32), mx.arange(8).astype(mx.float32)
    as_device, as_constant = (
        f"const {s} float* p = a; o[i] = p[1];" for s in ("device", "constant")
    )
    run(as_device, eight)
    run(as_constant, seven)
    fault("address space", "__constant", as_device, seven)
    fault("address space", "__global", as_constant, eight)
    for few_or_many in (seven, eight):
        assert_gives(1, "o[i] = a[1];", few_or_many)


@pytest.mark.parametrize("dtype", [t for t in TYPES if t != mx.complex64], ids=str)
def test_every_type_arrives_and_leaves_unchanged(dtype):
    values = (mx.random.normal((32,), key=mx.random.key(1)) * 40).astype(dtype)
    output, _ = run("o[i] = a[i];", values, outputs=(((4, 8), dtype),))
    assert output.dtype == dtype
    assert output.shape == (4, 8)
    assert mx.array_equal(output.reshape(-1), values)


# Strides

STRIDED = "const int64_t n = a_shape[1];\n"
STRIDED += "o[i] = a[(i / n) * a_strides[0] + (i % n) * a_strides[1]];"


def views() -> dict[str, mx.array]:
    base = mx.arange(96).astype(mx.float32).reshape(8, 12)
    return {
        "transposed": base[:4, :8].T,
        "rows of a larger array": base[:4, :8],
        "every second column": base[:4, ::2][:, :6],
        "backwards": base[4::-1, ::-1],
        "one row, many times": mx.broadcast_to(base[3], (3, 12)),
        "contiguous": base,
    }


@pytest.mark.parametrize("name", views())
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_strided_input_is_read_through_its_strides(name, dtype):
    a = views()[name].astype(dtype)
    settings = {"grid": (a.size, 1, 1), "outputs": ((a.shape, dtype),)}
    for contiguous in (False, True):
        assert_gives(exact(a), STRIDED, a, **settings, ensure_row_contiguous=contiguous)


# Grids


@pytest.mark.parametrize(
    ("grid", "threadgroup"),
    [
        ((50, 1, 1), (32, 1, 1)),
        ((5, 1, 1), (64, 1, 1)),
        ((7, 5, 3), (4, 2, 2)),
        ((1, 1, 1), (1, 1, 1)),
    ],
)
def test_a_grid_that_is_no_multiple_of_the_threadgroup_runs_every_thread_once(grid, threadgroup):
    body = "uint3 p = thread_position_in_grid; uint3 n = threads_per_grid;\n"
    body += "uint at = p.x + n.x * (p.y + n.y * p.z); o[at] = at;"
    count = int(np.prod(grid))
    settings = {"grid": grid, "threadgroup": threadgroup, "outputs": (((count,), mx.uint32),)}
    counters = assert_gives(np.arange(count), body, **settings)
    groups = [-(-n // min(n, t)) for n, t in zip(grid, threadgroup, strict=True)]
    assert (counters.threads, counters.threadgroups) == (count, np.prod(groups))


# Counters


def test_traffic_counts_every_access_and_what_a_threadgroup_fetches():
    body = "float x = 0;\nfor (int n = 0; n < 32; ++n) x += a[n];\no[i] = x;"
    _, counters = run(body, RAMP, grid=(64, 1, 1), outputs=(((64,), mx.float32),))
    a, o = counters.buffers["a"], counters.buffers["o"]
    assert (a.size, a.read, a.fetched, a.written) == (128, 64 * 128, 2 * 128, 0)
    assert (o.size, o.read, o.written) == (256, 0, 256)


def test_operations_count_once_for_the_threads_that_take_part():
    body = "threadgroup float s[64];\ns[i % 64] = simd_sum(a[i % 32]);\n"
    body += "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    body += "simdgroup_barrier(mem_flags::mem_none);\no[i] = s[0];"
    _, counters = run(
        body, RAMP, grid=(128, 1, 1), threadgroup=(64, 1, 1), outputs=(((128,), mx.float32),)
    )
    assert (counters.threads, counters.threadgroups, counters.threadgroup_bytes) == (128, 2, 256)
    assert (counters.simd_operations, counters.barriers, counters.simdgroup_barriers) == (4, 2, 4)
    assert (counters.device_accesses, counters.threadgroup_accesses) == (2 * 128, 2 * 128)


# The block


def test_launches_are_emulated_inside_the_block_only():
    before = executor()
    with pytest.raises(KeyError), emulated() as outer:
        assert executor() is outer
        with emulated() as inner:
            assert executor() is inner
        assert executor() is outer
        raise KeyError
    assert executor() is before


def test_a_launch_that_nothing_can_run_names_the_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    plan = Launch((1, 1, 1), (1, 1, 1), ((1,),), (mx.float32,))
    with pytest.raises(RuntimeError, match="kernel nobody: "):
        launch(Kernel("nobody", (), ("o",), folder=tmp_path), [], plan)
