"""Inputs, outputs and grids: how arrays reach a kernel, and what the counters say of them."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.emulator import emulated
from kernels_metal.factory import Kernel, Launch, executor, launch
from support.emulator_tiny import RAMP, assert_gives, fault, numbers, run, run_all

DTYPES = [
    mx.float32, mx.float16, mx.bfloat16, mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int32,
    mx.uint32, mx.int64, mx.uint64, mx.bool_,
]  # fmt: skip


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


def test_a_scalar_comes_as_a_reference_and_an_empty_input_is_not_read():
    assert_gives(5.5, "o[i] = a + b;", mx.array(2.5), mx.array(3, mx.int8))
    run("o[i] = 1;", mx.zeros((0, 4)))
    fault("bounds", "of a, which has 0", "o[i] = a[i];", mx.zeros((0, 4)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_arrives_and_leaves_unchanged(dtype):
    values = (mx.random.normal((32,), key=mx.random.key(1)) * 40).astype(dtype)
    output, _ = run("o[i] = a[i];", values, outputs=(((4, 8), dtype),))
    assert output.dtype == dtype
    assert output.shape == (4, 8)
    assert mx.array_equal(output.reshape(-1), values)


# Strides

STRIDED = "const int64_t n = a_shape[1];\n"
STRIDED += "o[i] = a[(i / n) * a_strides[0] + (i % n) * a_strides[1]];"
ELEMENTS = "o[i] = a[elem_to_loc(i, a_shape, a_strides, a_ndim)];"  # MLX's own helper


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
    for body in (STRIDED, ELEMENTS)[: 1 if name == "backwards" else 2]:  # its sums are unsigned
        for contiguous in (False, True):
            assert_gives(numbers(a), body, a, **settings, ensure_row_contiguous=contiguous)


def test_a_strided_input_ignored_its_strides_is_wrong_unless_it_is_copied_first():
    a = views()["transposed"]
    output, _ = run("o[i] = a[i];", a)
    assert mx.array_equal(output.reshape(a.shape), a)
    error = fault("bounds", "between its elements", "o[i] = a[i];", a, ensure_row_contiguous=False)
    assert error.buffer == "a"


def test_what_lies_between_the_rows_of_a_slice_does_not_belong_to_it():
    cache = mx.zeros((2, 100, 4))
    body = "o[i] = a[(i / 16) * a_strides[0] + i % 16{}];"
    run(body.format(""), cache[:, :4], ensure_row_contiguous=False)
    error = fault("bounds", "of a", body.format(" + 1"), cache[:, :4], ensure_row_contiguous=False)
    assert "byte 64 of a, which lies between" in str(error)


def test_shapes_and_dimensions_are_those_of_the_array():
    body = "o[i] = a_ndim * 1000 + a_shape[0] * 100 + a_shape[1] * 10 + a_strides[0];"
    assert_gives(2233, body, mx.zeros((2, 3)))


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


# Outputs


def test_several_outputs_of_several_types():
    outputs = (((32,), mx.float16), ((32,), mx.uint8), ((2, 16), mx.int64))
    (o, p, q), _ = run_all("o[i] = half(a[i]); p[i] = i; q[i] = -long(i);", RAMP, outputs=outputs)
    assert (o.dtype, p.dtype, q.dtype) == (mx.float16, mx.uint8, mx.int64)
    np.testing.assert_array_equal(np.array(q).ravel(), -np.arange(32))
    np.testing.assert_array_equal(numbers(o), np.array(p))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int32], ids=str)
def test_outputs_start_with_the_initial_value(dtype):
    settings = {"init_value": 2, "outputs": (((5,), dtype),)}
    assert_gives([2, 2, 2, 9, 2], "if (i == 3) o[i] = 9;", **settings)


def test_an_input_is_not_changed_by_the_launch():
    a = mx.array(np.arange(32, dtype=np.float32))
    run("o[i] = a[i] + 1;", a)
    np.testing.assert_array_equal(np.array(a), np.arange(32))


# Counters


def test_traffic_counts_every_access_and_what_a_threadgroup_fetches():
    body = "float x = 0;\nfor (int n = 0; n < 32; ++n) x += a[n];\no[i] = x;"
    _, counters = run(body, RAMP, grid=(64, 1, 1), outputs=(((64,), mx.float32),))
    a, o = counters.buffers["a"], counters.buffers["o"]
    assert (a.size, a.read, a.fetched, a.written) == (128, 64 * 128, 2 * 128, 0)
    assert (o.size, o.read, o.written) == (256, 0, 256)


def test_one_row_per_threadgroup_fetches_as_often_as_there_are_rows():
    shared = (
        "threadgroup float s[32];\ns[i] = a[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
    )
    shared += "for (int r = 0; r < 4; ++r) o[r * 32 + i] = s[31 - i] + r;"
    separate = "o[i] = a[31 - i % 32] + i / 32;"
    outputs = (((4, 32), mx.float32),)
    once, few = run(shared, RAMP, outputs=outputs)
    again, many = run(separate, RAMP, grid=(128, 1, 1), outputs=outputs)
    assert mx.array_equal(once, again)
    assert (few.buffers["a"].read, few.buffers["a"].fetched) == (128, 128)
    assert (many.buffers["a"].read, many.buffers["a"].fetched) == (512, 512)


def test_an_element_read_and_written_again_counts_both_ways():
    _, counters = run("threadgroup_barrier(mem_flags::mem_none); o[i] += 1;", init_value=0)
    assert (counters.buffers["o"].read, counters.buffers["o"].written) == (128, 128)


def test_operations_count_once_for_the_threads_that_take_part():
    body = "threadgroup float s[64];\ns[i % 64] = simd_sum(a[i % 32]);\n"
    body += "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    body += "simdgroup_barrier(mem_flags::mem_none);\no[i] = s[0];"
    _, counters = run(
        body, RAMP, grid=(128, 1, 1), threadgroup=(64, 1, 1), outputs=(((128,), mx.float32),)
    )
    assert (counters.threads, counters.threadgroups, counters.threadgroup_bytes) == (128, 2, 256)
    assert (counters.simd_operations, counters.barriers, counters.simdgroup_barriers) == (4, 2, 4)


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


def test_counters_of_several_launches_are_kept_in_their_order(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.metal").write_text("o[thread_position_in_grid.x] = 1;")
    plan = Launch((4, 1, 1), (4, 1, 1), ((4,),), (mx.float32,))
    with emulated() as run_of:
        for name in ("one", "two", "one"):
            launch(Kernel(name, (), ("o",), folder=tmp_path), [], plan)
    assert [c.kernel for c in run_of.counters] == ["one", "two", "one"]
    assert len(run_of.of("one")) == 2
