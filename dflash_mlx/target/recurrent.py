"""Layers whose state cannot be cut: the states of one sequence, and the ways back to earlier ones.

MLX arrays are immutable, so a state from before a pass is kept by keeping references. In a pass of
a few rows the calls of the recurrent mixers (gated delta nets, Mamba, short convolutions) are kept
as well. Where only the first rows stay, the state from before is put back and those mixers alone
run again over these rows; their outputs are never computed, since nothing asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.target.hooks import override

MOST_ROWS = 128  # of a pass that can be kept in part; a prompt's longer passes are kept whole
_RECENT = 3  # passes: the one in which an answer stops, one running ahead of it, one to spare
_MARKS = 2  # prompts: the last turn's and this one's
_STATE = object()  # stands for the layer's state among the arguments of a kept call


@dataclass(frozen=True)
class Call:
    """One call of a mixer in a pass: `run(*args, **kwargs)`, the state of layer `layer` in it."""

    layer: int
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def again(self, state: RecurrentLayer, rows: int, kept: int) -> None:
        """Run it over the first `kept` of its `rows` rows; what it returns is dropped."""

        def part(arg: Any) -> Any:
            if isinstance(arg, mx.array) and arg.ndim > 1 and arg.shape[:2] == (1, rows):
                return arg[:, :kept]
            return state if arg is _STATE else arg

        self.run(*map(part, self.args), **{key: part(arg) for key, arg in self.kwargs.items()})


@dataclass(frozen=True)
class Pass:
    """A pass over `rows` rows behind `start` tokens, of which `kept` rows were committed.

    before: the arrays of all layers' states. calls: of the mixers; None where they were not kept.
    """

    start: int
    rows: int
    before: tuple[tuple[mx.array | None, ...], ...]
    calls: list[Call] | None
    kept: int = 0

    def nearest(self, length: int) -> int:
        """The most tokens up to `length`, at least `start`, that it leads back to."""
        return min(length, self.start + self.kept) if self.calls is not None else self.start


class RecurrentLayer(ArraysCache):
    """The recurrent state of one layer, for one sequence.

    index: its place among the recurrent layers. calls: where the mixers' calls of a running pass
    are kept, if they are.
    """

    cache: list[Any]

    def __init__(self, size: int, index: int) -> None:
        super().__init__(size)
        self.index = index
        self.calls: list[Call] | None = None

    def keep(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep a call, without a reference to this layer."""
        if self.calls is not None:
            kept = tuple(_STATE if arg is self else _own(arg) for arg in args)
            named = {key: _STATE if arg is self else _own(arg) for key, arg in kwargs.items()}
            self.calls.append(Call(self.index, run, kept, named))


@dataclass
class RecurrentStates:
    """The states of all recurrent layers for one sequence; they move together.

    length: committed tokens. Going back is possible to any length within the last few passes,
    within the last rows of the last prompts (see `mark`), and to the beginning.
    """

    layers: list[RecurrentLayer]
    length: int = 0
    _running: Pass | None = None
    _passes: list[Pass] = field(default_factory=list)
    _marks: list[int] = field(default_factory=list)

    @property
    def arrays(self) -> list[mx.array]:
        """What has to be evaluated for the states to be up to date."""
        return [array for layer in self.layers for array in layer.cache if array is not None]

    def begin(self, rows: int) -> None:
        """Announce a pass over `rows` consecutive tokens."""
        self.discard()
        calls: list[Call] | None = [] if rows <= MOST_ROWS else None
        before = tuple(tuple(map(_own, layer.cache)) for layer in self.layers)
        self._running = Pass(self.length, rows, before, calls)
        for layer in self.layers:
            layer.calls = calls

    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows in `path`, which has to be a leading run of the pass.

        Raises ValueError for other paths, and for a part of a pass wider than MOST_ROWS.
        """
        kept, running = len(path), self._running
        if running is None or list(path) != list(range(kept)) or kept > running.rows:
            raise ValueError(f"a recurrent state keeps the first rows of a pass, not {list(path)}")
        if kept < running.rows:
            self._go_to(running, kept)
        for layer in self.layers:
            layer.calls = None
        self._running = None
        self.length += kept
        if kept:
            self._passes.append(replace(running, kept=kept))
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

    def nearest(self, length: int) -> int:
        """The most tokens up to `length` that the states can go back to."""
        if length >= self.length:
            return self.length
        return max((p.nearest(length) for p in self._passes if p.start <= length), default=0)

    def trim(self, length: int) -> None:
        """Forget the tokens from `length` on. Raises ValueError where `nearest` is less."""
        self.discard()
        if length >= self.length:
            return
        if self.nearest(length) != length:
            raise ValueError(f"no way back from {self.length} tokens to {length}")
        ways = [p for p in self._passes if p.start <= length == p.nearest(length)]
        self._passes = [p for p in self._passes if p.start < length]
        if ways:
            self._go_to(ways[-1], length - ways[-1].start)
            if self._passes and self._passes[-1].start == ways[-1].start:
                self._passes[-1] = replace(ways[-1], kept=length - ways[-1].start)
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
            other.cache = [_own(array) for array in layer.cache]
            other.calls = None if running is None else running.calls
            layers.append(other)
        return RecurrentStates(layers, self.length, running, list(self._passes), list(self._marks))

    def _go_to(self, back: Pass, kept: int) -> None:
        """Be where the first `kept` rows of that pass led."""
        if kept and back.calls is None:
            raise ValueError(f"a pass of {back.rows} rows can only be kept whole")
        self._put_back(back)
        for call in back.calls if kept and back.calls is not None else ():
            call.again(self.layers[call.layer], back.rows, kept)

    def _put_back(self, back: Pass) -> None:
        for layer, arrays in zip(self.layers, back.before, strict=True):
            layer.cache, layer.calls = [_own(array) for array in arrays], None

    def _forget(self) -> None:
        """Keep the newest passes, and for every mark the oldest that leads to it."""
        passes = self._passes
        kept = set(range(len(passes))[-_RECENT:])
        for mark in self._marks:
            ways = (i for i, p in enumerate(passes) if p.start <= mark == p.nearest(mark))
            kept.update(list(ways)[:1])
        self._passes = [passes[i] for i in sorted(kept)]


def keep_calls(model: Any, name: str) -> None:
    """Hook the recurrent mixers of a model, so that passes with a RecurrentLayer keep their calls.

    A mixer is a module that is given a layer's state and hands it to no module of its own. Which
    they are is found by a pass that is never evaluated. Raises DFlashError where no module is.
    """
    for mixer in _mixers(model, name):
        override(mixer, _kept_call)


def _kept_call(mixer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    state = _state_among(args, kwargs)
    if isinstance(state, RecurrentLayer):
        state.keep(partial(forward, mixer), args, kwargs)
    return forward(mixer, *args, **kwargs)


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


def _own(value: Any) -> Any:
    """An array's data under a name of its own: MLX's `+=` changes an array for all who have it."""
    return value[:] if isinstance(value, mx.array) and value.ndim else value
