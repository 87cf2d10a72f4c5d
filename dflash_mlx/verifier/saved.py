"""What every cache of a sequence can do, and how it is kept on a disk: as arrays and JSON."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import Any, Protocol

import mlx.core as mx

from dflash_mlx.verifier.block import Block

Saved = tuple[list[mx.array], Any]  # arrays, and what JSON can hold of the rest


class Cache(Protocol):
    """What layers keep of one sequence: the committed tokens, and the rows of a running pass.

    A pass begins, and then a path of its rows is committed, or they are discarded. Those that stand
    for a layer in a pass have `joined(parts, forest)`, which gives one in the place of several.
    """

    length: int = 0  # committed tokens
    parts: Sequence[Any] = ()  # that move together
    tail: int = 0  # rows of a prompt that are best passed with its last one and no others
    kind: Hashable = ()  # settings that another has to share, to go on with what this has saved

    @property
    def arrays(self) -> list[mx.array]:
        """What has to be evaluated for it to be up to date."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept, ways back to earlier tokens included."""

    def begin(self, block: Block) -> None:
        """Announce the rows of the next pass."""

    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows in `path`, which increases, and no others."""

    def discard(self) -> None:
        """Drop the rows of the pass."""

    def nearest(self, length: int) -> int:
        """Where to go back to, for rows from there on to see all they should at `length` again."""

    def rewind(self, length: int) -> int:
        """Forget the committed tokens from `length` on; returns how many there are now.

        Where `nearest` is less than `length`, windows begin empty, and recurrent states raise
        ValueError.
        """

    def fork(self) -> Cache:
        """A copy that goes on by itself; storage is shared until either of them writes."""

    def saved(self) -> Saved:
        """All committed tokens, and ways back to earlier ones."""

    def restore(self, saved: Saved) -> None:
        """Hold what a cache of the same kind has saved. ValueError for one of another."""

    def lengthen(self, rows: int) -> None:
        """Commit `rows` more tokens that nobody wrote, to time long contexts."""

    def mark(self, length: int) -> None:
        """Stay able to come back to `length`, near the end of a prompt, for some time."""
        return

    def mark_chunk(self) -> None:
        """Stay able to come back to where the last pass began, which read a part of a prompt."""
        return


def join(parts: Iterable[Saved]) -> Saved:
    """What several parts save, as one."""
    parts = list(parts)
    return [a for arrays, _ in parts for a in arrays], [[len(a), about] for a, about in parts]


def split(saved: Saved) -> list[Saved]:
    """The parts again. ValueError or TypeError for what `join` never made."""
    arrays, about = iter(saved[0]), saved[1]
    return [([*islice(arrays, count)], rest) for count, rest in about]
