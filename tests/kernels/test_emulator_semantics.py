"""Scalars, vectors, rounding and functions, as Metal says they behave."""

import mlx.core as mx
import numpy as np
import pytest

from support.emulator_tiny import RAMP, fault, numbers, run

INT = (((32,), mx.int32),)
UINT = (((32,), mx.uint32),)
RNG = np.random.default_rng(0)


def of_type(dtype: mx.Dtype) -> dict:
    return {"template": (("T", dtype),), "outputs": (((32,), dtype),)}


def array(values, dtype=mx.float32) -> mx.array:
    return mx.array(np.asarray(values)).astype(dtype)


# Scalars


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_types_round_after_every_operation(dtype):
    a, b = (array(RNG.standard_normal(32) * 9, dtype) for _ in range(2))
    output, _ = run("T x = a[i] * b[i]; o[i] = x + a[i] / b[i];", a, b, **of_type(dtype))
    expected = a * b + a / b  # MLX rounds each result
    np.testing.assert_array_equal(numbers(output), numbers(expected))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_conversion_from_float_rounds_to_nearest_even(dtype):
    step = 2.0 ** (-10 if dtype == mx.float16 else -7)
    ties = 1 + step * (np.arange(32) + 0.5)
    values = array(np.concatenate([ties[:16], RNG.standard_normal(14) * 1e3, [np.inf, -np.inf]]))
    output, _ = run("o[i] = T(a[i]);", values, **of_type(dtype))
    np.testing.assert_array_equal(numbers(output), numbers(values.astype(dtype)))


def test_nan_stays_nan_in_bfloat():
    output, _ = run("o[i] = T(a[i]);", mx.full((32,), float("nan")), **of_type(mx.bfloat16))
    assert np.isnan(numbers(output)).all()


def test_constants_are_single_precision():
    output, _ = run("o[i] = 0.1 * a[i] + 1e-3;", RAMP)
    expected = np.float32(0.1) * np.arange(32, dtype=np.float32) + np.float32(1e-3)
    np.testing.assert_array_equal(numbers(output), expected.astype(np.float64))


def test_literals_of_half():
    output, _ = run("o[i] = float(0.1h) + 0.1h;", RAMP)
    assert numbers(output)[0] == 2 * np.float64(np.float16(0.1))


def test_multiply_and_add_stay_two_operations_and_fma_is_one():
    a = array(1 + 2.0**-12 * np.arange(32))
    separate, _ = run("o[i] = a[i] * a[i] - 1.0f;", a)
    fused, _ = run("o[i] = fma(a[i], a[i], -1.0f);", a)
    x = np.array(a)
    np.testing.assert_array_equal(numbers(separate), (x * x - np.float32(1)).astype(np.float64))
    exact = x.astype(np.float64) ** 2 - 1
    np.testing.assert_array_equal(numbers(fused), exact.astype(np.float32).astype(np.float64))


def test_integers_have_metal_sizes_and_wrap():
    body = "uchar c = uchar(i + 250); ushort s = ushort(i + 65530); uint u = i - 1; "
    output, _ = run(
        body + "o[i] = int(c) + int(s) + int(u) + sizeof(long) + sizeof(half);", outputs=INT
    )
    i = np.arange(32)
    expected = (i + 250) % 256 + (i + 65530) % 65536 + (i - 1) + 8 + 2
    np.testing.assert_array_equal(np.array(output), expected)


def test_as_type_keeps_the_bits():
    output, _ = run("o[i] = as_type<int>(a[i]);", RAMP, outputs=INT)
    np.testing.assert_array_equal(np.array(output), np.arange(32, dtype=np.float32).view(np.int32))


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


def test_infinities_behave():
    body = "float x = -INFINITY; o[i] = i == 0 ? exp(x) : "
    body += "i == 1 ? max(x, a[i]) : i == 2 ? float(x == -INFINITY) : 0;"
    np.testing.assert_array_equal(numbers(run(body, RAMP)[0])[:3], [0, 1, 1])


def test_integer_functions():
    body = "uint x = a[i]; o[i] = popcount(x) + 100 * clz(x) + "
    body += "10000 * ctz(x) + 1000000 * extract_bits(x, 1u, 2u);"
    values = RNG.integers(1, 2**31, 32).astype(np.uint32)
    output, _ = run(body, mx.array(values), outputs=UINT)
    texts = [f"{v:032b}" for v in values]
    wanted = [
        t.count("1") + 100 * t.index("1") + 10000 * t[::-1].index("1") + 1000000 * (int(v) >> 1 & 3)
        for t, v in zip(texts, values, strict=True)
    ]
    np.testing.assert_array_equal(np.array(output), wanted)


def test_limits():
    body = "o[i] = i == 0 ? numeric_limits<float>::max() : i == 1 ? Limits<float>::min : "
    output, _ = run(
        body + "float(numeric_limits<int>::lowest()) + float(numeric_limits<half>::max());"
    )
    assert numbers(output)[0] == np.finfo(np.float32).max
    assert numbers(output)[1] == -np.inf
    assert numbers(output)[2] == np.float32(-(2.0**31) + 65504)


# Vectors


def test_swizzles_read_and_write():
    body = "float4 v = float4(a[i], 1, 2, 3); float4 w = v.wzyx; w.xy = v.ww; v.rgb = w.zxy;\n"
    output, _ = run(
        body + "o[i] = w.x * 1000 + w.z * 100 + w.w * 10 + v.x + v.y + v.z + v[3];", RAMP
    )
    i = np.arange(32)
    w = [3, 3, 1, i]
    wanted = w[0] * 1000 + w[2] * 100 + w[3] * 10 + (w[2] + w[0] + w[1]) + 3
    np.testing.assert_array_equal(numbers(output), wanted)


def test_vectors_are_made_of_scalars_and_vectors_and_converted():
    body = "float2 p = float2(a[i], 2.7); float4 q = float4(p, p.yx); "
    body += "int4 n = int4(q); half4 h = half4(n);\n"
    body += "using V = vec<T, 4>; V v = V(q); v += V(T(1)); "
    body += "v = v * vec<T, 4>(T(1), T(2), T(3), T(4));\n"
    output, _ = run(
        body + "o[i] = n.x + 10 * n.y + int(h.w) + int(v.z) + sizeof(float3);",
        RAMP,
        **of_type(mx.int32),
    )
    i = np.arange(32)
    np.testing.assert_array_equal(np.array(output), i + 20 + i + 3 * (2 + 1) + 16)


def test_vector_arithmetic_comparison_and_functions():
    body = (
        "float4 v = float4(a[i]) + float4(0, 1, 2, 3); float4 w = max(v, float4(3)) * 2.0f - v;\n"
    )
    body += "o[i] = dot(w, float4(1)) + float(any(v > 30.0f)) + "
    body += "2 * float(all(v > 30.0f)) + exp(v - v).x;"
    output, _ = run(body, RAMP)
    v = np.arange(32)[:, None] + np.arange(4)
    wanted = (2 * np.maximum(v, 3) - v).sum(1) + (v > 30).any(1) + 2 * (v > 30).all(1) + 1
    np.testing.assert_array_equal(numbers(output), wanted)


@pytest.mark.parametrize(
    "dtype", [mx.float16, mx.bfloat16, mx.float32, mx.uint32, mx.uint8], ids=str
)
def test_vectors_in_memory(dtype):
    body = "const device vec<T, 4>* p = (const device vec<T, 4>*)a;\n"
    body += "if (i < 8) {\nvec<T, 4> v = p[i];\n"
    body += "((device vec<T, 4>*)o)[i] = v.wzyx;\n}"
    output, counters = run(body, array(np.arange(32), dtype), **of_type(dtype))
    np.testing.assert_array_equal(
        numbers(output).reshape(8, 4), np.arange(32).reshape(8, 4)[:, ::-1]
    )
    assert counters.buffers["a"].read == counters.buffers["o"].written == 32 * dtype.size


def test_packed_integers_unpack_like_a_quantised_weight():
    words = mx.array(RNG.integers(0, 2**32, 4).astype(np.uint32))
    output, _ = run("o[i] = float((a[i / 8] >> (4 * (i % 8))) & 0xf);", words)
    wanted = (np.array(words)[:, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    np.testing.assert_array_equal(numbers(output).reshape(4, 8), wanted)


def test_a_vector_of_the_wrong_number_of_values_does_not_compile():
    fault("compile", "a vector is made of", "o[i] = float4(1, 2).x;")
