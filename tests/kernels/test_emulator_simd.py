"""SIMD-group operations, matrices, thread positions and atomics, as Metal says they behave."""

import mlx.core as mx
import numpy as np
import pytest

from support.emulator_tiny import RAMP, array, assert_gives, fault, numbers, of_type, run

UINT = (((32,), mx.uint32),)
RNG = np.random.default_rng(0)


# SIMD-groups

LANES = np.arange(32)
SIMD = {
    "simd_sum(a[i])": np.full(32, 496),
    "simd_max(a[i])": np.full(32, 31),
    "simd_min(-a[i])": np.full(32, -31),
    "simd_product(a[i] / 31 + 1.0f)": np.full(32, np.prod(LANES / 31 + 1)),
    "simd_prefix_inclusive_sum(a[i])": LANES.cumsum(),
    "simd_prefix_exclusive_sum(a[i])": LANES.cumsum() - LANES,
    "simd_shuffle(a[i], ushort(31 - lane))": LANES[::-1],
    "simd_shuffle_xor(a[i], ushort(5))": LANES ^ 5,
    "simd_shuffle_up(a[i], ushort(3))": np.where(LANES < 3, LANES, LANES - 3),
    "simd_shuffle_down(a[i], ushort(3))": np.where(LANES > 28, LANES, LANES + 3),
    "simd_shuffle_rotate_up(a[i], ushort(3))": (LANES - 3) % 32,
    "simd_shuffle_rotate_down(a[i], ushort(3))": (LANES + 3) % 32,
    "simd_shuffle_and_fill_up(a[i], a[i] + 100, ushort(3))": np.where(
        LANES < 3, LANES + 129, LANES - 3
    ),
    "simd_shuffle_and_fill_down(a[i], a[i] + 100, ushort(3))": np.where(
        LANES > 28, LANES + 71, LANES + 3
    ),
    "simd_broadcast(a[i], ushort(7))": np.full(32, 7),
    "simd_broadcast_first(a[i] + 2)": np.full(32, 2),
    "float(simd_any(a[i] > 30))": np.ones(32),
    "float(simd_all(a[i] > 0))": np.zeros(32),
    "float(simd_is_first())": LANES == 0,
    "float(simd_and(i | 8) + simd_or(i) + simd_xor(i))": np.full(32, 39),
    "float(ulong(simd_ballot(i < 4)))": np.full(32, 15),
    "float(ulong(simd_active_threads_mask()) >> 28)": np.full(32, 15),
    "quad_sum(a[i])": LANES // 4 * 16 + 6,
    "quad_max(a[i])": LANES // 4 * 4 + 3,
    "quad_shuffle_xor(a[i], ushort(1))": LANES ^ 1,
    "quad_broadcast(a[i], ushort(2))": LANES // 4 * 4 + 2,
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


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.int32], ids=str)
def test_simd_operations_of_other_types(dtype):
    assert_gives(
        63, "o[i] = simd_max(a[i]) + simd_sum(T(1));", RAMP.astype(dtype), **of_type(dtype)
    )


def test_a_simd_operation_in_a_function_of_the_header():
    header = "inline float mean(float x) {\n  return simd_sum(x) / 32;\n}\n"
    assert numbers(run("o[i] = mean(a[i]);", RAMP, header=header)[0])[5] == 15.5
    error = fault(
        "divergence", "simd_sum", "o[i] = 0;\nif (i < 5) o[i] = mean(a[i]);", RAMP, header=header
    )
    assert (error.file, error.line) == ("head.metal", 2)


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
    np.testing.assert_allclose(numbers(output), numbers(a) @ numbers(b).T + 1, rtol=1e-5, atol=1e-5)
    assert counters.buffers["a"].read == 64 * dtype.size
    assert counters.simd_operations == 4


MATRIX = {"outputs": (((8, 8), mx.float32),)}


def test_a_matrix_from_one_value_is_diagonal():
    body = "simdgroup_matrix<float, 8, 8> z(3.0f);\nsimdgroup_store(z, o, 8);"
    assert_gives(3 * np.eye(8), body, **MATRIX)


def test_matrices_in_threadgroup_memory_with_origin_and_their_elements():
    body = "threadgroup float s[16 * 16];\nfor (int n = i; n < 256; n += 32) s[n] = a[n];\n"
    body += "threadgroup_barrier(mem_flags::mem_threadgroup);\nsimdgroup_float8x8 z;\n"
    body += "simdgroup_load(z, s, 16, ulong2(8, 4));\n"
    body += "z.thread_elements()[0] *= 2;\nsimdgroup_store(z, o, 8);"
    a = np.arange(256, dtype=np.float32).reshape(16, 16)
    wanted = a[4:12, 8:16].copy()
    wanted[:, ::2] *= 2
    assert_gives(wanted, body, array(a), **MATRIX)


def test_a_matrix_needs_the_whole_simdgroup_and_bounds():
    body = "simdgroup_float8x8 z;\nif (i < {}) simdgroup_load(z, a + "
    body += "{}, 8);\nsimdgroup_store(z, o, 8);"
    a = mx.zeros((64,))
    run(body.format(32, 0), a, **MATRIX)
    fault("divergence", "simdgroup_", body.format(16, 0), a, **MATRIX)
    fault("bounds", "of a", body.format(32, 1), a, **MATRIX)


# Atomics

FOUR = {"outputs": (((4,), mx.float32),), "atomic_outputs": True}
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"


def test_atomic_outputs_add_up_over_all_threadgroups():
    body = "atomic_fetch_add_explicit(&o[i % 4], a[i], memory_order_relaxed);"
    settings = FOUR | {"threadgroup": (8, 1, 1)}
    wanted = np.arange(32).reshape(8, 4).sum(0)
    assert assert_gives(wanted, body, RAMP, init_value=0, **settings).atomics == 32
    fault("uninitialised", "of o", body, RAMP, **settings)
    fault("address space", "no viable overloaded '='", "o[i % 4] = a[i];", RAMP, **FOUR)


def test_atomics_in_threadgroup_memory():
    body = "threadgroup atomic_uint s[2];\n"
    body += "if (i < 2) atomic_store_explicit(&s[i], 7u, memory_order_relaxed);\n" + BARRIER
    body += "atomic_fetch_max_explicit(&s[i % 2], i, memory_order_relaxed);\n" + BARRIER
    body += "o[i] = atomic_load_explicit(&s[i % 2], memory_order_relaxed);"
    assert_gives(30 + np.arange(32) % 2, body, outputs=UINT)


def test_an_atomic_and_a_plain_access_race():
    body = "threadgroup atomic_uint s[1];\n"
    body += "atomic_store_explicit(&s[0], 7u, memory_order_relaxed);\n"
    plain = "threadgroup uint* p = (threadgroup uint*)s;\no[i] = *p;"
    fault("race", "of s", body + plain, outputs=UINT)
    run(body + BARRIER + plain, outputs=UINT)


def test_compare_and_exchange():
    body = "uint seen = 0;\nwhile (!atomic_compare_exchange_weak_explicit(&o[0], &seen, seen + i, "
    body += "memory_order_relaxed, memory_order_relaxed)) {}\n"
    one = {"outputs": (((1,), mx.uint32),), "atomic_outputs": True}
    assert_gives(496, body, init_value=0, **one)
