"""The caches of a model's layers for one sequence, which move together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.target.block import Block
from dflash_mlx.target.cache import LayerCache, commit_layers

if TYPE_CHECKING:
    from dflash_mlx.target.recurrent import RecurrentStates

TAIL = 32  # rows of a prompt's last pass but its last, so that a recurrent state can go back there


class SequenceCache:
    """The caches of all layers of one model for one sequence; they move together.

    layers: as the model takes them; a tuple where a layer has more than one. recurrent: the
    states of those that keep one.
    """

    def __init__(self, layers: Sequence[Any], recurrent: RecurrentStates | None = None) -> None:
        self.layers = list(layers)
        self._recurrent = recurrent
        self._attention = [part for part in flat(layers) if isinstance(part, LayerCache)]

    @property
    def length(self) -> int:
        """Committed tokens."""
        return (self._recurrent or self._attention[0]).length

    @property
    def tail(self) -> int:
        """Rows of a prompt that are best passed with its last one and no others."""
        return 0 if self._recurrent is None else TAIL

    @property
    def arrays(self) -> list[mx.array]:
        """What has to be evaluated for the caches to be up to date."""
        states = [] if self._recurrent is None else self._recurrent.arrays
        return [array for layer in self._attention for array in layer._stored] + states

    def extend(self, block: Block) -> None:
        """Announce the rows of the next pass. Recurrent layers take consecutive tokens only."""
        if self._recurrent is not None:
            if not block.is_run:
                raise DFlashError(
                    "a recurrent state cannot follow the branches of a tree",
                    "use --method dflash or --method ngram, which draft chains",
                )
            self._recurrent.begin(block.rows)
        kernels = self._attention[0].kernels if self._attention else None  # one for all layers
        asks = kernels is not None and kernels.active
        for layer in self._attention:
            layer.begin(block, asks)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the block's rows in `path`, for recurrent layers a leading run of them."""
        if self._recurrent is not None:
            self._recurrent.commit(path)
        if self._attention:
            commit_layers(self._attention, path)

    def lengthen(self, rows: int) -> None:
        """Commit `rows` more tokens that nobody wrote, to time long contexts."""
        if rows:
            for layer in self._attention:
                layer.lengthen(rows)
            if self._recurrent is not None:
                self._recurrent.length += rows
            mx.eval(self.arrays)

    def discard(self) -> None:
        """Drop the block's rows."""
        if self._recurrent is not None:
            self._recurrent.discard()
        for layer in self._attention:
            layer.discard()

    def mark(self, length: int) -> None:
        """Stay able to come back to `length`, near the end of a prompt, for some time."""
        if self._recurrent is not None:
            self._recurrent.mark(length)

    def nearest(self, length: int) -> int:
        """The most tokens up to `length` that every layer can go back to."""
        length = min(length, self.length)
        if self._recurrent is not None:
            length = self._recurrent.nearest(length)
        return length if all(layer.can_trim(length) for layer in self._attention) else 0

    def refill_from(self, length: int) -> int:
        """Where attention layers have to go back to, to see all they should at `length` again."""
        return min(layer.refill_from(length) for layer in self._attention)

    def trim(self, length: int) -> None:
        """Forget the committed tokens from `length` on.

        Where `nearest` is `length`, nothing else is lost; otherwise only attention layers can,
        and those with windows begin empty.
        """
        if self._recurrent is not None:
            self._recurrent.trim(length)
        for layer in self._attention:
            layer.trim(length)

    def fork(self) -> SequenceCache:
        """A copy that goes on by itself; storage is shared until either of them writes."""
        states = None if self._recurrent is None else self._recurrent.fork()

        def copied(layer: Any) -> Any:
            if isinstance(layer, tuple):
                return tuple(map(copied, layer))
            if isinstance(layer, LayerCache) or states is None:
                return layer.fork()
            return states.layers[layer.index]

        return SequenceCache([copied(layer) for layer in self.layers], states)


def flat(layers: Sequence[Any]) -> Iterator[Any]:
    """Every part of every layer, which may be a tuple of them."""
    for layer in layers:
        yield from layer if isinstance(layer, tuple) else (layer,)
