"""The caches of a model's layers for one sequence, which move together."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import LayerCache, commit_layers
from dflash_mlx.verifier.saved import Saved, join, split

if TYPE_CHECKING:
    from dflash_mlx.verifier.recurrent import RecurrentStates

TAIL = 32  # rows of a prompt's last pass but its last, so that a recurrent state can go back there


class SequenceCache:
    """The caches of all layers of one model for one sequence; they move together.

    layers: as the model takes them; a tuple where a layer has more than one. recurrent: the
    states of those that keep one.
    """

    def __init__(self, layers: Sequence[Any], recurrent: RecurrentStates | None = None) -> None:
        self.layers = list(layers)
        self._recurrent = recurrent
        self._attention = [part for part in _flat(layers) if isinstance(part, LayerCache)]
        self._all: list[Any] = [*([] if recurrent is None else [recurrent]), *self._attention]

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._all[0].length  # type: ignore[no-any-return]

    @property
    def is_recurrent(self) -> bool:
        """Whether layers keep a recurrent state."""
        return self._recurrent is not None

    @property
    def tail(self) -> int:
        """Rows of a prompt that are best passed with its last one and no others."""
        return TAIL if self.is_recurrent else 0

    @property
    def arrays(self) -> list[mx.array]:
        """What has to be evaluated for the caches to be up to date."""
        return [array for part in self._all for array in part.arrays]

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept, ways back to earlier recurrent states included."""
        return sum(part.nbytes for part in self._all)

    @property
    def kind(self) -> tuple[tuple[int | None, int | None], ...]:
        """Window and bits of each attention layer."""
        return tuple((layer.window, layer.kv_bits) for layer in self._attention)

    def extend(self, block: Block) -> None:
        """Announce the rows of the next pass."""
        if self._recurrent is not None:
            self._recurrent.begin(block)
        kernels = self._attention[0].kernels if self._attention else None  # one for all layers
        asks = kernels is not None and kernels.active
        for layer in self._attention:
            layer.begin(block, asks)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the block's rows in `path`, for recurrent layers one that begins at the first."""
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
        for part in self._all:
            part.discard()

    def mark(self, length: int) -> None:
        """Stay able to come back to `length`, near the end of a prompt, for some time."""
        if self._recurrent is not None:
            self._recurrent.mark(length)

    def mark_chunk(self) -> None:
        """Stay able to come back to where the last pass began, which read a part of a prompt."""
        if self._recurrent is not None:
            self._recurrent.mark_chunk()

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
        for part in self._all:
            part.trim(length)

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

    def saved(self) -> Saved:
        """All committed tokens, and the ways back to earlier recurrent states."""
        return join(part.saved() for part in self._all)

    def restore(self, saved: Saved) -> None:
        """Hold what a cache of the same kind has saved. ValueError for one of another."""
        for part, own in zip(self._all, split(saved), strict=True):
            part.restore(own)


def new_sequence(
    model: Any, name: str, attention: Callable[[int | None], LayerCache]
) -> SequenceCache:
    """Empty caches for one sequence, of the kinds that an mlx-lm model makes.

    attention: makes that of a layer with a given window. Raises DFlashError for kinds that are not
    ours.
    """
    from mlx_lm.models.cache import (  # not before a model is loaded: it takes seconds
        ArraysCache,
        CacheList,
        KVCache,
        RotatingKVCache,
        make_prompt_cache,
    )

    from dflash_mlx.verifier.recurrent import RecurrentLayer, RecurrentStates

    states = RecurrentStates([])

    def ours(cache: Any, i: int) -> Any:
        if type(cache) is KVCache:
            return attention(None)
        if type(cache) is RotatingKVCache and cache.keep == 0:
            return attention(cache.max_size)
        if isinstance(cache, ArraysCache):
            states.layers.append(RecurrentLayer(len(cache.cache), len(states.layers)))
            return states.layers[-1]
        if type(cache) is CacheList and any(isinstance(c, ArraysCache) for c in cache.caches):
            return tuple(ours(inner, i) for inner in cache.caches)
        raise DFlashError(
            f"layer {i} of {name} keeps its state in a {type(cache).__name__}, "
            "which cannot take a draft back",
            "choose a model of another family",
        )

    layers = [ours(cache, i) for i, cache in enumerate(make_prompt_cache(model))]
    return SequenceCache(layers, states if states.layers else None)


def recurrent_sources(model_type: str) -> frozenset[str] | None:
    """The sources in mlx-lm of the recurrent layers that models of a family can have.

    model_type: as in a config. Sources are read; nothing is imported or made. None where the
    installed mlx-lm has no such family.
    """
    from mlx_lm import models
    from mlx_lm.utils import MODEL_REMAPPING

    files = {file.stem: file for file in Path(models.__path__[0]).glob("*.py")}
    waiting, seen = [MODEL_REMAPPING.get(model_type, model_type)], set[str]()
    found = set[str]()
    if waiting[0] not in files:
        return None
    while waiting:
        seen.add(name := waiting.pop())
        nodes = ast.walk(ast.parse(files[name].read_text(encoding="utf-8")))
        relative = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.level == 1]
        imports = [(node.module or "", alias.name) for node in relative for alias in node.names]
        if ("cache", "ArraysCache") in imports:
            found.add(name)
        wrapped = [
            module or imported for module, imported in imports if imported == "Model" or not module
        ]
        waiting += [family for family in wrapped if family in files and family not in seen]
    return frozenset(found)


def _flat(layers: Sequence[Any]) -> Iterator[Any]:
    """Every part of every layer, which may be a tuple of them."""
    for layer in layers:
        yield from layer if isinstance(layer, tuple) else (layer,)
