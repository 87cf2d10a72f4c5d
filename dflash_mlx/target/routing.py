"""Kernel or stock MLX, for the operations of one loaded model.

Callers ask `Kernels.run` first and take their own stock expression when it has nothing to say, so
nothing becomes dearer where no kernel runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from kernels_metal.dispatch import Choice, Dispatch, Mode
from kernels_metal.factory import Executor, executor, metal
from kernels_metal.operation import Operation


class Store(Protocol):
    """Where the choices of earlier sessions are kept."""

    def load(self) -> dict[str, Choice]:
        """What was chosen before, empty where nothing fits or can be read."""

    def save(self, table: dict[str, Any]) -> None:
        """Keep what `Dispatch.to_json` gave, where that can be done."""


class Kernels:
    """The kernels of one model instance, off until switched; it changes nothing outside itself.

    store: asked when kernels could run on Metal for the first time, and told of every new race.
    """

    def __init__(
        self, store: Store | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._store, self._clock = store, clock
        self._dispatch: Dispatch | None = None
        self._runs_on: Executor | None = None
        self._known: dict[Any, bool] = {}
        self._notes: dict[str, Choice] = {}
        self.mode: Mode = "off"

    @property
    def active(self) -> bool:
        """Whether a kernel could run now."""
        return self.mode != "off" and executor() is not None

    @property
    def choices(self) -> dict[str, Choice]:
        """What was chosen so far, by operation and shape; and what no kernel is used for."""
        return {**(self._dispatch.choices if self._dispatch else {}), **self._notes}

    def switch(self, mode: Mode) -> None:
        """Auto: as probe and race say; on: wherever one can run; off: never. ValueError else."""
        self._dispatch = Dispatch(mode, clock=self._clock)
        self._runs_on = None
        self._notes.clear()
        self.mode = mode

    def note(self, subject: str, reason: str) -> None:
        """Show among the choices why no kernel is used for `subject`."""
        self._notes[subject] = Choice(False, reason)

    def run(self, operation: Operation, *args: Any) -> Any | None:
        """The kernel's result, or None where the caller is to use stock MLX."""
        runs_on = executor()
        if self.mode == "off" or runs_on is None:
            return None
        if runs_on is not self._runs_on:
            self._start(runs_on)
        key = operation.name, operation.case(*args)
        if key not in self._known:
            self._known[key] = self._choose(operation, args)
        return operation.kernel(*args) if self._known[key] else None

    def _start(self, runs_on: Executor) -> None:
        self._runs_on = runs_on
        self._known.clear()
        if self._dispatch and self._store and runs_on is metal and self.mode == "auto":
            self._dispatch.table.update(self._store.load())

    def _choose(self, operation: Operation, args: tuple[Any, ...]) -> bool:
        assert self._dispatch is not None
        before = len(self._dispatch.table)
        chosen = self._dispatch.choose(operation, *args)
        if self._store is not None and len(self._dispatch.table) > before:
            self._store.save(self._dispatch.to_json())
        return chosen.kernel
