"""The rows of one target or drafter pass, and what every cache can do with them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, islice, pairwise
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_map

from dflash_mlx.core.tree import Tree
from kernels_metal.norm_rope import padded
from kernels_metal.visibility import MAX_LOCAL, MAX_ROWS, Visibility


class Mask(mx.array):
    """Bool [rows, keys] that knows what it means; what a model makes of it is a plain array."""

    def __init__(self, values: mx.array, seen: Visibility) -> None:
        super().__init__(values)
        self.seen = seen


class JoinedMask(mx.array):
    """Stands for a mask for each of several sequences; a model that changes it loses them."""

    def __init__(self, of_each: list[mx.array | str | None]) -> None:
        super().__init__(0)
        self.of_each = of_each


@dataclass(frozen=True)
class Block:
    """The rows of one pass: consecutive tokens, the nodes of a tree, or branches side by side."""

    rows: int
    tree: Tree | None = None
    # Runs of rows / branches tokens that begin at the same position and do not see each other
    branches: int = 1
    last_only: bool = False  # the target's logits are asked for after the last row alone
    # Rows of the same run or tree, which counts them, that passes before this one left behind the
    # committed ones
    before: int = 0
    _positions: dict[int, mx.array] = field(default_factory=dict, init=False, compare=False)
    _places: dict[int, mx.array] = field(default_factory=dict, init=False, compare=False)

    @classmethod
    def of(cls, tree: Tree, before: int = 0) -> Block:
        """A chain needs no explicit positions or mask; any other tree does."""
        return cls(len(tree) - before, None if tree.is_chain else tree, before=before)

    @cached_property
    def is_run(self) -> bool:
        return self.tree is None and self.branches == 1

    @cached_property
    def fits_kernels(self) -> bool:
        return self.rows <= MAX_ROWS and self.before + self.rows <= MAX_LOCAL

    def positions(self, first: int) -> int | mx.array:
        """The position of the first row, or [rows] of each where they are not consecutive."""
        if self.is_run:
            return first + self.before
        if first not in self._positions:
            self._positions[first] = mx.array(self.depths + first)
        return self._positions[first]

    def places(self, first: int) -> mx.array:
        """The position of each row, as `norm_rope` takes them: int32 [rows], or [8] of fewer."""
        if first not in self._places:
            depths = range(self.before, self.before + self.rows) if self.is_run else self.depths
            places = [*(int(depth) + first for depth in depths), *[0] * (8 - self.rows)]
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

    def mask(
        self, visible: npt.NDArray[np.bool_], prefix: int, window: int | None, meant: bool
    ) -> mx.array:
        """Bool [rows, prefix + before + rows]: what is committed, then the block's own rows.

        visible: [rows, before + rows] which rows of the block each row sees. The window counts from
        each row's own position. meant: whether somebody will ask what the mask means.
        """
        depths = self.depths
        first = np.zeros_like(depths)
        if window is not None:
            first = np.clip(prefix + depths - window + 1, 0, prefix)
            visible = visible & (self.all_depths > depths[:, None] - window)
        committed = mx.arange(prefix) >= mx.array(first)[:, None]
        mask = mx.concatenate([committed, mx.array(visible)], axis=1)
        return Mask(mask, Visibility(prefix, visible, tuple(first.tolist()))) if meant else mask

    def seen(self, mask: Visibility | str | None, keys: int) -> Visibility:
        """What the rows see of so many keys where the mask is "causal", or None: all."""
        if isinstance(mask, Visibility):
            return mask
        return Visibility(keys - self.rows, _local(self.rows, mask is None))


@lru_cache(128)
def _local(rows: int, all_of_them: bool) -> npt.NDArray[np.bool_]:
    """What rows see of each other: all, or those up to them."""
    return np.ones((rows, rows), np.bool_) if all_of_them else np.tri(rows, dtype=np.bool_)


Saved = tuple[list[mx.array], Any]  # arrays, and what JSON can hold of the rest


def join(parts: Iterable[Saved]) -> Saved:
    """What several parts save, as one."""
    parts = list(parts)
    return [a for arrays, _ in parts for a in arrays], [[len(a), about] for a, about in parts]


def split(saved: Saved) -> list[Saved]:
    """The parts again. ValueError or TypeError for what `join` never made."""
    arrays, about = iter(saved[0]), saved[1]
    return [([*islice(arrays, count)], rest) for count, rest in about]


class Cache(Protocol):
    """What layers keep of one sequence: the committed tokens, and the rows of a running pass.

    A pass begins, and then a path of its rows is committed, or they are discarded. What is written
    here is for caches that are made of others. Those that stand for a layer in a pass have
    `joined(parts, forest)`, which gives one in the place of several.
    """

    length: int = 0  # committed tokens
    parts: Sequence[Cache] = ()  # that move together
    tail: int = 0  # rows of a prompt that are best passed with its last one and no others
    ways: int = 0  # earlier states that it keeps, at most
    kind: Hashable = ()  # settings that another has to share, to go on with what this has saved

    @property
    def arrays(self) -> list[mx.array]:
        """What has to be evaluated for it to be up to date."""
        return [array for part in self.parts for array in part.arrays]

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept, ways back to earlier tokens included."""
        return sum(part.nbytes for part in self.parts)

    def begin(self, block: Block) -> None:
        """Announce the rows of the next pass."""
        for part in self.parts:
            part.begin(block)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows in `path`, which increases, and no others."""
        for part in self.parts:
            part.commit(path)

    def discard(self) -> None:
        """Drop the rows of the pass."""
        for part in self.parts:
            part.discard()

    def nearest(self, length: int) -> int:
        """Where to go back to, for rows from there on to see all they should at `length` again."""
        return min(part.nearest(length) for part in self.parts)

    def rewind(self, length: int) -> int:
        """Forget tokens from `length` on; returns how many are left. ValueError for no way back."""
        return min(part.rewind(length) for part in self.parts)

    def fork(self) -> Cache:
        """A copy that goes on by itself; storage is shared until either of them writes."""

    def saved(self) -> Saved:
        """All committed tokens, and ways back to earlier ones."""
        return join(part.saved() for part in self.parts)

    def restore(self, saved: Saved) -> None:
        """Hold what a cache of the same kind has saved. ValueError for one of another."""
        for part, own in zip(self.parts, split(saved), strict=True):
            part.restore(own)

    def lengthen(self, rows: int) -> None:
        """Commit `rows` more tokens that nobody wrote, to time long contexts."""
        for part in self.parts:
            part.lengthen(rows)

    def mark(self, length: int) -> None:
        """Stay able to come back to `length`, near the end of a prompt, for some time."""
        for part in self.parts:
            part.mark(length)

    def mark_chunk(self, ends: Sequence[int] = ()) -> None:
        """Stay able to come back to where the last pass began, which read a part of a prompt.

        ends: of its turns, which stay until another prompt has others.
        """
        for part in self.parts:
            part.mark_chunk(ends)


class Forest:
    """A pass over blocks of rows, each behind what the caches of one sequence's layers hold."""

    def __init__(self, blocks: Sequence[tuple[Any, Block]]) -> None:
        ends = accumulate((block.rows for _, block in blocks), initial=0)
        self.parts = [slice(*bounds) for bounds in pairwise(ends)]  # the rows of each sequence
        for cache, block in blocks:
            cache.begin(block)
        positions = [block.depths + cache.length for cache, block in blocks]
        self.positions = mx.array(np.concatenate(positions))  # [N] of each row
        self.places = padded(self.positions)  # the same, as of `Block.places`

        def joined(*layers: Any) -> Any:
            return layers[0].joined(layers, self)

        self.layers = tree_map(joined, *(cache.layers for cache, _ in blocks))

    def split(self, x: mx.array, axis: int) -> list[mx.array]:
        before = (slice(None),) * (axis % x.ndim)
        return [x[(*before, part)] for part in self.parts]
