"""The caches of a model's layers for one sequence, and passes over several sequences.

In such a pass the rows are side by side, each behind keys and values of its own. Projections, MLPs
and the head, which are what a pass costs, read their weights once for all rows; attention and
recurrent mixers go sequence by sequence. So nothing but the layers' caches knows of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_map

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.verifier.block import Block, Cache
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.routing import Kernels, Plans
from kernels_metal.cache_commit import CACHE_COMMIT, accepted_rows_reference, cache_commit


class Several(Cache):
    """Caches that move together."""

    def __init__(self, parts: Sequence[Cache]) -> None:
        self.parts = parts
        self.kind = tuple(part.kind for part in parts)
        self.tail = max((part.tail for part in parts), default=0)

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.parts[0].length


class KeyValues(Several):
    """Keys and values of all attention layers of one sequence, with and without windows."""

    parts: Sequence[LayerCache]

    def begin(self, block: Block) -> None:
        kernels = self.parts[0].kernels if self.parts else None  # one for all layers
        asks = kernels is not None and block.fits_kernels and kernels.active
        plans = Plans(kernels) if kernels is not None and asks else None
        for layer in self.parts:
            layer.begin(block, plans)

    def commit(self, path: Sequence[int]) -> None:
        self.discard()
        if any(row != i for i, row in enumerate(path)):
            self._move(path)
        for layer in self.parts:
            layer.length += len(path)

    def _move(self, path: Sequence[int]) -> None:
        kernels = self.parts[0].kernels
        if kernels is not None and kernels.active and self.parts[0].kv_bits is not None:
            kernels.note(CACHE_COMMIT.name, "keys and values are quantised")
            kernels = None

        def accepted_rows(*given: Any) -> list[mx.array]:
            rows = None if kernels is None else kernels.run(CACHE_COMMIT, *given)
            return accepted_rows_reference(*given) if rows is None else rows

        first = [layer.slots for layer in self.parts for _ in layer.arrays]
        cache_commit(self.arrays, path, first, accepted_rows)

    def fork(self) -> KeyValues:
        return KeyValues([layer.fork() for layer in self.parts])


class SequenceCache(Several):
    """All that the layers of one model keep of one sequence."""

    def __init__(self, layers: Iterable[Any], parts: Sequence[Cache] = ()) -> None:
        self.layers = [*layers]  # as the model takes them; a tuple where a layer has several
        super().__init__(parts or (KeyValues(self.layers),))

    @property
    def is_recurrent(self) -> bool:
        return self.tail > 0

    def refill_from(self, length: int) -> int:
        return super().nearest(length)

    def nearest(self, length: int) -> int:
        """The most tokens up to `length` that every layer can go back to with nothing missing."""
        length = min(length, self.length)
        while (found := self.refill_from(length)) < length:
            length = found
        return length

    def fork(self) -> SequenceCache:
        return self._with([part.fork() for part in self.parts])

    def beside(self) -> SequenceCache:
        """A cache that shares keys and values with this one and copies its recurrent states."""
        return self._with([part.fork() if part.tail else part for part in self.parts])

    def _with(self, parts: Sequence[Any]) -> SequenceCache:
        layers = [[*chain.from_iterable(p.parts for p in side)] for side in (self.parts, parts)]
        copies = dict(zip(*layers, strict=True))
        return SequenceCache(tree_map(copies.__getitem__, self.layers), parts)

    def lengthen(self, rows: int) -> None:
        if rows:
            super().lengthen(rows)


class Rows(NamedTuple):
    """The rows of one sequence in a pass."""

    tokens: mx.array  # [N] of `block`
    cache: SequenceCache  # what is before them
    block: Block
    embeddings: mx.array | None = None  # [N, d] in place of those of the tokens


def new_sequence(
    model: Any, name: str, kernels: Kernels | None, kv_bits: int | None
) -> SequenceCache:
    """Empty caches of the kinds that an mlx-lm model makes; DFlashError for other kinds."""
    from mlx_lm.models.cache import (  # not before a model is loaded: it takes seconds
        ArraysCache,
        CacheList,
        KVCache,
        RotatingKVCache,
        make_prompt_cache,
    )

    from dflash_mlx.verifier.recurrent import RecurrentLayer, RecurrentStates

    keyed: list[LayerCache] = []
    recurrent: list[RecurrentLayer] = []

    def ours(cache: Any, i: int) -> Any:
        window = cache.max_size if type(cache) is RotatingKVCache and cache.keep == 0 else None
        if window is not None or type(cache) is KVCache:
            keyed.append(LayerCache(window, kernels, kv_bits))
            return keyed[-1]
        if isinstance(cache, ArraysCache):
            recurrent.append(RecurrentLayer(len(cache.cache), len(recurrent)))
            return recurrent[-1]
        if type(cache) is CacheList and any(isinstance(c, ArraysCache) for c in cache.caches):
            return tuple(ours(inner, i) for inner in cache.caches)
        what = f"layer {i} of {name} keeps its state in a {type(cache).__name__}"
        step = "choose a model of another family"
        raise DFlashError(what + ", which cannot take a draft back", step)

    layers = [ours(cache, i) for i, cache in enumerate(make_prompt_cache(model))]
    parts: list[Cache] = [RecurrentStates(recurrent)] if recurrent else []
    return SequenceCache(layers, [*parts, *([KeyValues(keyed)] if keyed else [])])
