"""Plain decoding: the drafter that drafts nothing, the control of every comparison."""

from __future__ import annotations

import sys

import mlx.core as mx

from dflash_mlx.core.tree import Tree
from dflash_mlx.engine.state import State


class NoContext:
    """Remembers nothing and needs nothing, so it is up to date at any length."""

    @property
    def length(self) -> int:
        """As long as any sequence."""
        return sys.maxsize

    @property
    def arrays(self) -> list[mx.array]:
        """Nothing to evaluate."""
        return []

    def append(self, features: mx.array) -> None:
        """Nothing to keep."""

    def refill_from(self, length: int) -> int:
        """Nothing has to be."""
        return length

    def trim(self, length: int) -> None:
        """Nothing to forget."""


class NoDraft:
    """Every tree is its root: one token per round, the target's own.

    The next root needs no decision on the host, so one round runs ahead while the host reads the
    last; without that, the device would idle while Python builds each pass.
    """

    name = "none"
    taps: tuple[int, ...] = ()
    rounds_ahead = 1

    def new_context(self) -> NoContext:
        """No context."""
        return NoContext()

    def propose(self, state: State, room: int) -> Tree:
        """The anchor alone."""
        return Tree.chain(state.anchor)
