"""Kernel or stock MLX, for the operations of one loaded model, and on disk what was raced here.

Callers ask `Kernels.run` first and take their own stock expression when it has nothing to say, so
nothing becomes dearer where no kernel runs. `kernel_choices()` has the choices of every model that
was raced on this machine, `pair.target.kernels.choices` those of a loaded one together with what
could not be raced.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from functools import cached_property
from itertools import chain
from operator import is_
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import platformdirs

from dflash_mlx.system.files import keep_text, kept_json
from dflash_mlx.system.machine import model_key
from dflash_mlx.verifier.in_use import InUse, left_behind
from kernels_metal.dispatch import Arguments, Choice, Dispatch, Mode, table_from_json
from kernels_metal.factory import Executor, executor, metal
from kernels_metal.faults import Faults
from kernels_metal.operation import Operation
from kernels_metal.watchdog import (
    DAMAGED,
    SECONDS,
    Trials,
    Verdict,
    Watchdog,
    file_of,
    read_verdicts,
)

T = TypeVar("T")
_PRODUCTS = nn.Linear, nn.QuantizedLinear
Key = tuple[tuple[int, ...], mx.Dtype]  # of a pass: its shape without the width, and its dtype


class Kernels:
    """The kernels of one model instance, off until switched; it changes nothing outside itself.

    What was raced is kept in a file for each machine, model and set of versions, which is read when
    kernels could first run on Metal and written after every race; a broken one is done without.
    """

    def __init__(
        self,
        name: str,
        parameters: Callable[[], Iterable[tuple[str, mx.array]]],
        folder: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._name, self._parameters, self._folder = name, parameters, folder or default_folder()
        self._clock, self._faults = clock, Faults(self._folder / "faults", keep_text)
        self._holding: object = None
        self.trials: Trials | None = None  # in the background, from `begin_trials`
        self._known = 0  # verdicts that choices were made with
        self._raced = False  # in the pass that is under way
        self.switch("off")

    @property
    def active(self) -> bool:
        return self.running() is not None

    @property
    def choices(self) -> dict[str, Choice]:
        """What was chosen so far, by operation and shape; and what no kernel is used for."""
        return self._dispatch.choices

    def switch(self, mode: Mode) -> None:
        """Auto: as probe and race say; on: wherever one can run; off: never. ValueError else."""
        self._dispatch = Dispatch(
            mode,
            self._clock,
            lambda *call: self._watchdog.refusal(*call),
            self._faults.report,
            self._begin,
        )
        self._runs_on: Executor | None = None
        self.mode = mode

    def note(self, subject: str, reason: str) -> None:
        self._dispatch.unraced[subject] = Choice(False, reason)

    def running(self) -> object | None:
        """The choices that hold now, as an object: another one when they have to be made again."""
        runs_on = executor()
        if self.mode == "off" or runs_on is None:
            return None
        if runs_on is not self._runs_on:
            self._runs_on, self._holding = runs_on, object()
            if runs_on is metal and self.mode == "auto":
                with suppress(*DAMAGED):
                    self._dispatch.table.update(_read(self._file)[1])
                self._turn_off([*left_behind(self._file)], "in use when its program ended")
        return self._holding

    @property
    def may_run(self) -> bool:
        """Whether something here runs kernels, or is promised."""
        return self.mode == "on" or (self.mode == "auto" and executor() is not None)

    @property
    def is_watched(self) -> bool:
        """Whether passes are to be waited for: kernels are new, or are being tried."""
        if self.running() is None or self.mode != "auto":
            return False
        return bool(self._in_use.cases) or self._watchdog.is_trying()

    def begin_round(self) -> bool:
        """Between two rounds: what was tried meanwhile holds. Returns whether kernels may run."""
        if self.running() is None or self.mode != "auto":
            return False
        if self._watchdog.settled > self._known:
            self._known, self._holding = self._watchdog.settled, object()
        return True

    def end_round(self, rows: int, seconds: float, expected: float | None) -> bool:
        """A round's only pass, over so many rows, took these seconds; expected: see `InUse`.

        Returns whether it is one as all that follow: nothing was raced or watched in it.
        """
        raced, self._raced = self._raced, False
        if raced or not self.is_watched:
            return not raced
        if slow := self._in_use.passed(rows, seconds, expected):
            self._turn_off(self._in_use.cases, slow)
            self._in_use.clear()
        return False

    def fail(self, error: Exception) -> None:
        """The GPU failed in a pass: stock from now on; the next start is without what was new.

        What was in use for long is in use again then: a GPU may have been out of memory.
        """
        if self.mode == "off":
            return
        why = f"failed in a pass: {self._faults.report(str(error))}"
        self._turn_off(self._in_use.cases, why)
        self._in_use.clear()
        self.note("all kernels, until the next start", why)
        self.mode = "off"

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stock inside of the block."""
        mode, self.mode = self.mode, "off"
        try:
            yield
        finally:
            self.mode = mode

    def wait(self, seconds: float = SECONDS) -> None:
        """Until nothing is tried in the background any more."""
        if self.begin_round():
            self._watchdog.wait(seconds)
            self.begin_round()

    def _turn_off(self, cases: list[str], reason: str) -> None:
        """Stock for these cases, here and in later sessions; the doctor shows why."""
        for case in cases:
            self._dispatch.table[case] = Choice(False, f"turned off: {reason}")
        if cases:
            self._holding = object()
            self._keep()

    def _begin(self, case: str) -> None:
        """Mark a case; a model that no rounds are made of is not watched, and would stay marked."""
        if self.trials is not None:
            self._in_use.begin(case)

    def _keep(self) -> None:
        made = {"model": self._name, **self._dispatch.to_json()}
        keep_text(self._file, json.dumps(made, indent=1))

    def chosen(
        self, operation: Operation, args: Arguments, layers: Sequence[Arguments] = ()
    ) -> Choice | None:
        """The kernel's choice, None for stock MLX. layers: the same call in others, for a race."""
        if self.running() is None:
            return None
        before = len(self._dispatch.table)
        chosen = self._dispatch.choose(operation, args, layers)
        if len(self._dispatch.table) > before:
            self._raced = True
            self._keep()
            if not chosen.kernel:
                self._in_use.drop(next(reversed(self._dispatch.table)))
        return chosen if chosen.kernel else None

    def run(self, operation: Operation, *args: Any) -> Any | None:
        """The kernel's result, or None where the caller is to use stock MLX."""
        choice = self.chosen(operation, args)
        return None if choice is None else operation.by(choice.way)(*args)

    @cached_property
    def _watchdog(self) -> Watchdog:
        return Watchdog(self._folder, keep_text, later=self.trials)

    @cached_property
    def _in_use(self) -> InUse:
        return InUse(self._file)

    @cached_property
    def _file(self) -> Path:
        return self._folder / f"{model_key(self._name, self._parameters())}.json"


def begin_trials(mode: str) -> Trials | None:
    """What tries kernels, begun while a model loads; None where none will run.

    Where some were tried before, a process is started when there are others.
    """
    if mode != "auto" or executor() is not metal:
        return None
    return Trials(wanted=not file_of(default_folder()).exists())


class MadeOf:
    """Modules whose code, weights and settings something was made of, as they were then."""

    def __init__(self, modules: Iterable[Any] | None) -> None:
        self._modules = [*(modules or ())]
        # Those of products are bound to their weights
        settings = [vars(m) for m in self._modules if not isinstance(m, _PRODUCTS)]
        configs = filter(is_dataclass, chain(*map(dict.values, settings)))
        self._settings = [*settings, *{id(c): getattr(c, "__dict__", {}) for c in configs}.values()]
        self._were = [dict(each) for each in self._settings]
        self._kinds, self._values = [*map(type, self._modules)], [*self._found()]

    def holds(self) -> bool:
        """Whether they still have the same weights, modules, settings and hooks."""
        same = [*map(type, self._modules)] == self._kinds and self._settings == self._were
        return same and all(map(is_, self._found(), self._values))

    def _found(self) -> Iterator[Any]:
        return chain(chain.from_iterable(map(dict.values, self._modules)), (None,))


class Plans:
    """Kernel or stock MLX, settled while the same kernels run on the same weights of `module`."""

    def __init__(self, kernels: Kernels, module: Any = None) -> None:
        self.kernels, self._module = kernels, module
        self._known: object = None
        self._made_of = MadeOf(())
        self._made: dict[Any, Any] = {}
        self.shared: dict[Any, Any] = {}  # what callers look up by themselves

    def find(self, key: Any, make: Callable[[], T | None]) -> T | None:
        """What `make` gave for this key, None for stock MLX."""
        running = self.kernels.running()
        if running is None:
            return None
        if running is not self._known or self._module is not None and not self._made_of.holds():
            self._known, self._made_of = running, MadeOf(self._module and self._module.modules())
            self._made.clear()
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[no-any-return]

    def made(self, key: Any, otherwise: Any = None) -> Any | None:
        """What `find` gives for this key; otherwise: where it was not asked before."""
        is_known = self.kernels.running() is self._known
        return self._made.get(key, otherwise) if is_known else otherwise


def kernel_choices(folder: Path | None = None) -> dict[str, dict[str, Choice]]:
    """The stored choices that hold for these kernels and this MLX, by model, then by case.

    A case reads op/rows/shape/bits/dtype/GPU. Empty where nothing was raced, as without Metal.
    """
    found: dict[str, dict[str, Choice]] = {}
    for file in sorted((folder or default_folder()).glob("*.json")):
        try:
            name, choices = _read(file)
        except DAMAGED:
            continue
        if choices:
            found.setdefault(name, {}).update(choices)
    return found


def trial_verdicts(folder: Path | None = None) -> dict[str, Verdict]:
    """What came of trying these kernels in processes of their own, by operation, variant, dtype."""
    return read_verdicts(file_of(folder or default_folder()))


def default_folder() -> Path:
    """In the user's cache."""
    return platformdirs.user_cache_path("dflash-chat") / "kernels"


def _read(file: Path) -> tuple[str, dict[str, Choice]]:
    """A file's model and choices. Raises one of DAMAGED for a file not written by `Kernels`."""
    saved = kept_json(file)
    choices = table_from_json(saved)
    for choice in choices.values():
        if not isinstance(choice.kernel, bool) or not isinstance(choice.reason, str):
            raise ValueError("no choice")
    return str(saved["model"]), choices
