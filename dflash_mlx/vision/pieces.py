"""A picture as a piece of a prompt, and the rows of a pass that reads some of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.core.prompt import Piece
from dflash_mlx.verifier.block import Block
from dflash_mlx.vision.positions import Table


class Look(NamedTuple):
    """What a tower gives of one picture."""

    rows: mx.array  # [n, d] in place of the embeddings of its n placeholders
    deeper: mx.array | None = None  # [K, n, d] added behind each of the first K layers

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.deeper is None else self.deeper.nbytes)


@dataclass(frozen=True)
class Sight(Piece):
    """A picture of a prompt, with the words among its rows that its processor writes there."""

    look: Callable[[], Look] | None = field(default=None, compare=False)
    places: tuple[int, ...] = field(default=(), compare=False)  # of its placeholders in the prompt
    table: Table | None = field(default=None, compare=False)  # of the prompt, see `Positions.of`


Spans = tuple[tuple[int, int], ...]  # first row and end


class Embedded(mx.array):
    """Rows of a pass in place of the embeddings of its tokens, and what goes beside them."""

    def __init__(
        self, rows: mx.array, beside: dict[str, Any], table: Table | None, mutual: Spans = ()
    ) -> None:
        super().__init__(rows)
        self.beside, self.table, self.mutual = beside, table, mutual


@dataclass(frozen=True)
class Mutual(Block):
    """Consecutive tokens, among which those of a picture see all of it."""

    spans: Spans = ()
    windowed: bool = False  # only in layers with a window

    @cached_property
    def is_run(self) -> bool:
        return False

    @cached_property
    def visible(self) -> npt.NDArray[np.bool_]:
        seen = np.tri(self.rows, dtype=np.bool_)
        for first, end in self.spans:
            seen[first:end, first:end] = True
        return seen

    def mask(
        self, visible: npt.NDArray[np.bool_], prefix: int, window: int | None, meant: bool
    ) -> mx.array:
        if self.windowed and window is None:
            visible = np.tri(self.rows, dtype=np.bool_)
        return super().mask(visible, prefix, window, meant)
