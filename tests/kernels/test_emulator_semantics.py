"""Scalars, vectors, rounding and functions, as Metal says they behave."""

import mlx.core as mx
import numpy as np
import pytest

from support.emulator_tiny import RAMP, array, assert_gives, fault, numbers, of_type, run

INT = {"outputs": (((32,), mx.int32),)}
UINT = {"outputs": (((32,), mx.uint32),)}
RNG = np.random.default_rng(0)
I = np.arange(32)  # noqa: E741


# Scalars


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_types_round_after_every_operation_and_conversion(dtype):
    a, b = (array(RNG.standard_normal(32) * 9, dtype) for _ in range(2))
    expected = numbers(a * b + a / b)  # MLX rounds each result
    assert_gives(expected, "T x = a[i] * b[i]; o[i] = x + a[i] / b[i];", a, b, **of_type(dtype))
    ties = 1 + 2.0 ** (-10 if dtype == mx.float16 else -7) * (np.arange(16) + 0.5)  # to even
    values = array(np.concatenate([ties, RNG.standard_normal(14) * 1e3, [np.inf, -np.inf]]))
    assert_gives(numbers(values.astype(dtype)), "o[i] = T(a[i]);", values, **of_type(dtype))


def float32(values) -> np.ndarray:
    return np.asarray(values, np.float32)


X = float32(1 + 2.0**-12 * I)
SCALARS = {
    "NaN in bfloat": (
        "o[i] = T(a[i]);", mx.full((32,), float("nan")), np.nan, of_type(mx.bfloat16)),
    "constants in single precision": (
        "o[i] = 0.1 * a[i] + 1e-3;", RAMP, float32(0.1) * float32(I) + float32(1e-3), {}),
    "literals of half": ("o[i] = float(0.1h) + 0.1h;", RAMP, 2 * np.float64(np.float16(0.1)), {}),
    "multiply and add in two operations": (
        "o[i] = a[i] * a[i] - 1.0f;", array(X), X * X - float32(1), {}),
    "fma in one": (
        "o[i] = fma(a[i], a[i], -1.0f);", array(X), float32(X.astype(np.float64) ** 2 - 1), {}),
    "integers have Metal's sizes and wrap": (
        "uchar c = uchar(i + 250); ushort s = ushort(i + 65530); uint u = i - 1; "
        "o[i] = int(c) + int(s) + int(u) + sizeof(long) + sizeof(half);",
        RAMP, (I + 250) % 256 + (I + 65530) % 65536 + (I - 1) + 8 + 2, INT),
    "as_type keeps the bits": (
        "o[i] = as_type<int>(a[i]);", RAMP, I.astype(np.float32).view(np.int32), INT),
    "infinities": (
        "float x = -INFINITY; o[i] = i % 3 == 0 ? exp(x) : "
        "i % 3 == 1 ? max(x, a[i]) : float(x == -INFINITY);",
        RAMP, np.where(I % 3 == 0, 0, np.where(I % 3 == 1, I, 1)), {}),
    "limits": (
        "o[i] = i % 3 == 0 ? numeric_limits<float>::max() : i % 3 == 1 ? Limits<float>::min : "
        "float(numeric_limits<int>::lowest()) + float(numeric_limits<half>::max());", RAMP,
        np.array([np.finfo(np.float32).max, -np.inf, float32(-(2.0**31) + 65504)])[I % 3], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALARS)
def test_scalars(name):
    body, input_, expected, settings = SCALARS[name]
    assert_gives(expected, body, input_, **settings)


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


def test_integer_functions():
    body = "uint x = a[i]; o[i] = popcount(x) + 100 * clz(x) + "
    body += "10000 * ctz(x) + 1000000 * extract_bits(x, 1u, 2u);"
    values = RNG.integers(1, 2**31, 32).astype(np.uint32)
    wanted = []
    for value in map(int, values):
        text = f"{value:032b}"
        counts = text.count("1") + 100 * text.index("1") + 10000 * text[::-1].index("1")
        wanted.append(counts + 1000000 * (value >> 1 & 3))
    assert_gives(wanted, body, mx.array(values), **UINT)


# Vectors

V = I[:, None] + np.arange(4)
VECTORS = {
    "swizzles read and write": (
        "float4 v = float4(a[i], 1, 2, 3); float4 w = v.wzyx; w.xy = v.ww; v.rgb = w.zxy;\n"
        "o[i] = w.x * 1000 + w.z * 100 + w.w * 10 + v.x + v.y + v.z + v[3];",
        3 * 1000 + 100 + I * 10 + (1 + 3 + 3) + 3, {}),
    "made of scalars and vectors, and converted": (
        "float2 p = float2(a[i], 2.7); float4 q = float4(p, p.yx); int4 n = int4(q); "
        "half4 h = half4(n);\nusing V = vec<T, 4>; V v = V(q); v += V(T(1)); "
        "v = v * vec<T, 4>(T(1), T(2), T(3), T(4));\n"
        "o[i] = n.x + 10 * n.y + int(h.w) + int(v.z) + sizeof(float3);",
        I + 20 + I + 3 * (2 + 1) + 16, of_type(mx.int32)),
    "arithmetic, comparison and functions": (
        "float4 v = float4(a[i]) + float4(0, 1, 2, 3); "
        "float4 w = max(v, float4(3)) * 2.0f - v;\n"
        "o[i] = dot(w, float4(1)) + float(any(v > 30.0f)) + "
        "2 * float(all(v > 30.0f)) + exp(v - v).x;",
        (2 * np.maximum(V, 3) - V).sum(1) + (V > 30).any(1) + 2 * (V > 30).all(1) + 1, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name):
    body, expected, settings = VECTORS[name]
    assert_gives(expected, body, RAMP, **settings)


@pytest.mark.parametrize(
    "dtype", [mx.float16, mx.bfloat16, mx.float32, mx.uint32, mx.uint8], ids=str
)
def test_vectors_in_memory(dtype):
    body = "const device vec<T, 4>* p = (const device vec<T, 4>*)a;\n"
    body += "if (i < 8) {\nvec<T, 4> v = p[i];\n((device vec<T, 4>*)o)[i] = v.wzyx;\n}"
    output, counters = run(body, array(I, dtype), **of_type(dtype))
    np.testing.assert_array_equal(numbers(output).reshape(8, 4), I.reshape(8, 4)[:, ::-1])
    assert counters.buffers["a"].read == counters.buffers["o"].written == 32 * dtype.size


def test_packed_integers_unpack_like_a_quantised_weight():
    words = RNG.integers(0, 2**32, 4).astype(np.uint32)
    wanted = (words[:, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    assert_gives(
        wanted.ravel(), "o[i] = float((a[i / 8] >> (4 * (i % 8))) & 0xf);", mx.array(words)
    )


def test_a_vector_of_the_wrong_number_of_values_does_not_compile():
    fault("compile", "a vector is made of", "o[i] = float4(1, 2).x;")
