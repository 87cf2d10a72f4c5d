"""Every check of the emulator: it finds the fault, and leaves the mended kernel alone."""

import mlx.core as mx
import numpy as np
import pytest

from support.emulator_tiny import RAMP, fault, numbers, run, run_all

INT = (((32,), mx.int32),)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
SHARED = "threadgroup float s[32];\n"


# Bounds


def test_a_read_behind_the_end_of_an_input_names_buffer_line_and_thread():
    error = fault(
        "bounds", "reads 4 bytes at byte 128 of a", "float x;\nx = a[i + 1];\no[i] = x;", RAMP
    )
    assert (error.buffer, error.file, error.line) == ("a", "tiny.metal", 3)
    assert error.thread == (31, 0, 0)
    run("o[i] = a[min(i + 1, 31u)];", RAMP)


def test_a_read_before_the_start_of_an_input():
    fault("bounds", "reads 4 bytes at byte -4 of a", "o[i] = a[int(i) - 1];", RAMP)


def test_a_read_far_from_a_buffer_is_not_taken_for_its_neighbour():
    for offset in (1000, 100_000_000, -100_000_000):
        error = fault("bounds", " of a", f"o[i] = a[int(i) + {offset}] + b[i];", RAMP, RAMP)
        assert error.buffer == "a"


def test_a_vector_that_reaches_over_the_end():
    body = "o[i] = dot(((const device float4*)(a + {}))[i / 4], float4(1));"
    fault("bounds", "reads 16 bytes at byte 128 of a", body.format("4"), RAMP)
    fault("alignment", "no multiple of 16", body.format("1"), RAMP)
    assert numbers(run(body.format("0"), RAMP)[0])[31] == 28 + 29 + 30 + 31


def test_a_write_behind_the_end_of_an_output():
    error = fault("bounds", "writes 4 bytes at byte 128 of o", "o[i + 1] = 0;", RAMP)
    assert error.buffer == "o"


def test_an_index_outside_threadgroup_memory_or_a_local_array():
    shared = SHARED + "s[i + {}] = 0;\no[i] = 0;"
    local = "float t[4] = {{0, 0, 0, 0}};\no[i] = t[i % 4 + {}];"
    for body in (shared, local):
        error = fault("bounds", "index (4|32) of an array of type", body.format(1), RAMP)
        assert error.line > 1
        run(body.format(0), RAMP)


def test_a_pointer_that_leaves_a_threadgroup_variable():
    body = SHARED + "threadgroup float* p = s;\np[i + {}] = 0;\no[i] = 0;"
    error = fault("bounds", "writes 4 bytes at byte 128 of s", body.format(1), RAMP)
    assert (error.buffer, error.line) == ("s", 4)
    run(body.format(0), RAMP)


def test_an_index_outside_a_row_of_a_two_dimensional_array():
    body = "threadgroup float s[2][16];\ns[i / 16][i % {}] = 0;\no[i] = 0;"
    fault("bounds", "index 16 of an array", body.format(17), RAMP)
    run(body.format(16), RAMP)


def test_the_shape_of_an_input_has_bounds_too():
    fault("bounds", "of a_shape", "o[i] = a_shape[i % 2];", RAMP)
    run("o[i] = a_shape[0];", RAMP)


def test_an_address_that_belongs_to_nothing():
    fault("bounds", "belong to no buffer", "o[i] = *(const device float*)(16);", RAMP)


# Inputs are read-only


def test_a_write_to_an_input():
    error = fault(
        "read-only", "of a, which is an input", "((device float*)a)[i] = 1;\no[i] = 0;", RAMP
    )
    assert (error.buffer, error.line) == ("a", 2)


def test_an_input_is_const_to_the_compiler():
    fault("compile", "read-only|const", "a[i] = 1;\no[i] = 0;", RAMP)


# Races


def test_threadgroup_memory_read_without_a_barrier():
    body = SHARED + "s[i] = a[i];\n{}o[i] = s[{}];"
    error = fault(
        "race", "reads byte 0 of s, which thread 0", body.format("", "(i + 31) % 32 / 31 * 0"), RAMP
    )
    assert (error.buffer, error.line) == ("s", 4)
    run(body.format(BARRIER, "0"), RAMP)
    run(body.format("", "i"), RAMP)  # its own value needs no barrier


def test_two_threads_that_write_the_same_threadgroup_element():
    body = SHARED + "s[i / {}] = a[i];\n" + BARRIER + "o[i] = s[i / {}];"
    error = fault("race", "writes byte 0 of s", body.format(2, 2), RAMP)
    assert error.thread == (1, 0, 0)
    run(body.format(1, 1), RAMP)


def test_a_write_after_others_have_read_needs_a_barrier():
    body = SHARED + "s[i] = a[i];\n" + BARRIER + "float x = s[31 - i];\n{}s[i] = x;\n"
    body += BARRIER + "o[i] = s[i];"
    fault("race", "of s, which thread 31 of the same threadgroup writes", body.format(""), RAMP)
    output, _ = run(body.format(BARRIER), RAMP)
    np.testing.assert_array_equal(numbers(output), np.arange(32)[::-1])


def test_one_of_many_readers_is_enough_for_a_race():
    body = SHARED + "s[i] = 0;\n" + BARRIER
    body += "float x = s[0];\nif (i == {}) s[0] = x + 1;\n" + BARRIER + "o[i] = x;"
    for writer in (0, 1, 31):
        fault("race", "writes|reads", body.format(writer), RAMP)
    run(body.format(32), RAMP)


def test_a_barrier_for_device_memory_does_not_order_threadgroup_memory():
    body = SHARED + "s[i] = a[i];\nthreadgroup_barrier(mem_flags::{});\no[i] = s[31 - i];"
    fault("race", "of s", body.format("mem_device"), RAMP)
    fault("race", "of s", body.format("mem_none"), RAMP)
    run(body.format("mem_threadgroup"), RAMP)
    run(body.replace("mem_flags::{}", "mem_flags::mem_device | mem_flags::mem_threadgroup"), RAMP)


def test_a_simdgroup_barrier_orders_one_simdgroup_only():
    body = "threadgroup float s[64];\ns[i] = a[i % 32];\n"
    body += "simdgroup_barrier(mem_flags::mem_threadgroup);\no[i] = s[{}];"
    wide = {"outputs": (((64,), mx.float32),), "grid": (64, 1, 1), "threadgroup": (64, 1, 1)}
    run(body.format("i ^ 31"), RAMP, **wide)
    error = fault("uninitialised", "of s", body.format("63 - i"), RAMP, **wide)
    assert error.buffer == "s"
    error = fault("race", "of s", body.format("i < 32 ? i : i - 32"), RAMP, **wide)
    assert error.thread[0] >= 32


def test_a_simd_operation_orders_no_memory():
    body = SHARED + "s[i] = a[i];\nfloat x = simd_sum(a[i]);\n{}o[i] = s[31 - i] + x;"
    fault("race", "of s", body.format(""), RAMP)
    run(body.format("simdgroup_barrier(mem_flags::mem_threadgroup);\n"), RAMP)


def test_threads_of_one_threadgroup_share_device_memory_after_a_device_barrier():
    body = "o[i] = a[i];\nthreadgroup_barrier(mem_flags::{});\np[i] = o[31 - i];"
    two = {"outputs": (((32,), mx.float32), ((32,), mx.float32))}
    fault("race", "reads byte .* of o", body.format("mem_threadgroup"), RAMP, **two)
    (_, p), _ = run_all(body.format("mem_device"), RAMP, **two)
    np.testing.assert_array_equal(numbers(p), np.arange(32)[::-1])


def test_nothing_orders_two_threadgroups():
    groups = {"threadgroup": (8, 1, 1)}
    error = fault("race", "another threadgroup", "o[i % 8] = a[i];", RAMP, **groups)
    assert error.thread == (8, 0, 0)
    run("o[i] = a[i];", RAMP, **groups)


def test_halves_of_one_word_are_two_places():
    half = RAMP.astype(mx.float16)
    run("threadgroup half s[32];\ns[i] = a[i];\n" + BARRIER + "o[i] = s[31 - i];", half)
    run("o[i] = a[i];", half, outputs=(((32,), mx.float16),))


# Divergence


def test_a_simd_operation_that_some_lanes_skip():
    body = "float x = 0;\nif (i < {}) {{\nx = simd_sum(a[i]);\n}}\n{}o[i] = x;"
    for then in ("", BARRIER, "x += simd_max(a[i]);\n"):
        error = fault("divergence", "reached by lane", body.format(16, then), RAMP)
        assert error.line in (4, 6)
        run(body.format(32, then), RAMP)


def test_lanes_that_have_returned_do_not_reach_a_simd_operation():
    body = "o[i] = 0;\nif (i >= {}) return;\no[i] = simd_sum(a[i]);"
    fault("divergence", "has returned", body.format(30), RAMP)
    run(body.format(32), RAMP)


def test_two_different_simd_operations_in_two_branches():
    body = "if (i % {} == 0) {{\no[i] = simd_sum(a[i]);\n}} else {{\no[i] = simd_sum(a[i]);\n}}"
    fault("divergence", "waits at simd_sum on line 3", body.format(2), RAMP)
    run(body.format(1), RAMP)


@pytest.mark.parametrize("skip", ["return;", ";"])
def test_a_barrier_that_some_threads_skip(skip):
    body = (
        SHARED
        + "s[i] = a[i];\no[i] = 0;\nif (i >= {}) {{ {} }} else {{\n"
        + BARRIER
        + "}}\no[i] = s[i];"
    )
    error = fault("divergence", "threadgroup_barrier", body.format(16, skip), RAMP)
    assert error.line == 6
    run(body.format(32, skip), RAMP)


def test_a_barrier_that_a_whole_simdgroup_skips():
    body = "if (i < {}) {{\n" + BARRIER + "}}\no[i] = 0;"
    wide = {"outputs": (((64,), mx.float32),), "grid": (64, 1, 1), "threadgroup": (64, 1, 1)}
    fault("divergence", "threadgroup_barrier", body.format(32), **wide)
    run(body.format(64), **wide)


def test_two_barriers_in_two_branches():
    body = "if (i < {}) {{\n" + BARRIER + "}} else {{\n" + BARRIER + "}}\no[i] = 0;"
    fault("divergence", "while others wait at the one on line 3", body.format(16))
    run(body.format(32))


def test_a_loop_that_some_lanes_leave_earlier():
    body = "float x = 0;\nfor (uint n = 0; n < {}; ++n) {{\nx += simd_sum(a[n]);\n}}\no[i] = x;"
    fault("divergence", "simd_sum", body.format("2 + i % 2"), RAMP)
    run(body.format("2 + i / 32"), RAMP)


# Uninitialised


def test_threadgroup_memory_starts_uninitialised_in_every_threadgroup():
    body = (
        SHARED + "if (threadgroup_position_in_grid.x == 0 || {})\ns[i % 8] = 1;\no[i] = s[i % 8];"
    )
    groups = {"threadgroup": (8, 1, 1)}
    error = fault("uninitialised", "reads byte 0 of s", body.format("false"), **groups)
    assert (error.thread, error.line) == ((8, 0, 0), 5)
    run(body.format("true"), **groups)


def test_a_local_array_that_is_read_before_it_is_written():
    body = "float t[4];\nfor (int n = {}; n < 4; ++n) t[n] = a[n];\no[i] = t[i % 4] * 2;"
    error = fault("uninitialised", "from an uninitialised variable", body.format(1), RAMP)
    assert (error.buffer, error.line) == ("o", 4)
    run(body.format(0), RAMP)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_an_uninitialised_local_is_found_in_all_float_types(dtype):
    body = "float t[2];\nt[0] = 1;\no[i] = T(t[i % {}]);"
    kind = {"template": (("T", dtype),), "outputs": (((32,), dtype),)}
    fault("uninitialised", "of o from an uninitialised", body.format(2), **kind)
    run(body.format(1), **kind)


def test_a_local_that_the_compiler_sees_uninitialised():
    error = fault("uninitialised", "uninitialized", "float x;\no[i] = x;")
    assert error.line == 3


def test_a_shuffle_from_a_lane_that_is_not_there():
    body = "o[i] = simd_shuffle(a[i], {});"
    short = {"grid": (20, 1, 1), "outputs": (((20,), mx.float32),)}
    fault("uninitialised", "of o", body.format("lane + 1"), RAMP, **short)
    run(body.format("(lane + 1) % 20"), RAMP, **short)


def test_an_output_that_is_read_before_it_is_written():
    body = "o[i] += a[i];"
    fault("uninitialised", "reads byte 0 of o before", body, RAMP)
    output, _ = run(body, RAMP, init_value=3)
    np.testing.assert_array_equal(numbers(output), np.arange(32) + 3)


# Unwritten


def test_elements_of_an_output_that_nobody_writes():
    body = "if (i != {}) o[i] = 1;"
    error = fault(
        "unwritten", "1 of 32 elements of o are never written, the first is 5", body.format(5)
    )
    assert error.buffer == "o"
    run(body.format(32))
    run(body.format(5), init_value=0)


def test_an_output_nobody_writes_at_all():
    two = {"outputs": (((32,), mx.float32), ((3,), mx.int32))}
    assert fault("unwritten", "3 of 3 elements of p", "o[i] = 1;", **two).buffer == "p"


# Address spaces


@pytest.mark.parametrize(
    "statement",
    [
        "device float* p = s;",
        "threadgroup const float* p = a;",
        "thread const float* p = a;",
        "float t[2] = {0, 0}; threadgroup float* p = t;",
        "const constant float* p = a;",
    ],
)
def test_a_pointer_into_the_wrong_address_space(statement):
    error = fault("address space", ".", SHARED + statement + "\no[i] = *p;", RAMP)
    assert error.line == 3


def test_pointers_into_the_right_address_spaces():
    body = SHARED + "s[i] = 1;\nfloat t[2] = {2, 3};\nconst threadgroup float* p = s + i;\n"
    body += "const device float* q = a;\nthread float* r = t;\nconst constant float* u = b;\n"
    output, _ = run(body + "o[i] = *p + q[i] + *r + *u;", RAMP, mx.array([4.0]))
    np.testing.assert_array_equal(numbers(output), np.arange(32) + 7)


def test_a_function_takes_the_address_space_it_names():
    header = "inline float first(const {} float* p) {{ return p[0]; }}\n"
    run("o[i] = first(a);", RAMP, header=header.format("device"))
    fault("address space", "first", "o[i] = first(a);", RAMP, header=header.format("threadgroup"))


# Limits and arithmetic


def test_threadgroup_memory_is_limited_to_32_kib():
    body = "threadgroup float s[{}];\nthreadgroup float t[1];\ns[i] = t[0] = 0;\no[i] = s[i];"
    one = {"grid": (1, 1, 1), "outputs": (((1,), mx.float32),)}
    error = fault("limit", "32772 bytes; the limit is 32768", body.format(8192), **one)
    assert error.buffer == "t"
    assert run(body.format(8191), **one)[1].threadgroup_bytes == 32768


def test_threadgroups_have_at_most_1024_threads():
    wide = {"outputs": (((2048,), mx.float32),), "grid": (2048, 1, 1)}
    fault("limit", "1 to 1024 threads", "o[i] = 0;", threadgroup=(1025, 1, 1), **wide)
    fault("limit", "1 to 1024 threads", "o[i] = 0;", threadgroup=(64, 8, 4), **wide)
    fault("limit", "1 to 1024 threads", "o[i] = 0;", threadgroup=(0, 1, 1), **wide)
    assert run("o[i] = 0;", threadgroup=(1024, 1, 1), **wide)[1].threadgroups == 2


def test_division_by_zero_and_shifts_that_are_too_far():
    five = mx.full((32,), 5, mx.int32)
    fault("arithmetic", "division by 0", "o[i] = 7 / (a[i] - 5);", five, outputs=INT)
    fault("arithmetic", "shift by 32", "o[i] = 1 << (a[i] + 27);", five, outputs=INT)
    assert np.array(run("o[i] = 20 / a[i] << a[i];", five, outputs=INT)[0])[0] == 128


def test_after_a_fault_the_next_launch_runs():
    fault("bounds", "of a", "o[i] = a[i + 1];", RAMP)
    assert numbers(run("o[i] = a[i] + 1;", RAMP)[0])[31] == 32
