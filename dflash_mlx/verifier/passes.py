"""Passes of recurrent layers that lead back to earlier states, and which of them are kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dflash_mlx.core.tree import Tree
from dflash_mlx.verifier.mixers import Call, Paths
from dflash_mlx.verifier.tape import Behind

CHUNKS = 4  # parts of prompts whose beginnings are kept; states can be large


@dataclass(frozen=True)
class Pass:
    """A pass behind `start` tokens, of which the rows on `path` were committed."""

    start: int
    parents: Sequence[int]  # the row before each row, -1 for the first
    before: tuple[tuple[Any, ...], ...]  # the states of all layers, None for none yet
    calls: list[Call] | None = None  # of the mixers; None where they were not kept
    path: Sequence[int] = ()
    tree: Tree | None = None

    @cached_property
    def paths(self) -> Paths | None:
        """Of a tree, for mixers that have to follow them."""
        return None if self.tree is None else Paths.of(self.tree)

    def nearest(self, length: int) -> int:
        """The most tokens up to `length`, at least `start`, that it leads back to."""
        return min(length, self.start + len(self.path)) if self.calls is not None else self.start

    def beginning(self) -> Pass:
        return replace(self, calls=None, path=())

    def begun(self) -> tuple[tuple[Any, ...], ...]:
        """The states before it, with those that it has computed itself."""
        before = [*self.before]
        for call in self.calls or ():
            for rows in call.tapes:
                convolved, state = before[call.layer]
                if isinstance(state, Behind) and rows.begun is not None:
                    before[call.layer] = convolved, rows.begun
        return tuple(before)

    def leads(self, path: Sequence[int]) -> bool:
        """Whether `path` begins at the first row, and each of its rows follows the one before."""
        rows, steps = range(len(self.parents)), zip(path, (-1, *path), strict=False)
        return all(row in rows and self.parents[row] == before for row, before in steps)


def spread(chunks: list[Pass], kept: Collection[int] = ()) -> list[Pass]:
    """At most CHUNKS of them, in order and the last among them, that leave no wide gaps.

    kept: where passes began that stay beside these.
    """
    while sum(chunk.start not in kept for chunk in chunks) > CHUNKS:
        starts = [0, *(chunk.start for chunk in chunks)]
        gaps = zip(starts, starts[1:], starts[2:], strict=False)
        _, leaves = min((after - before, at) for before, at, after in gaps if at not in kept)
        chunks = [chunk for chunk in chunks if chunk.start != leaves]
    return chunks
