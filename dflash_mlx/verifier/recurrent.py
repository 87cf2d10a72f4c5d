"""Layers whose state cannot be cut: the states of one sequence, and the ways back to earlier ones.

MLX arrays are immutable, so a state from before a pass is kept by keeping references. In a pass of
a few rows the calls of the recurrent mixers are kept as well, with what their matrix products gave.
Where only some rows stay, the state from before is put back and those mixers alone run again over
these rows, without their products; their outputs are never computed, since nothing asks for them.
Gated delta nets are not called at all (`tape.py`); in trees mixers run along paths (`mixers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.verifier.block import Block, Cache, Forest, Saved
from dflash_mlx.verifier.fusion import source_of
from dflash_mlx.verifier.hooks import Hooks, once, rebound, through
from dflash_mlx.verifier.mixers import DELTA_NETS, STATE, Call, Paths, Products, own
from dflash_mlx.verifier.passes import CHUNKS, Pass, spread
from dflash_mlx.verifier.routing import Kernels
from dflash_mlx.verifier.tape import Behind, Net, Rows, settled
from kernels_metal.delta_net import Before, Tape

MOST_ROWS = 128  # of a pass that can be kept in part; a prompt's longer passes are kept whole
TAIL = 32  # rows of a prompt's last pass but its last, so that a state can go back there
_RECENT = 3  # passes: the one in which an answer stops, one running ahead of it, one to spare
_MARKS = 2  # prompts: the last turn's and this one's


class States(ArraysCache):
    """Written to by mlx-lm's mixers, which set items, and by mlx-vlm's, which say what for."""

    cache: list[Any]

    def update_window(self, index: int, rows: mx.array, width: int, lengths: Any = None) -> None:
        self.cache[index] = rows[:, rows.shape[1] - width :]

    def update_recurrent(self, index: int, _: int, update: Callable[..., Any]) -> Any:
        output, self.cache[index] = update(self.cache[index], None)[:2]
        return output, self.cache[index]


class RecurrentLayer(States):
    """The recurrent state of one layer, for one sequence."""

    def __init__(self, size: int, index: int) -> None:
        super().__init__(size)
        self.index = index  # its place among the recurrent layers
        self.running: Pass | None = None  # a pass that keeps the calls of mixers

    def run(self, call: Call) -> Any:
        """What a mixer returns in a pass, for arguments with this state among them."""
        running = self.running
        if running is None or running.calls is None:
            return call()
        # Kept with nothing that refers to the state, or changes in place
        kept = call.changed(lambda arg: STATE if arg is self else own(arg), self.index)
        if (made := call.products.by_kernels(kept, self)) is not None:
            return made
        running.calls.append(kept)
        if len(running.parents) == 1 and not call.products.are_taped:  # of one row all stays
            return call()
        with call.products.of_call(kept, running.paths):
            return call() if running.paths is None else self.along(running.paths, kept)

    def given(self, net: Net) -> list[mx.array] | None:
        """What the kernels of a net are given of what was before; None where nothing was."""
        (convolved, state), running = self.cache, self.running
        before = Before(convolved, *(state if isinstance(state, Behind) else (state,)))
        return net.run.given(before, running.parents) if running and state is not None else None

    def follow(self, mixer: Any, products: Products, left: Sequence[mx.array]) -> None:
        """Keep what a net has left: its input, the last rows of the window, that, and of `Step`."""
        x, convolved, window, begun, k, decays, deltas = left
        running: Any = self.running
        tape = Tape(k, decays, deltas, range(len(running.parents)))

        def behind(_: Any, batch: int, path: Sequence[int]) -> Behind:
            return Behind(begun, tape._replace(path=path))

        rows = Rows(window, convolved.shape[1], behind, begun=begun)
        args, forward = (x, None, STATE), type(mixer).__call__
        running.calls.append(Call(mixer, forward, args, {}, products, self.index, {}, [rows]))
        if running.tree is None:
            self.cache = [convolved, Behind(begun, tape)]

    def along(self, paths: Paths, call: Call) -> Any:
        copies: Any = States(len(self.cache))
        copies.cache = paths.copies(self.cache)
        spread = call.changed(lambda arg: copies if arg is STATE else paths.spread(arg))
        return paths.collect(spread())

    def joined(self, layers: Sequence[RecurrentLayer], forest: Forest) -> JoinedStates:
        return JoinedStates(layers, forest.parts)


class JoinedStates(ArraysCache):
    """The states of one layer for several sequences, in the place of one."""

    def __init__(self, layers: Sequence[RecurrentLayer], parts: Sequence[slice]) -> None:
        super().__init__(len(layers[0].cache))
        self._layers = layers
        self._parts = parts  # the rows of each in a pass

    def run(self, call: Call) -> Any:
        """What a mixer returns for each sequence's rows and state, side by side."""
        found = []
        for layer, part in zip(self._layers, self._parts, strict=True):

            def of_it(arg: Any, layer: RecurrentLayer = layer, part: slice = part) -> Any:
                rows = (1, self._parts[-1].stop)
                is_rows = isinstance(arg, mx.array) and arg.shape[:2] == rows
                return layer if arg is self else arg[:, part] if is_rows else arg

            found.append(layer.run(call.changed(of_it)))

        def side_by_side(first: Any, *others: Any) -> Any:
            return mx.concatenate([first, *others], 1) if isinstance(first, mx.array) else first

        return tree_map(side_by_side, *found)


@dataclass
class RecurrentStates(Cache):
    """The states of all recurrent layers for one sequence; they move together.

    Going back is possible to any length within the last few passes, within the last rows of the
    last prompts (see `mark`), to where some parts of prompts began (see `mark_chunk`), and to the
    beginning.
    """

    parts: Sequence[RecurrentLayer]  # type: ignore[assignment]
    length: int = 0
    _running: Pass | None = None
    _passes: list[Pass] = field(default_factory=list)
    _marks: list[int] = field(default_factory=list)
    _chunks: list[Pass] = field(default_factory=list)  # only what was before each
    _ends: Sequence[int] = ()  # of turns of the last prompt
    tail, ways = TAIL, CHUNKS + _RECENT + 2 * _MARKS

    @property
    def arrays(self) -> list[mx.array]:
        return _arrays_of(layer.cache for layer in self.parts)

    @property
    def nbytes(self) -> int:
        before = {way.start: way.before for way in self._ways}.values()
        inputs = (call.arrays for way in self._ways for call in way.calls or ())
        kept = [*self.arrays, *_arrays_of([*chain.from_iterable(before), *inputs])]
        return sum({id(array): array.nbytes for array in kept}.values())

    @property
    def _ways(self) -> list[Pass]:
        return [*self._chunks, *self._passes]

    def begin(self, block: Block) -> None:
        self.discard()
        tree, rows = block.tree, block.rows
        parents = (*range(-1, rows - 1),) if tree is None else tree.parents
        calls: list[Call] | None = None if tree is None and rows > MOST_ROWS else []
        before = tuple(tuple(map(own, layer.cache)) for layer in self.parts)
        self._running = Pass(self.length, parents, before, calls, tree=tree)
        for layer in self.parts:
            layer.running = self._running

    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows in `path`; ValueError where they are no path, or were not kept in part."""
        running = self._running
        if running is None or not running.leads(path):
            raise ValueError(f"a recurrent state keeps a path from the first row, not {list(path)}")
        kept = replace(running, before=running.begun(), path=path, tree=None)
        if len(path) < len(running.parents):
            self._go_to(kept)
        for layer in self.parts:
            layer.running = None
        if kept.calls:  # without notes, which are larger than what the mixers were given
            calls = [replace(call, noted={}, tapes=[]) for call in kept.calls]
            kept = replace(kept, calls=calls)
        self._running = None
        self.length += len(path)
        if path:
            self._passes.append(kept)
        self._forget()

    def discard(self) -> None:
        if self._running is not None:
            self._put_back(self._running)
            self._running = None

    def mark(self, length: int) -> None:
        self._marks = [mark for mark in self._marks if mark < length][1 - _MARKS :]
        self._marks.append(length)

    def mark_chunk(self, ends: Sequence[int] = ()) -> None:
        last, self._ends = self._passes[-1], ends
        if last.start and not any(chunk.start == last.start for chunk in self._chunks):
            self._chunks = spread([*self._chunks, last.beginning()], self._before(ends))

    def _before(self, marks: Sequence[int]) -> set[int]:
        """Where the last passes before these began."""
        starts = [way.start for way in self._ways]
        return {max((start for start in starts if start <= mark), default=0) for mark in marks}

    def nearest(self, length: int) -> int:
        if length >= self.length:
            return self.length
        return max((p.nearest(length) for p in self._ways if p.start <= length), default=0)

    def rewind(self, length: int) -> int:
        self.discard()
        if length >= self.length:
            return self.length
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
            for layer in self.parts:
                layer.cache = [None] * len(layer.cache)
        self.length = length
        self._marks = [mark for mark in self._marks if mark <= length]
        return length

    def lengthen(self, rows: int) -> None:
        self.length += rows

    def fork(self) -> RecurrentStates:
        running = self._running
        if running is not None and running.calls is not None:
            running = replace(running, calls=list(running.calls))
        layers = []
        for layer in self.parts:
            other = copy(layer)
            other.cache = [own(array) for array in layer.cache]
            other.running = running
            layers.append(other)
        kept = list(self._passes), list(self._marks), list(self._chunks), self._ends
        return RecurrentStates(layers, self.length, running, *kept)

    def saved(self) -> Saved:
        """The states, and some from before; within a pass there is no way back from there."""
        starts = {way.start: way.beginning() for way in self._ways if way.start}
        needed = self._before((*self._marks, *self._ends))
        chunks = spread([starts[start] for start in sorted(starts)], needed)
        states = [tuple(layer.cache) for layer in self.parts]
        kept = chain.from_iterable([*states, *chain.from_iterable(c.before for c in chunks)])
        flat = [*map(settled, kept)]
        there = [array is not None for array in flat]
        about = [self.length, [chunk.start for chunk in chunks], there]
        return [array for array in flat if array is not None], about

    def restore(self, saved: Saved) -> None:
        arrays, (self.length, starts, there) = iter(saved[0]), saved[1]
        flat = iter([next(arrays) if is_there else None for is_there in there])
        for layer in self.parts:
            layer.cache = [next(flat) for _ in layer.cache]
        for start in starts:
            before = tuple(tuple(next(flat) for _ in layer.cache) for layer in self.parts)
            self._chunks.append(Pass(start, (), before))

    def _go_to(self, back: Pass) -> None:
        rows = len(back.parents)
        if back.path and back.calls is None:
            raise ValueError(f"a pass of {rows} rows can only be kept whole")
        self._put_back(back)
        for call in back.calls if back.path and back.calls is not None else ():
            call.again(self.parts[call.layer], rows, back.path)

    def _put_back(self, back: Pass) -> None:
        for layer, arrays in zip(self.parts, back.before, strict=True):
            layer.cache = [own(array) for array in arrays]
            layer.running = None

    def _forget(self) -> None:
        """Keep the newest passes, and for every mark the oldest that leads to it."""
        passes = self._passes
        kept = set(range(len(passes))[-_RECENT:])
        for mark in (*self._marks, *self._ends):
            ways = (i for i, p in enumerate(passes) if p.start <= mark == p.nearest(mark))
            kept.update(list(ways)[:1])
        self._passes = [passes[i] for i in sorted(kept)]


def _arrays_of(states: Iterable[Sequence[Any]]) -> list[mx.array]:
    """Of layers; rows of a tape are left to the next pass."""
    there = [state for layer in states for state in layer if state is not None]
    parts = ([s.state, *s.tape[:3]] if isinstance(s, Behind) else [s] for s in there)
    return [*chain.from_iterable(parts)]


def hook_mixers(model: Any, name: str, kernels: Kernels) -> tuple[frozenset[str], Products]:
    """Let passes keep mixers' calls: mixers' mlx-lm sources and products. DFlashError for none."""
    mixers = _mixers(model, name)
    products = Products(mixers, kernels)
    for mixer in mixers:
        once(mixer, hook_mixers, partial(_hooked, products))  # not by two targets
    return frozenset(type(mixer).__module__.rpartition(".")[2] for mixer in mixers), products


def _hooked(products: Products, stock: Callable[..., Any]) -> Callable[..., Any]:
    if source_of(stock) in DELTA_NETS:
        update = stock.__globals__["gated_delta_update"]
        stock = rebound(stock, {"gated_delta_update": partial(products.update, update)})
    return through(partial(_call, products), stock)


def _call(
    products: Products, mixer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    run = getattr(_state_among(args, kwargs), "run", None)  # which mlx-lm's own have not
    if run is None:
        return forward(mixer, *args, **kwargs)
    return run(Call(mixer, forward, args, kwargs, products))


def _mixers(model: Any, name: str) -> list[nn.Module]:
    """Modules that are given an ArraysCache, and none of whose own modules is given it."""
    found: list[tuple[nn.Module, ArraysCache]] = []

    def call(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, state = len(found), _state_among(args, kwargs)
        output = forward(module, *args, **kwargs)
        if state is not None and not any(given is state for _, given in found[before:]):
            found.append((module, state))
        return output

    caches, hooks = model.make_cache(), Hooks()
    for module in model.modules():
        if module is not model:
            hooks.replace(module, "__call__", through(call, type(module).__call__))
    try:
        model(mx.zeros((1, 2), mx.int32), cache=caches)
    finally:
        hooks.remove()
    known = {state for _, state in found}
    for i, cache in enumerate(caches):
        parts = getattr(cache, "caches", (cache,))
        if any(isinstance(part, ArraysCache) and part not in known for part in parts):
            what = f"layer {i} of {name} gives its recurrent state to no module of its own"
            step = "choose a model of another family"
            raise DFlashError(what + ", so a draft cannot be taken back", step)
    return [*{id(module): module for module, _ in found}.values()]


def _state_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArraysCache | None:
    return next((a for a in (*args, *kwargs.values()) if isinstance(a, ArraysCache)), None)
