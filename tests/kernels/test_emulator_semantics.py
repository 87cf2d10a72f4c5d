"""Scalars, vectors, SIMD-groups, matrices and atomics, as Metal says they behave."""

import mlx.core as mx
import numpy as np
import pytest

from support.emulator_tiny import RAMP, array, assert_gives, fault, numbers, of_type, run

INT = {"outputs": (((32,), mx.int32),)}
UINT = {"outputs": (((32,), mx.uint32),)}
MATRIX = {"outputs": (((8, 8), mx.float32),)}
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
RNG = np.random.default_rng(0)
I = np.arange(32)  # noqa: E741
V = I[:, None] + np.arange(4)
WORDS = RNG.integers(0, 2**32, 4).astype(np.uint32)
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
    "integers divide and shift": ("int n = 5 + 0 * i; o[i] = 20 / n << n;", 128, [], INT),
    "bits of integers": (
        "uint n = i % 29; uint x = 5u << n; o[i] = popcount(x) + 100 * clz(x) + 10000 * ctz(x) + "
        "1000000 * extract_bits(x, 1u, 2u);",
        2 + 100 * (29 - I % 29) + 10_000 * (I % 29) + 1_000_000 * (5 << I % 29 >> 1 & 3), [], UINT),
    "a quantised weight's packed integers": (
        "o[i] = float((a[i / 8] >> (4 * (i % 8))) & 0xf);",
        (WORDS[:, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).ravel(), [mx.array(WORDS)],
        {}),
    "as_type keeps the bits": (
        "o[i] = as_type<int>(a[i]);", float32(I).view(np.int32), [RAMP], INT),
    "infinities": (
        "float x = -INFINITY; o[i] = i % 3 == 0 ? exp(x) : "
        "i % 3 == 1 ? max(x, a[i]) : float(x == -INFINITY);",
        np.where(I % 3 == 0, 0, np.where(I % 3 == 1, I, 1)), [RAMP], {}),
    "limits": (
        "o[i] = i % 3 == 0 ? numeric_limits<float>::max() : i % 3 == 1 ? Limits<float>::min : "
        "float(numeric_limits<int>::lowest()) + float(numeric_limits<half>::max());",
        np.array([np.finfo(np.float32).max, -np.inf, float32(-(2.0**31) + 65504)])[I % 3], [], {}),
    "swizzles read and write": (
        "float4 v = float4(a[i], 1, 2, 3); float4 w = v.wzyx; w.xy = v.ww; v.rgb = w.zxy;\n"
        "o[i] = w.x * 1000 + w.z * 100 + w.w * 10 + v.x + v.y + v.z + v[3];",
        3 * 1000 + 100 + I * 10 + (1 + 3 + 3) + 3, [RAMP], {}),
    "vectors made of scalars and vectors, and converted": (
        "float2 p = float2(a[i], 2.7); float4 q = float4(p, p.yx); int4 n = int4(q); "
        "half4 h = half4(n);\nusing V = vec<T, 4>; V v = V(q); v += V(T(1)); "
        "v = v * vec<T, 4>(T(1), T(2), T(3), T(4));\n"
        "o[i] = n.x + 10 * n.y + int(h.w) + int(v.z) + sizeof(float3);",
        I + 20 + I + 3 * (2 + 1) + 16, [RAMP], of_type(mx.int32)),
    "arithmetic, comparison and functions of vectors": (
        "float4 v = float4(a[i]) + float4(0, 1, 2, 3); "
        "float4 w = max(v, float4(3)) * 2.0f - v;\n"
        "o[i] = dot(w, float4(1)) + float(any(v > 30.0f)) + "
        "2 * float(all(v > 30.0f)) + exp(v - v).x;",
        (2 * np.maximum(V, 3) - V).sum(1) + (V > 30).any(1) + 2 * (V > 30).all(1) + 1, [RAMP], {}),
    "a scalar comes as a reference": (
        "o[i] = a + b;", 5.5, [mx.array(2.5), mx.array(3, mx.int8)], {}),
    "shapes, strides and dimensions of an array": (
        "o[i] = a_ndim * 1000 + a_shape[0] * 100 + a_shape[1] * 10 + a_strides[0];", 2233,
        [mx.zeros((2, 3))], {}),
    "what other threads wrote before a barrier": (
        "threadgroup float s[32];\ns[i] = a[i];\n" + BARRIER + "float x = s[31 - i];\n" + BARRIER
        + "s[i] = x;\n" + BARRIER + "o[i] = s[i];", I[::-1], [RAMP], {}),
    "device memory too": (
        "p[i] = a[i];\nthreadgroup_barrier(mem_flags::mem_device);\no[i] = p[31 - i];", I[::-1],
        [RAMP], {"outputs": (((32,), mx.float32), ((32,), mx.float32))}),
    "halves of one word are two places": (
        "threadgroup half s[32];\ns[i] = a[i];\n" + BARRIER + "o[i] = s[31 - i];", I[::-1],
        [RAMP.astype(mx.float16)], {}),
    "an initial value stands for a write": ("o[i] += a[i];", I + 3, [RAMP], {"init_value": 3}),
    **{f"an initial value of {dtype}": (
        "if (i == 3) o[i] = 9;", [2, 2, 2, 9, 2], [],
        {"init_value": 2, "outputs": (((5,), dtype),)})
       for dtype in (mx.float32, mx.bfloat16, mx.int32)},
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
    "atomics in threadgroup memory": (
        "threadgroup atomic_uint s[2];\n"
        "if (i < 2) atomic_store_explicit(&s[i], 7u, memory_order_relaxed);\n" + BARRIER
        + "atomic_fetch_max_explicit(&s[i % 2], i, memory_order_relaxed);\n" + BARRIER
        + "o[i] = atomic_load_explicit(&s[i % 2], memory_order_relaxed);", 30 + I % 2, [], UINT),
    "compare and exchange": (
        "uint seen = 0;\nwhile (!atomic_compare_exchange_weak_explicit(&o[0], &seen, seen + i, "
        "memory_order_relaxed, memory_order_relaxed)) {}\n", 496, [],
        {"outputs": (((1,), mx.uint32),), "atomic_outputs": True, "init_value": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVES)
def test_a_kernel_gives(name):
    body, expected, inputs, settings = GIVES[name]
    assert_gives(expected, body, *inputs, **settings)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_types_round_after_every_operation_and_conversion(dtype):
    a, b = (array(RNG.standard_normal(32) * 9, dtype) for _ in range(2))
    expected = numbers(a * b + a / b)  # MLX rounds each result
    assert_gives(expected, "T x = a[i] * b[i]; o[i] = x + a[i] / b[i];", a, b, **of_type(dtype))
    ties = 1 + 2.0 ** (-10 if dtype == mx.float16 else -7) * (np.arange(16) + 0.5)  # to even
    values = array(np.concatenate([ties, RNG.standard_normal(14) * 1e3, [np.inf, -np.inf]]))
    assert_gives(numbers(values.astype(dtype)), "o[i] = T(a[i]);", values, **of_type(dtype))


MATHS = {
    "exp(x)": np.exp,
    "exp2(x)": np.exp2,
    "log(x + 1)": np.log1p,
    "log2(x + 1)": lambda x: np.log2(x + 1),
    "sqrt(x)": np.sqrt,
    "rsqrt(x + 1)": lambda x: 1 / np.sqrt(x + 1),
    "sin(x)": np.sin,
    "cos(x)": np.cos,
    "tanh(x)": np.tanh,
    "floor(x)": np.floor,
    "ceil(x)": np.ceil,
    "round(x)": lambda x: np.floor(x + 0.5),
    "trunc(-x)": lambda x: np.trunc(-x),
    "fabs(-x)": np.abs,
    "abs(x - 1)": lambda x: np.abs(x - 1),
    "pow(x, 1.5f)": lambda x: x**1.5,
    "max(x, 1.0f)": lambda x: np.maximum(x, 1),
    "min(x, 1.0f)": lambda x: np.minimum(x, 1),
    "clamp(x, 0.5f, 2.0f)": lambda x: x.clip(0.5, 2),
    "sign(x - 1)": lambda x: np.sign(x - 1),
    "mix(x, 5.0f, 0.25f)": lambda x: x + (5 - x) / 4,
    "select(x, 9.0f, x > 1.0f)": lambda x: np.where(x > 1, 9, x),
    "fmod(x, 0.7f)": lambda x: np.fmod(x, 0.7),
    "metal::precise::exp(x)": np.exp,
    "fast::exp(-x)": lambda x: np.exp(-x),
    "step(1.0f, x)": lambda x: (x >= 1) * 1,
    "isnan(x) ? 1.0f : isinf(x / 0.0f) ? 2.0f : 3.0f": lambda x: np.where(x == 0, 3, 2),
}


def test_functions_of_one_number():
    x = np.linspace(0, 3, 32).astype(np.float32)
    body = "float x = a[i];\n" + "\n".join(
        f"o[i * {len(MATHS)} + {n}] = {f};" for n, f in enumerate(MATHS)
    )
    output, _ = run(body, array(x), outputs=(((32, len(MATHS)), mx.float32),))
    wanted = np.stack([f(x.astype(np.float64)) for f in MATHS.values()], axis=1)
    wanted[0, -1] = 3
    np.testing.assert_allclose(numbers(output), wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "dtype", [mx.float16, mx.bfloat16, mx.float32, mx.uint32, mx.uint8], ids=str
)
def test_vectors_in_memory(dtype):
    body = "const device vec<T, 4>* p = (const device vec<T, 4>*)a;\n"
    body += "if (i < 8) {\nvec<T, 4> v = p[i];\n((device vec<T, 4>*)o)[i] = v.wzyx;\n}"
    output, counters = run(body, array(I, dtype), **of_type(dtype))
    np.testing.assert_array_equal(numbers(output).reshape(8, 4), I.reshape(8, 4)[:, ::-1])
    assert counters.buffers["a"].read == counters.buffers["o"].written == 32 * dtype.size


# SIMD-groups

SIMD = {
    "simd_sum(a[i])": np.full(32, 496),
    "simd_max(a[i])": np.full(32, 31),
    "simd_min(-a[i])": np.full(32, -31),
    "simd_product(a[i] / 31 + 1.0f)": np.full(32, np.prod(I / 31 + 1)),
    "simd_prefix_inclusive_sum(a[i])": I.cumsum(),
    "simd_prefix_exclusive_sum(a[i])": I.cumsum() - I,
    "simd_shuffle(a[i], ushort(31 - lane))": I[::-1],
    "simd_shuffle_xor(a[i], ushort(5))": I ^ 5,
    "simd_shuffle_up(a[i], ushort(3))": np.where(I < 3, I, I - 3),
    "simd_shuffle_down(a[i], ushort(3))": np.where(I > 28, I, I + 3),
    "simd_shuffle_rotate_up(a[i], ushort(3))": (I - 3) % 32,
    "simd_shuffle_rotate_down(a[i], ushort(3))": (I + 3) % 32,
    "simd_shuffle_and_fill_up(a[i], a[i] + 100, ushort(3))": np.where(I < 3, I + 129, I - 3),
    "simd_shuffle_and_fill_down(a[i], a[i] + 100, ushort(3))": np.where(I > 28, I + 71, I + 3),
    "simd_broadcast(a[i], ushort(7))": np.full(32, 7),
    "simd_broadcast_first(a[i] + 2)": np.full(32, 2),
    "float(simd_any(a[i] > 30))": np.ones(32),
    "float(simd_all(a[i] > 0))": np.zeros(32),
    "float(simd_is_first())": I == 0,
    "float(simd_and(i | 8) + simd_or(i) + simd_xor(i))": np.full(32, 39),
    "float(ulong(simd_ballot(i < 4)))": np.full(32, 15),
    "float(ulong(simd_active_threads_mask()) >> 28)": np.full(32, 15),
    "quad_sum(a[i])": I // 4 * 16 + 6,
    "quad_max(a[i])": I // 4 * 4 + 3,
    "quad_shuffle_xor(a[i], ushort(1))": I ^ 1,
    "quad_broadcast(a[i], ushort(2))": I // 4 * 4 + 2,
    "simd_sum(float2(a[i], 1)).y": np.full(32, 32),
}


def test_simd_operations_of_a_full_group():
    body = "\n".join(f"o[i * {len(SIMD)} + {n}] = {f};" for n, f in enumerate(SIMD))
    output, counters = run(body, RAMP, outputs=(((32, len(SIMD)), mx.float32),))
    np.testing.assert_allclose(numbers(output), np.stack(list(SIMD.values()), axis=1), rtol=1e-5)
    assert counters.simd_operations == len(SIMD) + 4  # two fill, and shuffle twice; one has three


@pytest.mark.parametrize("count", [1, 7, 31, 33, 45])
def test_simd_operations_of_a_group_that_is_not_full(count):
    body = "o[i * 4] = simd_sum(a[i]); o[i * 4 + 1] = simd_max(a[i]);\n"
    body += "o[i * 4 + 2] = simd_min(a[i]); o[i * 4 + 3] = simd_prefix_inclusive_sum(a[i]);"
    a, groups = np.arange(count) + 1, []
    for first in range(0, count, 32):
        part = a[first : first + 32]
        columns = (part.sum(), part.max(), part.min(), part.cumsum())
        groups.append(np.stack([np.broadcast_to(column, part.shape) for column in columns], 1))
    settings = {"grid": (count, 1, 1), "threadgroup": (64, 1, 1)}
    outputs = (((count, 4), mx.float32),)
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


# SIMD-group matrices and atomics

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
    np.testing.assert_allclose(numbers(output), numbers(a) @ numbers(b).T + 1, rtol=1e-5, atol=1e-5)
    assert counters.buffers["a"].read == 64 * dtype.size
    assert counters.simd_operations == 4


def test_atomic_outputs_add_up_over_all_threadgroups():
    body = "atomic_fetch_add_explicit(&o[i % 4], a[i], memory_order_relaxed);"
    settings = {"outputs": (((4,), mx.float32),), "atomic_outputs": True, "threadgroup": (8, 1, 1)}
    wanted = np.arange(32).reshape(8, 4).sum(0)
    assert assert_gives(wanted, body, RAMP, init_value=0, **settings).atomics == 32
    fault("uninitialised", "of o", body, RAMP, **settings)
    fault("address space", "no viable overloaded '='", "o[i % 4] = a[i];", RAMP, **settings)
