"""What Apple's compiler refuses though clang takes it, and what the emulator would get wrong."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from kernels_metal.factory import Kernel, Launch


def check(kernel: Kernel, inputs: Sequence[mx.array], plan: Launch) -> None:
    """Raises EmulatorError, kind lint or limit."""
