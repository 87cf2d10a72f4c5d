"""What the kernels' tests share: random calls, close numbers, refusals, launches and faults."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.dispatch import CALLS, RUNS
from kernels_metal.emulator import EmulatorError, Run, emulated
from kernels_metal.factory import SOURCE, Kernel, Launch, executing
from kernels_metal.operation import Draw, Operation
from kernels_metal.sweep import share, trials

Sample = tuple[Kernel, Sequence[mx.array], Launch]  # one launch


def arguments(operation: Operation, dtype=mx.float32, seed: int = 0, **sizes: int) -> Any:
    """Those of a random call of these sizes, the others by default."""
    return operation.arguments(Draw(random.Random(seed), dtype, {**operation.defaults, **sizes}))


def exact(array: mx.array) -> np.ndarray:
    """An array's numbers in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def random_calls(operation: Operation) -> list[Any]:
    """The arguments of 60 random calls, dtypes in turn."""
    return [trial.arguments for trial in trials(0, 60) if trial.operation is operation]


def assert_close(actual: mx.array, expected, dtype: mx.Dtype = mx.float32) -> None:
    """No further apart than rounding explains."""
    assert (actual.dtype, actual.shape) == (dtype, expected.shape)
    assert share(actual, mx.array(expected, mx.float32)) <= 1


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


@contextmanager
def recorded() -> Iterator[list[Sample]]:
    """What the block would launch; outputs are zeros, and nothing is computed."""
    samples: list[Sample] = []

    def record(kernel, inputs, plan):
        samples.append((kernel, tuple(inputs), plan))
        outputs = zip(plan.output_shapes, plan.output_dtypes, strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]

    with executing(record):
        yield samples


def launches(operation: Operation, *args: Any) -> list[Sample]:
    """What a call would launch."""
    with recorded() as samples:
        operation.kernel(*args)
    return samples


def clock(*steps, sides=2):
    """Races one after the other, in which the sides take turns, stock last, behind its warm-up.

    steps: milliseconds that a call of each side takes.
    """
    races = [steps[i : i + sides] for i in range(0, len(steps), sides)]
    runs = (run for race in races for run in (race[-1], race[-1], *race * RUNS))
    moves = (move * CALLS * 1e-3 for run in runs for move in (0.0, run))
    return partial(next, accumulate(moves))


# Faults put into the real kernels: each is found by a check of the emulator, or by the result

Pairs = Sequence[tuple[np.ndarray, np.ndarray]]  # the kernel's results and the right ones


def against(
    operation: Operation, *calls: dict[str, int], change: Callable[..., Any] = lambda *args: args
) -> Callable[[], Pairs]:
    """Kernel and reference in calls of these sizes. change: of their arguments."""

    def compare() -> Pairs:
        pairs = []
        for sizes in calls:
            args = change(*arguments(operation, **sizes))
            sides = (side(*args) for side in (operation.kernel, operation.reference))
            found = ([*map(exact, operation.compared(side, *args))] for side in sides)
            pairs += zip(*found, strict=True)
        return pairs

    return compare


def each_is_found(
    *groups: tuple[str, Callable[[], Pairs], dict[str, tuple[str, str, str]]],
) -> Callable[..., None]:
    """The test of faults in copies of the sources; without one their run finds nothing.

    groups: file, what to run, and by a fault's name what stands there, what becomes of it, and what
    is found: a kind of EmulatorError, or "result" for the comparison. Which of two comes first
    depends on the order of the threads.
    """
    planted = [
        pytest.param(file, run, *row, id=name)
        for file, run, rows in groups
        for name, row in rows.items()
    ]

    @pytest.mark.parametrize(("name", "run", "before", "after", "found"), planted)
    def test(name, run, before, after, found, tmp_path: Path) -> None:
        assert _right(run)
        copy = shutil.copytree(SOURCE, tmp_path / "source")
        file = copy / f"{name}.metal"
        source = file.read_text()
        assert before in source, f"{file.name} has changed: adapt this fault"
        file.write_text(source.replace(before, after, 1))
        assert _outcome(copy, run) in found.split(" or ")

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
