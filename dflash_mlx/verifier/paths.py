"""Trees for recurrent mixers: the root-to-leaf paths side by side, as a batch of chains.

A recurrent state follows one path. So a mixer runs over all paths at once, from as many copies of
the state before the pass; its matrix products, which are most of its work, see every node once.
Nothing of a mixer is written anew (compare the scans along trees of arXiv 2505.14969, 2608.20961).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.core.tree import Tree
from dflash_mlx.verifier.hooks import subclass
from dflash_mlx.verifier.passes import own

# Sources in mlx-lm whose mixers take a batch of paths, and whose layers give every row a position
# of its own. Only what the tests try is here.
TREE_MIXERS = frozenset(
    {
        "falcon_h1", "gear", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe",
        "mamba2", "nemotron_h", "olmo_hybrid", "plamo2", "qwen3_5", "qwen3_next",
        "recurrent_gemma", "rwkv7",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Paths:
    """B paths of L rows, the shorter ones filled up at their ends.

    nodes: [B, L] the node in every place. places: [N] a place of every node, counted row by row.
    """

    nodes: mx.array
    places: mx.array

    @classmethod
    def of(cls, tree: Tree) -> Paths:
        """From the root to each leaf of `tree`."""
        leaves = sorted(set(range(len(tree))) - set(tree.parents))
        nodes = np.tile(np.array(leaves)[:, None], max(tree.depths) + 1)
        places = np.zeros(len(tree), np.int32)
        for i, leaf in enumerate(leaves):
            path = np.flatnonzero(tree.ancestors[leaf])
            nodes[i, : len(path)] = path
            places[path] = i * nodes.shape[1] + np.arange(len(path))
        return cls(mx.array(nodes.astype(np.int32)), mx.array(places))

    def spread(self, value: Any) -> Any:
        """[1, N, ...] -> [B, L, ...]; whatever else, as it is."""
        is_rows = isinstance(value, mx.array) and value.shape[:2] == (1, self.places.size)
        return value[0][self.nodes] if is_rows else value

    def collect(self, value: Any) -> Any:
        """[B, L, ...] -> [1, N, ...], of each part of a tuple."""
        if isinstance(value, tuple):
            return tuple(map(self.collect, value))
        is_rows = isinstance(value, mx.array) and value.shape[:2] == self.nodes.shape
        return value.flatten(0, 1)[self.places][None] if is_rows else value

    def copies(self, state: Sequence[mx.array | None]) -> list[mx.array | None]:
        """A state [1, ...] for each path, [B, ...]."""
        paths = self.nodes.shape[0]
        return [a if a is None else mx.broadcast_to(a, (paths, *a.shape[1:])) for a in state]


Noted = dict[int, list[mx.array]]  # by a module's id: what it gave in a pass, [1, rows, d] each


class Products:
    """The linear modules of one mixer, which read most of its weights.

    They can be given the places of paths and see nodes; and what they gave in a pass can be given
    again for some of its rows, with no weight read a second time.
    """

    def __init__(self, mixer: nn.Module) -> None:
        kinds = nn.Linear, nn.QuantizedLinear
        self._modules = [module for module in mixer.modules() if isinstance(module, kinds)]
        self._classes: list[type] = []
        self._hooked: list[type] = []
        self._paths: Paths | None = None
        self._noted: Noted | None = None
        self._known: Noted = {}

    @contextmanager
    def noted_in(self, noted: Noted, paths: Paths | None) -> Iterator[None]:
        """Within it what they give is noted.

        paths: their rows [B, L, d] stand for nodes, of which each is computed once.
        """
        self._noted, self._paths = noted, paths
        try:
            with self._in_their_places():
                yield
        finally:
            self._noted = self._paths = None

    @contextmanager
    def given_again(self, noted: Noted, rows: int, kept: slice | mx.array) -> Iterator[None]:
        """Within it they give the rows `kept` of what was noted of `rows`, and compute nothing."""
        of_rows = {
            key: given
            for key, given in noted.items()
            if all(y.shape[:2] == (1, rows) for y in given)
        }
        self._known = {key: [y[:, kept] for y in given] for key, given in of_rows.items()}
        try:
            with self._in_their_places():
                yield
        finally:
            self._known = {}

    @contextmanager
    def _in_their_places(self) -> Iterator[None]:
        classes = [type(module) for module in self._modules]
        if classes != self._classes:  # kernels come and go; making a class takes its time
            self._classes, self._hooked = classes, [self._hook(kind) for kind in classes]
        _become(self._modules, self._hooked)
        try:
            yield
        finally:
            _become(self._modules, classes)

    def _hook(self, original: type) -> type:
        forward: Callable[..., mx.array] = original.__call__

        def __call__(module: nn.Module, x: mx.array) -> mx.array:
            if known := self._known.get(id(module)):
                return known.pop(0)
            paths = self._paths
            if paths is None or x.ndim != 3 or x.shape[:2] != paths.nodes.shape:
                return self._note(module, forward(module, x))
            nodes: mx.array = paths.spread(self._note(module, forward(module, paths.collect(x))))
            return nodes

        return subclass(original, "__call__", __call__)

    def _note(self, module: nn.Module, y: mx.array) -> mx.array:
        if self._noted is not None:
            self._noted.setdefault(id(module), []).append(own(y))
        return y


def _become(modules: Sequence[nn.Module], classes: Sequence[type]) -> None:
    """Give each its class, past `nn.Module.__setattr__`, which takes ten times as long."""
    for module, kind in zip(modules, classes, strict=True):
        object.__setattr__(module, "__class__", kind)
