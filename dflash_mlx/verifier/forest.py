"""Several sequences in one pass: their rows side by side, each behind keys and values of its own.

Projections, MLPs and the head, which are what a pass costs, read their weights once for all rows;
attention goes sequence by sequence. So nothing but the layers' caches knows of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.sequence import SequenceCache
from kernels_metal.norm_rope import padded

Mask = mx.array | str | None


class Rows(NamedTuple):
    """The rows of one sequence in a pass."""

    tokens: mx.array  # [N] of `block`
    cache: SequenceCache  # what is before them
    block: Block
    embeddings: mx.array | None = None  # [N, d] in place of those of the tokens


class Forest:
    """A pass over blocks of rows, each behind what a cache holds.

    layers: the caches as the model takes them. positions: [N] of each row; places: the same, as of
    `Block.places`.
    """

    def __init__(self, blocks: Sequence[tuple[SequenceCache, Block]]) -> None:
        ends = accumulate((block.rows for _, block in blocks), initial=0)
        self.parts = [slice(*bounds) for bounds in pairwise(ends)]
        self._masks: dict[int, tuple[mx.array, list[Mask]]] = {}
        for cache, block in blocks:
            cache.extend(block)
        positions = [block.depths + cache.length for cache, block in blocks]
        self.positions = mx.array(np.concatenate(positions))
        self.places = padded(self.positions)
        of_each = zip(*(cache.layers for cache, _ in blocks), strict=True)
        self.layers = [self._joined(layers) for layers in of_each]

    def _joined(self, layers: Sequence[Any]) -> Any:
        if isinstance(layers[0], tuple):  # a layer with several caches
            return tuple(self._joined(parts) for parts in zip(*layers, strict=True))
        if isinstance(layers[0], LayerCache):
            return JoinedLayer(layers, self)
        from dflash_mlx.verifier.recurrent import JoinedStates  # needs mlx-lm, which takes seconds

        return JoinedStates(layers, self.parts)

    def split(self, x: mx.array, axis: int) -> list[mx.array]:
        """The rows of each sequence."""
        before = (slice(None),) * (axis % x.ndim)
        return [x[(*before, part)] for part in self.parts]

    def stand_for(self, masks: list[Mask]) -> mx.array:
        """What the model carries from the maker of these masks to those who need them."""
        marker = mx.array(len(self._masks))
        self._masks[id(marker)] = marker, masks
        return marker

    def masks(self, marker: Mask) -> list[Mask]:
        """The masks that it stands for. TypeError for a mask that the model made, or changed."""
        if marker is None:
            return [None] * len(self.parts)
        if id(marker) not in self._masks:
            raise TypeError("this model makes or changes masks, so its sequences take turns")
        return self._masks[id(marker)][1]


class JoinedLayer:
    """The caches of one attention layer, parts, in the place of one."""

    def __init__(self, layers: Sequence[LayerCache], forest: Forest) -> None:
        self.parts, self.window, self._forest = layers, layers[0].window, forest
        self.offset, self.places = forest.positions, forest.places
        self._seen: list[tuple[mx.array, mx.array]] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Hand each sequence its rows; what each sees of them and before waits for `attend`."""
        both = (self._forest.split(rows, axis=-2) for rows in (keys, values))
        pairs = zip(self.parts, *both, strict=True)
        self._seen = [layer.update_and_fetch(*rows) for layer, *rows in pairs]
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """In place of those that `attend` has of this pass, for layers that share them."""
        return self.parts[0].keys_and_values()

    def make_mask(
        self, rows: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """What stands for a mask for each sequence."""
        made = (
            layer.make_mask(layer.block.rows, window_size, return_array) for layer in self.parts
        )
        return self.stand_for(list(made))

    def stand_for(self, masks: list[Mask]) -> mx.array:
        """As of the whole pass."""
        return self._forest.stand_for(masks)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention of each sequence's rows [1, heads, N, D] to its own keys and values."""
        parts = self._forest.split(queries, axis=-2)
        of_each = zip(self.parts, parts, self._seen, self._forest.masks(mask), strict=True)
        found = [
            layer.attend(part, *seen, scale=scale, mask=own, sinks=sinks)
            for layer, part, seen, own in of_each
        ]
        return mx.concatenate(found, axis=-2)
