"""What tests of kernels that are tried beside decoding share: a process that tries, and Metal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dflash_mlx.verifier import routing
from kernels_metal import dispatch, watchdog
from kernels_metal.emulator import Run, emulated


class Tries(watchdog.Trials):
    """Stands for the process that tries kernels: says `wrong` once it is let."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong, self.asked = wrong, 0

    def __call__(self, given: str) -> str:
        self.asked += 1
        return self.wrong


@contextmanager
def emulated_metal() -> Iterator[Run]:
    """Within it the emulator stands for Metal."""
    with emulated() as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "metal", run)
        patch.setattr(dispatch, "metal", run)
        yield run
