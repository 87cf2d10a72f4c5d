"""Kernels of a few lines, for the tests of the emulator."""

from __future__ import annotations

import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.emulator import Counters, EmulatorError, emulated
from kernels_metal.factory import Kernel, Launch, launch
from support.kernels import Sample, exact

PRELUDE = "uint i = thread_position_in_grid.x; uint lane = thread_index_in_simdgroup;\n"  # line 1


def run(body: str, *inputs: mx.array, **settings) -> tuple[mx.array, Counters]:
    """The first output and the counters of one launch of `tiny`."""
    with tempfile.TemporaryDirectory() as name, emulated() as emulator:
        outputs = launch(*tiny(Path(name), PRELUDE + body, *inputs, **settings))
    return outputs[0], emulator.counters[0]


def tiny(
    folder: Path,
    body: str,
    *inputs: mx.array,
    outputs=(((32,), mx.float32),),
    grid=(32, 1, 1),
    threadgroup=(32, 1, 1),
    template=(),
    header: str = "",
    **kernel_settings,
) -> Sample:
    """A launch of a kernel `tiny` with files in `folder`, inputs a, b, ... and outputs o, p."""
    (folder / "tiny.metal").write_text(body)
    (folder / "head.metal").write_text(header)
    kernel = Kernel(
        "tiny",
        tuple("abcdefgh"[: len(inputs)]),
        tuple("opq"[: len(outputs)]),
        "head" if header else None,
        folder=folder,
        **kernel_settings,
    )
    return kernel, inputs, Launch(grid, threadgroup, *zip(*outputs, strict=True), template)


def fault(kind: str | None, words: str, body: str, *inputs: mx.array, **settings) -> EmulatorError:
    """Running the kernel finds a fault of this kind; `words` is a pattern of the whole message."""
    with pytest.raises(EmulatorError, match=words) as caught:
        run(body, *inputs, **settings)
    assert kind in (None, caught.value.kind), str(caught.value)
    assert caught.value.kernel == "tiny"
    return caught.value


def array(values, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.asarray(values)).astype(dtype)


def of_type(dtype: mx.Dtype) -> dict:
    """The settings of a kernel with type T and an output of it."""
    return {"template": (("T", dtype),), "outputs": (((32,), dtype),)}


def assert_gives(expected, body: str, *inputs: mx.array, **settings) -> Counters:
    """The first output holds these numbers."""
    output, counters = run(body, *inputs, **settings)
    np.testing.assert_array_equal(exact(output), np.broadcast_to(expected, output.shape))
    return counters


RAMP = mx.arange(32).astype(mx.float32)
