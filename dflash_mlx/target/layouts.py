"""What each layer of a model remembers of a sequence, and empty caches of that kind."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.target.cache import LayerCache
from dflash_mlx.target.sequence import SequenceCache, flat


@dataclass(frozen=True)
class Attention:
    """Keys and values; a query sees `window` positions, or all where that is None."""

    window: int | None


@dataclass(frozen=True)
class Recurrent:
    """A state of `size` arrays, however long the sequence is."""

    size: int


Part = Attention | Recurrent
Layout = list[Part | tuple[Part, ...]]  # one entry per cache that the model asks for


def layout_of(model: Any, name: str) -> Layout:
    """Of the caches that an mlx-lm model makes. Raises DFlashError for kinds that are not ours."""
    from mlx_lm.models.cache import (  # not before a model is loaded: it takes seconds
        ArraysCache,
        CacheList,
        KVCache,
        RotatingKVCache,
        make_prompt_cache,
    )

    def part(cache: Any, i: int) -> Part:
        if type(cache) is KVCache:
            return Attention(None)
        if type(cache) is RotatingKVCache and cache.keep == 0:
            return Attention(cache.max_size)
        if isinstance(cache, ArraysCache):
            return Recurrent(len(cache.cache))
        raise DFlashError(
            f"layer {i} of {name} keeps its state in a {type(cache).__name__}, "
            "which cannot take a draft back",
            "choose a model of another family",
        )

    def entry(cache: Any, i: int) -> Part | tuple[Part, ...]:
        if type(cache) is CacheList and any(isinstance(c, ArraysCache) for c in cache.caches):
            return tuple(part(inner, i) for inner in cache.caches)
        return part(cache, i)

    return [entry(cache, i) for i, cache in enumerate(make_prompt_cache(model))]


def is_recurrent(layout: Layout) -> bool:
    """Whether any layer keeps a recurrent state."""
    return any(isinstance(part, Recurrent) for part in flat(layout))


def new_sequence(layout: Layout, attention: Callable[[int | None], LayerCache]) -> SequenceCache:
    """An empty cache for one sequence. attention: makes that of a layer with a given window."""
    if not is_recurrent(layout):
        return SequenceCache([attention(p.window) for p in flat(layout) if type(p) is Attention])
    from dflash_mlx.target.recurrent import RecurrentLayer, RecurrentStates

    states = RecurrentStates([])

    def make(part: Part) -> Any:
        if isinstance(part, Attention):
            return attention(part.window)
        states.layers.append(RecurrentLayer(part.size, len(states.layers)))
        return states.layers[-1]

    layers = [tuple(map(make, e)) if isinstance(e, tuple) else make(e) for e in layout]
    return SequenceCache(layers, states)


def may_be_recurrent(model_type: str) -> bool | None:
    """Whether models of a family can have recurrent layers, and so verify chains only.

    model_type: as in a config. The family's source is read; nothing is imported or made. None
    where the installed mlx-lm has no such family.
    """
    from mlx_lm import models
    from mlx_lm.utils import MODEL_REMAPPING

    files = {file.stem: file for file in Path(models.__path__[0]).glob("*.py")}
    waiting, seen = [MODEL_REMAPPING.get(model_type, model_type)], set[str]()
    if waiting[0] not in files:
        return None
    while waiting:
        seen.add(name := waiting.pop())
        nodes = ast.walk(ast.parse(files[name].read_text(encoding="utf-8")))
        relative = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.level == 1]
        imports = [(node.module or "", alias.name) for node in relative for alias in node.names]
        if ("cache", "ArraysCache") in imports:
            return True
        wrapped = [
            module or imported for module, imported in imports if imported == "Model" or not module
        ]
        waiting += [family for family in wrapped if family in files and family not in seen]
    return False
