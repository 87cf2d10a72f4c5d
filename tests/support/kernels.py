"""What the kernels' tests share: random calls, close numbers, refusals, signatures and faults."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.emulator import EmulatorError, Run, emulated
from kernels_metal.emulator.signature import signature
from kernels_metal.factory import SOURCE, Kernel, Launch, executing, metal
from kernels_metal.operation import Draw, Operation

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
ROUNDOFF = {mx.float32: 0.0, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
FLOAT32 = 1e-5  # of sums in float32, as a share of a row's largest number


def arguments(operation: Operation, dtype=mx.float32, seed: int = 0, **sizes: int) -> Any:
    """Those of a random call of these sizes, the others by default."""
    return operation.arguments(Draw(random.Random(seed), dtype, {**operation.defaults, **sizes}))


def exact(array: mx.array) -> np.ndarray:
    """The same numbers in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def assert_close(actual: mx.array, expected, dtype: mx.Dtype = mx.float32) -> None:
    """Within 1e-5 of the row's largest number, and the rounding of one result to `dtype`."""
    wanted = expected if isinstance(expected, np.ndarray) else exact(expected)
    assert actual.dtype == dtype
    assert actual.shape == wanted.shape
    bound = FLOAT32 * np.abs(wanted).max(axis=-1, keepdims=True) + ROUNDOFF[dtype] * np.abs(wanted)
    error = np.abs(exact(actual) - wanted)
    assert np.all(error <= bound + 2.0**-25), f"{error.max()} beyond {bound.min()}"


def bytes_read(run: Run, kernel: str, buffer: str) -> int:
    """From one buffer, by all launches of one kernel."""
    return sum(launch.buffers[buffer].read for launch in run.of(kernel))


@contextmanager
def refused(message: str) -> Iterator[None]:
    """The block ends with this ValueError, and nothing was launched."""

    def launched(kernel, inputs, plan):
        raise AssertionError(f"{kernel.name} was launched")

    with executing(launched), pytest.raises(ValueError, match=message):
        yield


# Signatures


@dataclass(frozen=True)
class Sample:
    """One launch of a kernel."""

    kernel: Kernel
    inputs: tuple[mx.array, ...]
    plan: Launch


def launches(operation: Operation, *args: Any) -> list[Sample]:
    """What a call would launch; nothing is computed."""
    samples = []

    def record(kernel, inputs, plan):
        samples.append(Sample(kernel, tuple(inputs), plan))
        outputs = zip(plan.output_shapes, plan.output_dtypes, strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]

    with executing(record):
        operation.kernel(*args)
    return samples


def printed_by_mlx(sample: Sample, capfd, folder: Path) -> str:
    """MLX prints while a graph with the kernel is traced; nothing is computed."""

    def traced(*inputs: mx.array) -> list[mx.array]:
        return metal(sample.kernel, inputs, sample.plan, verbose=True)

    capfd.readouterr()
    mx.export_function(str(folder / "traced.mlxfn"), traced, *sample.inputs)
    return capfd.readouterr().out.partition("```\n")[2].rpartition("\n```")[0]


def check_signature(sample: Sample, capfd, folder: Path) -> None:
    """The signature that the emulator writes is, letter for letter, the one MLX prints."""
    ours = signature(sample.kernel, sample.inputs, sample.plan)
    assert ours == printed_by_mlx(sample, capfd, folder)


# Faults put into the real kernels: each is found by a check of the emulator, or by the result

Pairs = Sequence[tuple[np.ndarray, np.ndarray]]  # the kernel's results and the right ones


@dataclass(frozen=True)
class Fault:
    """`before` in `file` becomes `after`; running `run` must find it as `found`.

    `found` is a kind of EmulatorError, or "result" for the comparison; of two, which one comes
    first depends on the order of the threads.
    """

    name: str
    file: str
    before: str
    after: str
    run: Callable[[], Pairs]
    found: str

    def __str__(self) -> str:
        return self.name


def faults(
    file: str, run: Callable[[], Pairs], rows: dict[str, tuple[str, str, str]]
) -> list[Fault]:
    """Of one file, found by one run: before, after and found, by name."""
    return [Fault(name, file, *changed[:2], run, changed[2]) for name, changed in rows.items()]


def each_is_found(*planted: Fault) -> Callable[..., None]:
    """The test of a file's faults, in copies of the sources; without one its run finds nothing."""

    @pytest.mark.parametrize("fault", planted, ids=str)
    def test(fault: Fault, tmp_path: Path) -> None:
        assert _right(fault.run)
        copy = shutil.copytree(SOURCE, tmp_path / "source")
        file = copy / f"{fault.file}.metal"
        source = file.read_text()
        assert fault.before in source, f"{file.name} has changed: adapt this fault"
        file.write_text(source.replace(fault.before, fault.after, 1))
        assert _outcome(copy, fault.run) in fault.found.split(" or ")

    return test


@cache
def _right(run: Callable[[], Pairs]) -> bool:
    return _outcome(None, run) == "right"


def _outcome(folder: Path | None, run: Callable[[], Pairs]) -> str:
    """The kind of the first fault the emulator finds; "result" or "right" if it finds none."""
    try:
        with emulated(folder):
            pairs = run()
    except EmulatorError as error:
        assert error.line or error.kind == "unwritten", str(error)
        return error.kind
    same = all(np.allclose(ours, wanted, rtol=1e-4, atol=1e-4) for ours, wanted in pairs)
    return "right" if same else "result"
