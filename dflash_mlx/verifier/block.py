"""The rows of one target or drafter pass: where they are and what they see of each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.core.tree import Tree
from kernels_metal.visibility import MAX_LOCAL, MAX_ROWS, Visibility


@dataclass(frozen=True)
class Block:
    """The rows of one pass: consecutive tokens, the nodes of a tree, or branches side by side.

    branches: how many runs of rows / branches tokens begin at the same position and do not see
    each other (a forest). last_only: the target's logits are asked for after the last row alone.
    before: rows of the same run or tree that the passes before this one left behind the committed
    ones; the tree counts them.
    """

    rows: int
    tree: Tree | None = None
    branches: int = 1
    last_only: bool = False
    before: int = 0
    _positions: dict[int, mx.array] = field(default_factory=dict, init=False, compare=False)
    _places: dict[int, mx.array] = field(default_factory=dict, init=False, compare=False)
    _meanings: dict[object, tuple[mx.array | str | None, Visibility]] = field(
        default_factory=dict, init=False, compare=False
    )

    @classmethod
    def of(cls, tree: Tree, before: int = 0) -> Block:
        """A chain needs no explicit positions or mask; any other tree does."""
        return cls(len(tree) - before, None if tree.is_chain else tree, before=before)

    @cached_property
    def is_run(self) -> bool:
        """Whether the rows are consecutive tokens."""
        return self.tree is None and self.branches == 1

    @cached_property
    def fits_kernels(self) -> bool:
        """Whether attention's kernel takes so many rows."""
        return self.rows <= MAX_ROWS and self.before + self.rows <= MAX_LOCAL

    def positions(self, first: int) -> int | mx.array:
        """The position of the first row, or [rows] of each where they are not consecutive.

        All layers of a pass ask for the same ones, so they go to the device once.
        """
        if self.is_run:
            return first + self.before
        if first not in self._positions:
            self._positions[first] = mx.array(self.depths + first)
        return self._positions[first]

    def places(self, first: int) -> mx.array:
        """The position of each row, as `norm_rope` takes them: int32 [rows], or [8] of fewer."""
        if first not in self._places:
            places = np.zeros(max(self.rows, 8), np.int32)
            places[: self.rows] = self.depths + first
            self._places[first] = mx.array(places)
        return self._places[first]

    @cached_property
    def all_depths(self) -> npt.NDArray[np.int32]:
        """[before + rows] distance of each row from the first position."""
        if self.tree is not None:
            return np.array(self.tree.depths, np.int32)
        rows = self.before + self.rows
        return np.arange(rows, dtype=np.int32) % (rows // self.branches)

    @property
    def depths(self) -> npt.NDArray[np.int32]:
        """[rows] of the pass's own rows."""
        return self.all_depths[self.before :]

    @cached_property
    def same_branch(self) -> npt.NDArray[np.bool_]:
        """[rows, rows] which rows are in the same branch of a forest."""
        branch = np.arange(self.rows) // (self.rows // self.branches)
        same: npt.NDArray[np.bool_] = branch[:, None] == branch
        return same

    @cached_property
    def visible(self) -> npt.NDArray[np.bool_]:
        """[rows, before + rows] which rows of the block a causal row may attend to."""
        if self.tree is not None:
            return self.tree.ancestors[self.before :]
        seen = self.depths[:, None] >= self.all_depths
        return seen if self.branches == 1 else seen & self.same_branch

    def remember(self, mask: mx.array, seen: Visibility) -> None:
        """Note what a mask of this block stands for."""
        self._meanings[id(mask)] = mask, seen  # which keeps the mask, and so its id

    def seen(self, mask: mx.array | str | None, keys: int) -> Visibility | None:
        """What the rows see of `keys` keys under this mask; None for a mask made elsewhere."""
        if isinstance(mask, mx.array):
            known = self._meanings.get(id(mask))
            return known[1] if known is not None and known[1].keys == keys else None
        if (mask, keys) not in self._meanings:
            shape = self.rows, self.rows
            local = np.tri(*shape, dtype=np.bool_) if mask == "causal" else np.ones(shape, np.bool_)
            self._meanings[mask, keys] = mask, Visibility(keys - self.rows, local)
        return self._meanings[mask, keys][1]
