"""Runs the kernels' unmodified Metal source on the CPU, and checks every step.

    with emulated() as run:
        y = scale(x)  # any wrapper: its launches come here
    run.counters[0].buffers["x"].read

It shows what a kernel computes and which memory it touches; not how fast Metal would be, nor what
Apple's compiler would refuse beyond the lint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from kernels_metal.emulator.errors import EmulatorError
from kernels_metal.emulator.launcher import Counters, Traffic, run_kernel
from kernels_metal.emulator.lint import check
from kernels_metal.factory import Kernel, Launch, executing

__all__ = ["Counters", "EmulatorError", "Run", "Traffic", "emulated"]


@dataclass
class Run:
    """The launches so far: `counters` has one entry for each, in their order.

    With `folder` the kernels' files are taken from there instead.
    """

    folder: Path | None = None
    counters: list[Counters] = field(default_factory=list)

    def of(self, name: str) -> list[Counters]:
        """Those of one kernel."""
        return [c for c in self.counters if c.kernel == name]

    def __call__(self, kernel: Kernel, inputs: Sequence[mx.array], plan: Launch) -> list[mx.array]:
        """Run one launch; the executor of the factory."""
        if self.folder:
            kernel = dataclasses.replace(kernel, folder=self.folder)
        check(kernel, plan)
        outputs, counters = run_kernel(kernel, inputs, plan)
        self.counters.append(counters)
        return outputs


@contextmanager
def emulated(folder: Path | None = None) -> Iterator[Run]:
    """Inside the block every launch runs here. Raises EmulatorError for a faulty kernel."""
    run = Run(folder)
    with executing(run):
        yield run
