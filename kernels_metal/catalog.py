"""Every kernel with sample launches: what the signature test and the emulator's command line use.

Add an entry for each kernel; samples should cover each template, dtype and side of the limit of 8
elements, below which MLX passes an input as `constant`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx

from kernels_metal.factory import Kernel, Launch


@dataclass(frozen=True)
class Sample:
    """One launch of a kernel: what a wrapper would pass to `launch`."""

    kernel: Kernel
    inputs: tuple[mx.array, ...]
    plan: Launch


@dataclass(frozen=True)
class Entry:
    """A kernel in the catalog.

    `samples` makes a few launches. `run`, given the numbers of `--shape` by their `parameters`
    names and defaults, calls the wrapper on random inputs of that shape.
    """

    samples: Callable[[], Iterator[Sample]]
    run: Callable[..., object]
    parameters: dict[str, int]


CATALOG: dict[str, Entry] = {}
