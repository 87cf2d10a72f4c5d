"""Recurrent mixers (gated delta nets, Mamba, short convolutions) as a target's passes call them.

A recurrent state follows one path. So for a tree a mixer runs over all root-to-leaf paths at once,
a batch of chains, from as many copies of the state before the pass; its matrix products, which are
most of its work, see every node once. What they gave is noted until the commit, for calls that are
run again over the rows that stay. A gated delta net leaves more, see `tape.py`. Nothing of a mixer
is written anew (compare the scans along trees of arXiv 2505.14969, 2608.20961).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.core.tree import Tree, rows_on
from dflash_mlx.verifier.fusion import made_for, source_of
from dflash_mlx.verifier.hooks import Hooks
from dflash_mlx.verifier.routing import Kernels
from dflash_mlx.verifier.tape import DeltaKernels, Rows, part, settled
from kernels_metal.delta_net import MAX_ROWS

# Sources in mlx-lm whose mixers take a batch of paths, and whose layers give every row a position
# of its own. Only what the tests try is here.
TREE_MIXERS = frozenset(
    {
        "falcon_h1", "gear", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe",
        "mamba2", "nemotron_h", "olmo_hybrid", "plamo2", "qwen3_5", "qwen3_next",
        "recurrent_gemma", "rwkv7",
    }
)  # fmt: skip
# Other families with recurrent layers, whose mixers nobody tried on branches
UNTRIED = frozenset(
    {
        "baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "kimi_k3",
        "longcat_flash_ngram", "mamba",
    }
)  # fmt: skip
# Calls of gated delta nets as Qwen3-Next's: what is convolved and the state are all they keep
BY_KERNELS = "qwen3_5.GatedDeltaNet"
DELTA_NETS = frozenset({BY_KERNELS, "qwen3_next.Qwen3NextGatedDeltaNet"})
STATE = object()  # stands for the layer's state among the arguments of a kept call
Noted = dict[int, list[mx.array]]  # by a product's number: what it gave, [1, rows, d] each


@dataclass(frozen=True)
class Paths:
    """B paths of L rows, the shorter ones filled up at their ends."""

    nodes: mx.array  # [B, L] the node in every place
    places: mx.array  # [N] a place of every node, counted row by row
    leads: Sequence[int]  # [N] the path of this place

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
        leads = (places // nodes.shape[1]).tolist()
        return cls(mx.array(nodes.astype(np.int32)), mx.array(places), leads)

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

    def copies(self, state: Sequence[Any]) -> list[mx.array | None]:
        paths = self.nodes.shape[0]
        arrays = map(settled, state)
        return [a if a is None else mx.broadcast_to(a, (paths, *a.shape[1:])) for a in arrays]


class Products:
    """The linear modules of mixers: they see each node once, and give again what they gave.

    What a gated delta net's pass leaves for its commit is found here as well.
    """

    def __init__(self, mixers: Sequence[nn.Module], kernels: Kernels) -> None:
        self._kernels = DeltaKernels(kernels)
        known = (mixer for mixer in mixers if source_of(type(mixer).__call__) == BY_KERNELS)
        self._nets = {id(net): net for net in known if net.head_k_dim == net.head_v_dim}
        kinds = nn.Linear, nn.QuantizedLinear
        modules = [module for mixer in mixers for module in mixer.modules()]
        self._modules = [module for module in modules if isinstance(module, kinds)]
        self._convolutions = [module for module in modules if isinstance(module, nn.Conv1d)]
        # Of the one mixer that is running, if it is to be noted or given again
        self._call: Call | None = None
        self._paths: Paths | None = None
        self._known: Noted = {}
        self._nodes: tuple[mx.array, mx.array] | None = None  # an input along paths, and by nodes
        self._window: mx.array | None = None  # what its convolution was given

    def hook(self, hooks: Hooks) -> None:
        for i, module in enumerate(self._modules):
            asking = self._asking(i, type(module).__call__)
            hooks.replace(module, "__call__", asking, made_for(module))
        for net in self._nets.values():
            hooks.replace(
                net, "__call__", type(net).__call__, partial(self._kernels.net, net, self)
            )
        for convolution in self._convolutions:
            hooks.replace(convolution, "__call__", self._seeing(type(convolution).__call__))

    @contextmanager
    def of_call(
        self, call: Call | None, paths: Paths | None = None, known: Noted | None = None
    ) -> Iterator[None]:
        """Within it `call` is noted, once per node of `paths`; `known` ones are not computed."""
        self._call, self._paths, self._known = call, paths, known or {}
        try:
            yield
        finally:
            self._call = self._paths = self._nodes = self._window = None
            self._known = {}

    @property
    def are_taped(self) -> bool:
        """Whether passes of one row leave a tape as well, since a kernel replays what stays."""
        return bool(self._nets) and self._kernels.run

    def by_kernels(self, call: Call, layer: Any) -> Any:
        """A net's output by kernels, for a chain or a tree; None where no kernel takes the call."""
        net = call.mixer
        if id(net) not in self._nets or not self._kernels.run or net.sharding_group is not None:
            return None
        if call.args[1:2] != (None,) or call.args[0].shape[1] > MAX_ROWS:  # the mask
            return None
        made = self._kernels(net, call.args[0], layer.cache, layer.running.parents)
        if made is None:
            return None
        out, left = made
        layer.follow(net, self, left)
        return out

    def update(self, stock: Callable[..., Any], *rows: Any, **how: Any) -> Any:
        """mlx-lm's `gated_delta_update`, what it was given of rows is kept.

        rows: q, k, v, a and b, [1, R, ...] each, rates and biases, the state and a mask.
        """
        *given, state, mask = rows
        call, paths, window = self._call, self._paths, self._window
        follows = paths is None or given[0].shape[:2] == paths.nodes.shape
        state = settled(state)
        if call is not None and window is not None and mask is None and follows:

            def state_behind(state: Any, batch: int, places: Sequence[int]) -> Any:
                k, *others = (part(x, batch, places) for x in given[1:5])
                return stock(k, k, *others, *given[5:], settled(state), None, **how)[1]

            before = window.shape[1] - given[0].shape[1]
            leads = None if paths is None else paths.leads
            call.tapes.append(Rows(window, before, state_behind, leads))
        return stock(*given, state, mask, **how)

    def _seeing(self, forward: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def convolve(module: nn.Module, x: mx.array) -> mx.array:
            self._window = None if self._call is None else x
            return forward(module, x)

        return convolve

    def _asking(self, i: int, forward: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def product(module: nn.Module, x: mx.array) -> mx.array:
            if known := self._known.get(i):
                return known.pop(0)
            call, paths = self._call, self._paths
            if call is None:
                return forward(module, x)
            on_paths = paths is not None and x.ndim == 3 and x.shape[:2] == paths.nodes.shape
            y = forward(module, self._by_nodes(paths, x) if paths and on_paths else x)
            call.noted.setdefault(i, []).append(own(y))
            return paths.spread(y) if paths and on_paths else y

        return product

    def _by_nodes(self, paths: Paths, x: mx.array) -> mx.array:
        """Nodes of `x` by path; one array for all products of `x`, which makes them a group."""
        if self._nodes is None or self._nodes[0] is not x:
            self._nodes = x, paths.collect(x)
        return self._nodes[1]


@dataclass(frozen=True)
class Call:
    """One call of a mixer in a pass: `forward(mixer, *args, **kwargs)`, with a layer's state."""

    mixer: Any
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    products: Products
    layer: int = 0
    noted: Noted = field(default_factory=dict)  # what they gave, until its rows are committed
    tapes: list[Rows] = field(default_factory=list)  # of a gated delta net, as long

    @property
    def arrays(self) -> list[mx.array]:
        return [arg for arg in (*self.args, *self.kwargs.values()) if isinstance(arg, mx.array)]

    def again(self, state: Any, rows: int, path: Sequence[int]) -> None:
        """Run it over those of its `rows` rows that are on `path`; what it returns is dropped.

        A row on a path has the same rows before it as in the pass, so what products gave for it
        holds: only convolutions and the recurrence itself are computed again; where there is a
        tape, nothing but the state.
        """
        if self.tapes:
            state.cache = self.tapes[0].after(state.cache, path)
            return
        kept, noted = rows_on(path), self.noted.items()
        of_rows = {i: ys for i, ys in noted if all(y.shape[:2] == (1, rows) for y in ys)}
        known = {i: [y[:, kept] for y in ys] for i, ys in of_rows.items()}

        def part(arg: Any) -> Any:
            if isinstance(arg, mx.array) and arg.shape[:2] == (1, rows):
                return arg[:, kept]
            return state if arg is STATE else arg

        with self.products.of_call(None, known=known):
            self.changed(part)()

    def changed(self, change: Callable[[Any], Any], layer: int = 0) -> Call:
        """This call with changed arguments; nothing of it is noted."""
        kwargs = {key: change(arg) for key, arg in self.kwargs.items()}
        args = tuple(map(change, self.args))
        return Call(self.mixer, self.forward, args, kwargs, self.products, layer)

    def __call__(self) -> Any:
        return self.forward(self.mixer, *self.args, **self.kwargs)


def own(value: Any) -> Any:
    """An array's data under a name of its own: MLX's `+=` changes an array for all who have it."""
    return value[:] if isinstance(value, mx.array) and value.ndim else value
