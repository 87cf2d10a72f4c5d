"""What every drafter offers to the decode loop."""

from __future__ import annotations

from typing import Protocol

from dflash_mlx.core.tree import Tree
from dflash_mlx.engine.state import Context, State


class Drafter(Protocol):
    """Proposes trees; what it remembers of a sequence's tokens is in the context."""

    @property
    def name(self) -> str:
        """As in `--method`."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose output it reads, () for none."""

    @property
    def rounds_ahead(self) -> int:
        """Rounds that may start before the first of them is read.

        More than 0 only where the next tree does not depend on the tokens of this one.
        """

    def new_context(self) -> Context:
        """An empty context for one sequence."""

    def propose(self, state: State, room: int) -> Tree:
        """A tree whose root is the anchor and whose paths have 1 to `room` nodes."""
