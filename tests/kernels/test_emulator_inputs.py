"""Inputs, outputs and grids: how arrays reach a kernel, and what the counters say of them."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.emulator import emulated
from kernels_metal.emulator.signature import TYPES
from kernels_metal.factory import Kernel, Launch, executor, launch
from support.emulator_tiny import RAMP, assert_gives, fault, run
from support.kernels import exact

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
