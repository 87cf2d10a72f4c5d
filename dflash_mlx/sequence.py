"""The caches of a model's layers for one sequence, which move together."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from dflash_mlx.block import Block
from dflash_mlx.cache import LayerCache, commit_layers


class SequenceCache:
    """The caches of all layers of one model for one sequence; they move together."""

    def __init__(self, layers: Sequence[LayerCache]) -> None:
        self.layers = list(layers)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.layers[0].length

    @property
    def arrays(self) -> list[mx.array]:
        """What has to be evaluated for the caches to be up to date."""
        return [array for layer in self.layers for array in layer.arrays]

    def extend(self, block: Block) -> None:
        """Announce the rows of the next pass."""
        for layer in self.layers:
            layer.block = block

    def commit(self, path: Sequence[int]) -> None:
        """Keep the block's rows in `path`."""
        commit_layers(self.layers, path)

    def discard(self) -> None:
        """Drop the block's rows."""
        for layer in self.layers:
            layer.discard()

    def can_trim(self, length: int) -> bool:
        """Whether every layer can go back to `length` tokens."""
        return all(layer.can_trim(length) for layer in self.layers)

    def trim(self, length: int) -> None:
        """Forget the committed tokens from `length` on."""
        for layer in self.layers:
            layer.trim(length)

    def fork(self) -> SequenceCache:
        """A copy that goes on by itself; storage is shared until either of them writes."""
        return SequenceCache([layer.fork() for layer in self.layers])
