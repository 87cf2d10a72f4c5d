"""Layers whose state cannot be cut: the states of one sequence, and the ways back to earlier ones.

MLX arrays are immutable, so a state from before a pass is kept by keeping references. In a pass of
a few rows the calls of the recurrent mixers (gated delta nets, Mamba, short convolutions) are kept
as well, with what their matrix products gave. Where only some rows stay, the state from before is
put back and those mixers alone run again over these rows, without their products; their outputs are
never computed, since nothing asks for them. The mixers of a tree's pass run along its paths (see
`paths.py`) and leave the states as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.hooks import override
from dflash_mlx.verifier.passes import STATE, Call, Pass, own, spread
from dflash_mlx.verifier.paths import Paths, Products
from dflash_mlx.verifier.saved import Saved

MOST_ROWS = 128  # of a pass that can be kept in part; a prompt's longer passes are kept whole
_RECENT = 3  # passes: the one in which an answer stops, one running ahead of it, one to spare
_MARKS = 2  # prompts: the last turn's and this one's


class RecurrentLayer(ArraysCache):
    """The recurrent state of one layer, for one sequence.

    index: its place among the recurrent layers. calls: where the mixers' calls of a running pass
    are kept, if they are. paths: of a running pass over a tree.
    """

    cache: list[Any]

    def __init__(self, size: int, index: int) -> None:
        super().__init__(size)
        self.index = index
        self.calls: list[Call] | None = None
        self.paths: Paths | None = None
        self.notes = False  # whether what products give is kept until the commit

    def call(
        self,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        products: Products,
    ) -> Call:
        """A call with this layer's state, without a reference to it; kept where calls are."""
        given = tuple(STATE if arg is self else own(arg) for arg in args)
        named = {key: STATE if arg is self else own(arg) for key, arg in kwargs.items()}
        call = Call(self.index, run, given, named, products)
        if self.calls is not None:
            self.calls.append(call)
        return call

    def along(self, paths: Paths, call: Call) -> Any:
        """What a call returns for the nodes of a tree; the state stays as it is."""
        copies: Any = ArraysCache(len(self.cache))
        copies.cache = paths.copies(self.cache)
        return paths.collect(call.on(lambda arg: copies if arg is STATE else paths.spread(arg)))


class JoinedStates(ArraysCache):
    """The states of one layer for several sequences, in the place of one.

    parts: the rows of each in a pass.
    """

    def __init__(self, layers: Sequence[RecurrentLayer], parts: Sequence[slice]) -> None:
        super().__init__(len(layers[0].cache))
        self._layers, self._parts = layers, parts

    def one_by_one(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `run` returns for each sequence's rows and state, side by side."""
        rows = self._parts[-1].stop
        found = []
        for layer, part in zip(self._layers, self._parts, strict=True):

            def own(arg: Any, layer: RecurrentLayer = layer, part: slice = part) -> Any:
                is_rows = isinstance(arg, mx.array) and arg.shape[:2] == (1, rows)
                return layer if arg is self else arg[:, part] if is_rows else arg

            found.append(run(*map(own, args), **{key: own(arg) for key, arg in kwargs.items()}))
        return _side_by_side(found)


def _side_by_side(found: Sequence[Any]) -> Any:
    """Rows [1, n, ...] of several sequences, or tuples of such."""
    if isinstance(found[0], tuple):
        return tuple(_side_by_side(parts) for parts in zip(*found, strict=True))
    return mx.concatenate([*found], axis=1) if isinstance(found[0], mx.array) else found[0]


@dataclass
class RecurrentStates:
    """The states of all recurrent layers for one sequence; they move together.

    length: committed tokens. Going back is possible to any length within the last few passes,
    within the last rows of the last prompts (see `mark`), to where some parts of prompts began
    (see `mark_chunk`), and to the beginning.
    """

    layers: list[RecurrentLayer]
    length: int = 0
    _running: Pass | None = None
    _passes: list[Pass] = field(default_factory=list)
    _marks: list[int] = field(default_factory=list)
    _chunks: list[Pass] = field(default_factory=list)  # only what was before each

    @property
    def arrays(self) -> list[mx.array]:
        """What has to be evaluated for the states to be up to date."""
        return [array for layer in self.layers for array in layer.cache if array is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the states and of all that leads back to earlier ones."""
        before = {way.start: way.before for way in self._ways}.values()
        inputs = {id(call): call.arrays for way in self._ways for call in way.calls or ()}
        kept = [*chain.from_iterable(before), *inputs.values(), self.arrays]
        return sum(array.nbytes for arrays in kept for array in arrays if array is not None)

    @property
    def _ways(self) -> list[Pass]:
        return [*self._chunks, *self._passes]

    def begin(self, block: Block) -> None:
        """Announce a pass over consecutive tokens or over a tree."""
        self.discard()
        tree, rows = block.tree, block.rows
        parents = range(-1, rows - 1) if tree is None else tree.parents
        calls: list[Call] | None = None if tree is None and rows > MOST_ROWS else []
        before = tuple(tuple(map(own, layer.cache)) for layer in self.layers)
        self._running = Pass(self.length, parents, before, calls)
        paths = None if tree is None else Paths.of(tree)
        notes = rows > 1  # of one row all stays
        for layer in self.layers:
            layer.calls, layer.paths, layer.notes = calls, paths, notes

    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows in `path`, each of which has to follow the one before in its pass.

        Raises ValueError for other paths, and for a part of a prompt's pass of over MOST_ROWS.
        """
        running = self._running
        if running is None or not running.leads(path):
            raise ValueError(f"a recurrent state keeps a path from the first row, not {list(path)}")
        kept = replace(running, path=path)
        if len(path) < len(running.parents):
            self._go_to(kept)
        for layer in self.layers:
            layer.calls = layer.paths = None
        if kept.calls:  # without notes, which are larger than what the mixers were given
            kept = replace(kept, calls=[replace(call, noted={}) for call in kept.calls])
        self._running = None
        self.length += len(path)
        if path:
            self._passes.append(kept)
        self._forget()

    def discard(self) -> None:
        """Drop the rows of the pass."""
        if self._running is not None:
            self._put_back(self._running)
            self._running = None

    def mark(self, length: int) -> None:
        """Stay able to come back to `length`, in the last pass, until two more are marked."""
        self._marks = [mark for mark in self._marks if mark < length][1 - _MARKS :]
        self._marks.append(length)

    def mark_chunk(self) -> None:
        """Stay able to come back to where the last pass began; of many such, to a few."""
        last = self._passes[-1]
        if last.start and not any(chunk.start == last.start for chunk in self._chunks):
            self._chunks = spread([*self._chunks, last.beginning()])

    def nearest(self, length: int) -> int:
        """The most tokens up to `length` that the states can go back to."""
        if length >= self.length:
            return self.length
        return max((p.nearest(length) for p in self._ways if p.start <= length), default=0)

    def trim(self, length: int) -> None:
        """Forget the tokens from `length` on. Raises ValueError where `nearest` is less."""
        self.discard()
        if length >= self.length:
            return
        if self.nearest(length) != length:
            raise ValueError(f"no way back from {self.length} tokens to {length}")
        ways = [p for p in self._ways if p.start <= length == p.nearest(length)]
        self._passes = [p for p in self._passes if p.start < length]
        self._chunks = [p for p in self._chunks if p.start <= length]
        if ways:
            way = replace(ways[-1], path=ways[-1].path[: length - ways[-1].start])
            self._go_to(way)
            if self._passes and self._passes[-1].start == way.start:
                self._passes[-1] = way
        else:
            for layer in self.layers:
                layer.cache = [None] * len(layer.cache)
        self.length = length
        self._marks = [mark for mark in self._marks if mark <= length]

    def fork(self) -> RecurrentStates:
        """A copy that goes on by itself, a running pass included; arrays are shared."""
        running = self._running
        if running is not None and running.calls is not None:
            running = replace(running, calls=list(running.calls))
        layers = []
        for layer in self.layers:
            other = copy(layer)
            other.cache = [own(array) for array in layer.cache]
            other.calls = None if running is None else running.calls
            layers.append(other)
        kept = list(self._passes), list(self._marks), list(self._chunks)
        return RecurrentStates(layers, self.length, running, *kept)

    def saved(self) -> Saved:
        """The states, and some from before; within a pass there is no way back from there."""
        starts = {way.start: way.beginning() for way in self._ways if way.start}
        chunks = spread([starts[start] for start in sorted(starts)])
        states = [tuple(layer.cache) for layer in self.layers]
        flat = [*chain.from_iterable([*states, *chain.from_iterable(c.before for c in chunks)])]
        there = [array is not None for array in flat]
        about = [self.length, [chunk.start for chunk in chunks], there]
        return [array for array in flat if array is not None], about

    def restore(self, saved: Saved) -> None:
        """Hold what states of the same kind have saved."""
        arrays, (self.length, starts, there) = iter(saved[0]), saved[1]
        flat = iter([next(arrays) if is_there else None for is_there in there])
        for layer in self.layers:
            layer.cache = [next(flat) for _ in layer.cache]
        for start in starts:
            before = tuple(tuple(next(flat) for _ in layer.cache) for layer in self.layers)
            self._chunks.append(Pass(start, (), before, None))

    def _go_to(self, back: Pass) -> None:
        """Be where the path of that pass led."""
        rows = len(back.parents)
        if back.path and back.calls is None:
            raise ValueError(f"a pass of {rows} rows can only be kept whole")
        self._put_back(back)
        for call in back.calls if back.path and back.calls is not None else ():
            call.again(self.layers[call.layer], rows, back.path)

    def _put_back(self, back: Pass) -> None:
        for layer, arrays in zip(self.layers, back.before, strict=True):
            layer.cache = [own(array) for array in arrays]
            layer.calls = layer.paths = None

    def _forget(self) -> None:
        """Keep the newest passes, and for every mark the oldest that leads to it."""
        passes = self._passes
        kept = set(range(len(passes))[-_RECENT:])
        for mark in self._marks:
            ways = (i for i, p in enumerate(passes) if p.start <= mark == p.nearest(mark))
            kept.update(list(ways)[:1])
        self._passes = [passes[i] for i in sorted(kept)]


def hook_mixers(model: Any, name: str) -> frozenset[str]:
    """Hook the recurrent mixers of a model: passes with a RecurrentLayer keep their calls.

    A mixer is a module that is given a layer's state and hands it to no module of its own. Which
    they are is found by a pass that is never evaluated. Returns the names of mlx-lm's sources that
    they are from. Raises DFlashError where no module is one.
    """
    mixers = _mixers(model, name)
    for mixer in mixers:
        override(mixer, MixerCall(Products(mixer)))
    return frozenset(type(mixer).__module__.rpartition(".")[2] for mixer in mixers)


@dataclass(frozen=True)
class MixerCall:
    """The hook of one mixer. All are alike, so that a second target hooks none again."""

    products: Products = field(compare=False)

    def __call__(
        self, mixer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Keep the call, and for a tree run it along the paths."""
        state = _state_among(args, kwargs)
        if isinstance(state, JoinedStates):
            return state.one_by_one(partial(self, mixer, forward), *args, **kwargs)
        if not isinstance(state, RecurrentLayer) or state.calls is None:
            return forward(mixer, *args, **kwargs)
        call = state.call(partial(forward, mixer), args, kwargs, self.products)
        if not state.notes:
            return forward(mixer, *args, **kwargs)
        with self.products.noted_in(call.noted, state.paths):
            if state.paths is None:
                return forward(mixer, *args, **kwargs)
            return state.along(state.paths, call)


def _mixers(model: Any, name: str) -> list[nn.Module]:
    """Modules that are given an ArraysCache, and none of whose own modules is given it."""
    found: list[tuple[nn.Module, ArraysCache]] = []

    def call(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, state = len(found), _state_among(args, kwargs)
        output = forward(module, *args, **kwargs)
        if state is not None and not any(given is state for _, given in found[before:]):
            found.append((module, state))
        return output

    caches = model.make_cache()
    classes = [(module, type(module)) for module in model.modules() if module is not model]
    for module, _ in classes:
        override(module, call)
    try:
        model(mx.zeros((1, 2), mx.int32), cache=caches)
    finally:
        for module, original in classes:
            module.__class__ = original
    known = {id(state) for _, state in found}
    for i, cache in enumerate(caches):
        parts = getattr(cache, "caches", (cache,))
        if any(isinstance(part, ArraysCache) and id(part) not in known for part in parts):
            raise DFlashError(
                f"layer {i} of {name} gives its recurrent state to no module of its own, "
                "so a draft cannot be taken back",
                "choose a model of another family",
            )
    return list({id(module): module for module, _ in found}.values())


def _state_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArraysCache | None:
    return next((a for a in (*args, *kwargs.values()) if isinstance(a, ArraysCache)), None)
