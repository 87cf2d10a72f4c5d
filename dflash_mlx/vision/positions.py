"""Positions in three dimensions: text counts on behind pictures, which have rows and columns."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.verifier.block import Block, Cache, Saved

Table = npt.NDArray[np.int32]  # [3, n] frame, row and column of each token
_TEXT: Table = np.zeros((3, 0), np.int32)


class Positions(Cache):
    """Where the tokens of one sequence are rotated to (M-RoPE, arXiv 2409.12191, 2.1)."""

    def __init__(self, table: Table = _TEXT, length: int = 0) -> None:
        self.table = table  # as far as it is no count, or further
        self.length = length

    def of(self, block: Block, table: Table | None = None) -> Table:
        """[3, rows] those of a pass. table: of the prompt that it reads, where that has pictures.

        A token behind the table counts on from the largest number in its last column.
        """
        self.table = self.table[:, : self.length] if table is None else table
        places, width = block.depths + self.length, self.table.shape[1]
        ahead = self.table[:, -1].max() + 1 - width if width else 0
        found = np.broadcast_to(places + ahead, (3, len(places))).astype(np.int32)
        known = places < width
        found[:, known] = self.table[:, places[known]]
        return found

    @property
    def arrays(self) -> list[mx.array]:
        return []

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    def commit(self, path: Sequence[int]) -> None:
        self.length += len(path)

    def nearest(self, length: int) -> int:
        return min(length, self.length)

    def rewind(self, length: int) -> int:
        self.length = min(length, self.length)
        return self.length

    def fork(self) -> Positions:
        return Positions(self.table, self.length)

    def saved(self) -> Saved:
        return [mx.array(self.table[:, : self.length])], self.length

    def restore(self, saved: Saved) -> None:
        (table,), self.length = saved
        self.table = np.array(table)

    def lengthen(self, rows: int) -> None:
        self.length += rows
