"""Scalars, vectors, SIMD-groups and their matrices, as Metal says they behave."""

import mlx.core as mx
import numpy as np
import pytest

from support.emulator_tiny import RAMP, array, assert_gives, of_type, run
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
        "float4 w = max(v, float4(3)) * 2.0f - v;\no[i] = dot(w, float4(1)) + exp(v - v).x;",
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
    "exp(x)": np.exp,
    "exp2(x)": np.exp2,
    "log(x + 1)": np.log1p,
    "log2(x + 1)": lambda x: np.log2(x + 1),
    "sqrt(x)": np.sqrt,
    "rsqrt(x + 1)": lambda x: 1 / np.sqrt(x + 1),
    "tanh(x)": np.tanh,
    "floor(x)": np.floor,
    "ceil(x)": np.ceil,
    "round(x)": lambda x: np.floor(x + 0.5),
    "trunc(-x)": lambda x: np.trunc(-x),
    "abs(x - 1)": lambda x: np.abs(x - 1),
    "pow(x, 1.5f)": lambda x: x**1.5,
    "max(x, 1.0f)": lambda x: np.maximum(x, 1),
    "min(x, 1.0f)": lambda x: np.minimum(x, 1),
    "clamp(x, 0.5f, 2.0f)": lambda x: x.clip(0.5, 2),
    "metal::precise::exp(x)": np.exp,
    "fast::exp(-x)": lambda x: np.exp(-x),
}


def test_functions_of_one_number():
    x = np.linspace(0, 3, 32).astype(np.float32)
    body = "float x = a[i];\n" + "\n".join(
        f"o[i * {len(MATHS)} + {n}] = {f};" for n, f in enumerate(MATHS)
    )
    output, _ = run(body, array(x), outputs=(((32, len(MATHS)), mx.float32),))
    wanted = np.stack([f(x.astype(np.float64)) for f in MATHS.values()], axis=1)
    np.testing.assert_allclose(exact(output), wanted, rtol=2e-6, atol=2e-6)


# SIMD-groups

SIMD = {
    "simd_sum(a[i])": np.full(32, 496),
    "simd_max(a[i])": np.full(32, 31),
    "simd_min(-a[i])": np.full(32, -31),
    "simd_shuffle(a[i], ushort(31 - lane))": I[::-1],
    "simd_shuffle_xor(a[i], ushort(5))": I ^ 5,
    "simd_shuffle_up(a[i], ushort(3))": np.where(I < 3, I, I - 3),
    "simd_shuffle_down(a[i], ushort(3))": np.where(I > 28, I, I + 3),
    "simd_broadcast(a[i], ushort(7))": np.full(32, 7),
    "simd_sum(float2(a[i], 1)).y": np.full(32, 32),
}


def test_simd_operations_of_a_full_group():
    body = "\n".join(f"o[i * {len(SIMD)} + {n}] = {f};" for n, f in enumerate(SIMD))
    output, counters = run(body, RAMP, outputs=(((32, len(SIMD)), mx.float32),))
    np.testing.assert_allclose(exact(output), np.stack(list(SIMD.values()), axis=1), rtol=1e-5)
    assert counters.simd_operations == len(SIMD)


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
    def wanted(x, y):
        width = min(4, 10 - x // 4 * 4)
        index = x % 4 + y * width
        return {
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

    names = list(wanted(0, 0))
    body = "uint at = thread_position_in_grid.y * 10 + i;\n"
    body += "\n".join(f"o[at * {len(names)} + {n}] = {name};" for n, name in enumerate(names))
    rows = [list(wanted(x, y).values()) for y in range(6) for x in range(10)]
    settings = {"grid": (10, 6, 1), "threadgroup": (4, 6, 1)}
    outputs = (((60, len(names)), mx.uint32),)
    counters = assert_gives(rows, body, **settings, outputs=outputs)
    assert (counters.threads, counters.threadgroups) == (60, 3)


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
    assert counters.simd_operations == 4
