"""SIMD-group operations, matrices, thread positions and atomics, as Metal says they behave."""

import mlx.core as mx
import numpy as np
import pytest

from support.emulator_tiny import RAMP, fault, numbers, run, run_all

UINT = (((32,), mx.uint32),)
RNG = np.random.default_rng(0)


def of_type(dtype: mx.Dtype) -> dict:
    return {"template": (("T", dtype),), "outputs": (((32,), dtype),)}


def array(values, dtype=mx.float32) -> mx.array:
    return mx.array(np.asarray(values)).astype(dtype)


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


def test_simd_operations_of_a_group_that_is_not_full():
    body = "o[i * 4] = simd_sum(a[i]); o[i * 4 + 1] = simd_max(a[i]);\n"
    body += "o[i * 4 + 2] = simd_min(a[i]); o[i * 4 + 3] = simd_prefix_inclusive_sum(a[i]);"
    for count in (1, 7, 31, 33, 45):
        a = array(np.arange(count) + 1)
        output, _ = run(
            body, a, grid=(count, 1, 1), threadgroup=(64, 1, 1), outputs=(((count, 4), mx.float32),)
        )
        for first in range(0, count, 32):
            part = np.arange(count)[first : first + 32] + 1
            rows = numbers(output)[first : first + 32]
            np.testing.assert_array_equal(rows[:, 0], part.sum())
            np.testing.assert_array_equal(rows[:, 1], part.max())
            np.testing.assert_array_equal(rows[:, 2], part.min())
            np.testing.assert_array_equal(rows[:, 3], part.cumsum())


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.int32], ids=str)
def test_simd_operations_of_other_types(dtype):
    output, _ = run("o[i] = simd_max(a[i]) + simd_sum(T(1));", RAMP.astype(dtype), **of_type(dtype))
    np.testing.assert_array_equal(numbers(output), 63)


def test_a_simd_operation_in_a_function_of_the_header():
    header = "inline float mean(float x) {\n  return simd_sum(x) / 32;\n}\n"
    assert numbers(run("o[i] = mean(a[i]);", RAMP, header=header)[0])[5] == 15.5
    error = fault(
        "divergence", "simd_sum", "o[i] = 0;\nif (i < 5) o[i] = mean(a[i]);", RAMP, header=header
    )
    assert (error.file, error.line) == ("head.metal", 2)


def test_the_position_attributes():
    names = [
        "thread_position_in_threadgroup.y",
        "threadgroup_position_in_grid.x",
        "thread_index_in_threadgroup",
        "simdgroup_index_in_threadgroup",
        "thread_index_in_simdgroup",
        "threads_per_threadgroup.x",
        "threads_per_grid.y",
        "threadgroups_per_grid.x",
        "simdgroups_per_threadgroup",
        "dispatch_threads_per_threadgroup.x",
        "thread_execution_width",
    ]
    body = "uint at = thread_position_in_grid.y * 10 + i;\n"
    body += "\n".join(f"o[at * {len(names)} + {n}] = {name};" for n, name in enumerate(names))
    output, counters = run(
        body, outputs=(((60, len(names)), mx.uint32),), grid=(10, 6, 1), threadgroup=(4, 6, 1)
    )
    got = np.array(output).reshape(6, 10, len(names))
    for y in range(6):
        for x in range(10):
            width = min(4, 10 - x // 4 * 4)
            index = x % 4 + y * width
            wanted = [
                y,
                x // 4,
                index,
                index // 32,
                index % 32,
                width,
                6,
                3,
                (width * 6 + 31) // 32,
                4,
                32,
            ]
            assert got[y, x].tolist() == wanted
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


def test_a_matrix_from_one_value_is_diagonal():
    body = "simdgroup_matrix<float, 8, 8> z(3.0f);\nsimdgroup_store(z, o, 8);"
    np.testing.assert_array_equal(
        numbers(run(body, outputs=(((8, 8), mx.float32),))[0]), 3 * np.eye(8)
    )


def test_matrices_in_threadgroup_memory_with_origin_and_their_elements():
    body = "threadgroup float s[16 * 16];\nfor (int n = i; n < 256; n += 32) s[n] = a[n];\n"
    body += "threadgroup_barrier(mem_flags::mem_threadgroup);\nsimdgroup_float8x8 z;\n"
    body += "simdgroup_load(z, s, 16, ulong2(8, 4));\n"
    body += "z.thread_elements()[0] *= 2;\nsimdgroup_store(z, o, 8);"
    a = np.arange(256, dtype=np.float32).reshape(16, 16)
    output, _ = run(body, array(a), outputs=(((8, 8), mx.float32),))
    wanted = a[4:12, 8:16].copy()
    wanted[:, ::2] *= 2
    np.testing.assert_array_equal(numbers(output), wanted)


def test_a_matrix_needs_the_whole_simdgroup_and_bounds():
    body = "simdgroup_float8x8 z;\nif (i < {}) simdgroup_load(z, a + "
    body += "{}, 8);\nsimdgroup_store(z, o, 8);"
    out = {"outputs": (((8, 8), mx.float32),)}
    a = mx.zeros((64,))
    run(body.format(32, 0), a, **out)
    fault("divergence", "simdgroup_", body.format(16, 0), a, **out)
    fault("bounds", "of a", body.format(32, 1), a, **out)


# Atomics


def test_atomic_outputs_add_up_over_all_threadgroups():
    body = "atomic_fetch_add_explicit(&o[i % 4], a[i], memory_order_relaxed);"
    shape = {"outputs": (((4,), mx.float32),), "threadgroup": (8, 1, 1), "atomic_outputs": True}
    output, counters = run(body, RAMP, init_value=0, **shape)
    np.testing.assert_array_equal(numbers(output), np.arange(32).reshape(8, 4).sum(0))
    assert counters.atomics == 32
    fault("uninitialised", "of o", body, RAMP, **shape)


def test_an_atomic_output_is_touched_by_atomics_only():
    shape = {"outputs": (((4,), mx.float32),), "atomic_outputs": True}
    fault("address space", "no viable overloaded '='", "o[i % 4] = a[i];", RAMP, **shape)


def test_atomics_in_threadgroup_memory():
    body = "threadgroup atomic_uint s[2];\n"
    body += "if (i < 2) atomic_store_explicit(&s[i], 7u, memory_order_relaxed);\n"
    body += "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    body += "atomic_fetch_max_explicit(&s[i % 2], i, memory_order_relaxed);\n"
    body += "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    body += "o[i] = atomic_load_explicit(&s[i % 2], memory_order_relaxed);"
    output, _ = run(body, outputs=UINT)
    np.testing.assert_array_equal(np.array(output), 30 + np.arange(32) % 2)


def test_an_atomic_and_a_plain_access_race():
    body = (
        "threadgroup atomic_uint s[1];\natomic_store_explicit(&s[0], 7u, memory_order_relaxed);\n"
    )
    body += "{}threadgroup uint* p = (threadgroup uint*)s;\no[i] = *p;"
    fault("race", "of s", body.format(""), outputs=UINT)
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    run(body.format(barrier), outputs=UINT)


def test_compare_and_exchange():
    body = "uint seen = 0;\nwhile (!atomic_compare_exchange_weak_explicit(&o[0], &seen, seen + i, "
    body += "memory_order_relaxed, memory_order_relaxed)) {}\n"
    (output,), _ = run_all(body, outputs=(((1,), mx.uint32),), init_value=0, atomic_outputs=True)
    assert output.item() == 496
