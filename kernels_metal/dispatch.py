"""Which operations go through a kernel, and why: one table.

    kernels = Dispatch("auto")      # one for each model instance
    kernels.table.update(loaded)    # of an earlier session, if there was one
    choice = kernels.choose(CASCADE_ATTENTION, (queries, keys, values, seen, scale))
    saved = kernels.to_json()       # the caller keeps it, one for each machine

On Metal the first call of each case tries the kernel in a child process, compares it with the
reference (the probe), and races it against the stock path; outcome and reason stay in the table.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any, Literal, get_args

import mlx.core as mx

from kernels_metal.factory import SOURCE, executor, metal
from kernels_metal.faults import first_error
from kernels_metal.gpu import gpu_family, macos, power_mode
from kernels_metal.operation import Operation, dtype_name

Mode = Literal["auto", "off", "on"]
Arguments = tuple[Any, ...]
STOCK = "stock"
RUNS = 6  # of either side in a race; their median counts
MARGIN = 0.03  # of stock's time by which a kernel has to be faster
WARM_UP = 0.15  # seconds after which the GPU's clock is up, if two runs do not agree before
CALLS = 12  # of a run, one behind the other: waiting for a single one costs more than the call
LIMIT = 0.5  # seconds that one side may take in all
COLD_BYTES = 256 * 2**20  # a chain's own arrays: more than caches hold, and not much of a memory
TOLERANCES = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Choice:
    """Kernel or reference, and the reason in words; way: which of the operation's kernels."""

    kernel: bool
    reason: str
    way: str = ""


class Dispatch:
    """The choices of one machine, for one model instance; it changes nothing outside itself.

    mode: "on" is the kernel wherever one can run, "auto" what trial, probe and race say; switched
    "off" nothing is to be asked. table: what was raced, now and by the sessions of
    `table_from_json`. refusal: of an operation and arguments, why its kernel is not to be run in
    this process, "" where it is; see `watchdog`. report: what to tell of a compiler's words, see
    `faults`. begin: told of a case before its kernel runs here for the first time.
    Raises ValueError for another mode.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        clock: Callable[[], float] = time.perf_counter,
        refusal: Callable[[Operation, Arguments], str] = lambda operation, args: "",
        report: Callable[[str], str] = first_error,
        begin: Callable[[str], None] = lambda case: None,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"kernels is {mode!r}, but must be one of {', '.join(get_args(Mode))}")
        self.mode = mode
        self.table: dict[str, Choice] = {}
        self.unraced: dict[str, Choice] = {}
        self._family = gpu_family()
        self._clock, self._refusal, self._report, self._begin = clock, refusal, report, begin

    @property
    def choices(self) -> dict[str, Choice]:
        """All that was chosen so far: raced now or before, and not raced."""
        return {**self.table, **self.unraced}

    def choose(
        self, operation: Operation, args: Arguments, layers: Sequence[Arguments] = ()
    ) -> Choice:
        """The choice for these arguments, made now where there is none.

        layers: the same call in other layers of the model, whose arrays lie elsewhere in memory.
        To be asked where `executor()` can run kernels and they are not switched off.
        """
        raced = self.mode == "auto" and executor() is metal
        choices = self.table if raced else self.unraced
        rows, shape, bits, dtype = operation.case(*args)
        sizes = "x".join(map(str, shape))
        key = f"{operation.name}/{rows}/{sizes}/{bits}/{dtype}/{self._family}"
        if key in choices:
            return choices[key]
        try:
            operation.check(*args)
        except ValueError as error:
            found = Choice(False, str(error))
        else:
            if raced and (why := self._refusal(operation, args)):  # until it is tried again
                choices, found = self.unraced, Choice(False, why)
            else:
                self.unraced.pop(key, None)
                if raced:
                    self._begin(key)
                found = self._decide(operation, args, layers, raced)
        choices[key] = found
        return found

    def to_json(self) -> dict[str, Any]:
        """The table as plain values, without what was not raced; see `table_from_json`."""
        choices = {key: asdict(choice) for key, choice in self.table.items()}
        return {"made with": fingerprint(), "choices": choices}

    def _decide(
        self, operation: Operation, args: Arguments, layers: Sequence[Arguments], raced: bool
    ) -> Choice:
        if not raced:
            on = self.mode == "on"
            return Choice(True, "kernels are switched on" if on else "not on Metal, so not raced")
        problems = {way: self._problem(operation, way, args) for way in operation.ways(*args)}
        fit = [way for way, problem in problems.items() if not problem]
        if not fit:
            return Choice(False, next(iter(problems.values())))
        return self._race(operation, fit, chain(operation, args, layers))

    def _problem(self, operation: Operation, way: str, args: Arguments) -> str:
        """The probe: why this kernel is not for these arguments, "" if it is as the reference."""
        try:
            return _disagreement(operation, operation.by(way), args)
        except (RuntimeError, ValueError) as error:  # the compiler refuses it, or this GPU cannot
            with suppress(RuntimeError):
                mx.synchronize()  # what else of the pass fails behind it
            return f"does not run here: {self._report(str(error))}"

    def _race(self, operation: Operation, fit: list[str], calls: list[Arguments]) -> Choice:
        try:
            calls_of = race(operation, fit, calls, self._clock)
        except RuntimeError as error:  # of the GPU, long after the call that is at fault
            with suppress(RuntimeError):
                mx.synchronize()  # others of the same pass may fail behind it
            return Choice(False, f"fails in a race: {self._report(str(error))}")
        usual = calls_of.pop(STOCK)
        way = min(calls_of, key=lambda way: calls_of[way])
        told = [f"{name} {time:.0f} us".strip() for name, time in calls_of.items()]
        words = f"{' and '.join(told)} against {usual:.0f} us, in chains of {len(calls)}"
        if calls_of[way] > usual * (1 - MARGIN):
            return Choice(False, f"not faster: {words}")
        return Choice(True, f"faster: {words}", way)


def race(
    operation: Operation,
    ways: Sequence[str],
    calls: list[Arguments],
    clock: Callable[[], float] = time.perf_counter,
    runs: int = RUNS,
) -> dict[str, float]:
    """Microseconds of one call by each way and by STOCK: medians of chains that take turns.

    Whoever runs first behind an idle GPU finds its clock low, so none is timed before that is up;
    and what wins by less than `MARGIN` may lose the next time. RuntimeError where the GPU fails.
    """
    steps = {way: operation.by(way) for way in ways} | {STOCK: operation.reference}
    sides = {name: partial(_seconds, operation, step, calls, clock) for name, step in steps.items()}
    before, spent = 0.0, sides[STOCK]()
    while abs(spent - before) > MARGIN * spent and before + spent < WARM_UP:
        before, spent = spent, sides[STOCK]()
    times: dict[str, list[float]] = {name: [] for name in sides}
    while len(times[STOCK]) < runs and max(map(sum, times.values())) <= LIMIT:
        for name, run in sides.items():
            times[name].append(run())
    return {name: median(found) / len(calls) * 1e6 for name, found in times.items()}


def _seconds(
    operation: Operation,
    step: Callable[..., Any],
    calls: list[Arguments],
    clock: Callable[[], float],
) -> float:
    """Of a chain of calls."""
    start = clock()
    results: list[mx.array] = []
    out = None
    for args in calls:
        given = args if out is None else operation.after(out, *args)
        out = step(*given)
        results += operation.compared(out, *args)
    mx.eval(results)
    return clock() - start


def chain(operation: Operation, args: Arguments, layers: Sequence[Arguments]) -> list[Arguments]:
    """A dozen calls that find their arrays cold, as in a pass: those of other layers, or copies."""
    found = list(layers[:CALLS]) or [args]
    if operation.copied is not None and len(found) == 1:
        size = max(1, sum(array.nbytes for array in operation.copied(*args)[1]))
        copies = [operation.copied(*args) for _ in range(min(CALLS, COLD_BYTES // size))]
        mx.eval([arrays for _, arrays in copies])
        found = [call for call, _ in copies] or found
    return [found[i % len(found)] for i in range(CALLS)]


def _disagreement(operation: Operation, kernel: Callable[..., Any], args: Arguments) -> str:
    """How far a kernel is from the reference, in words, "" where rounding explains it."""
    ours = operation.compared(kernel(*args), *args)
    stock = operation.compared(operation.reference(*args), *args)
    for a, b in zip(ours, stock, strict=True):
        error, limit = difference(a, b), TOLERANCES.get(dtype_name(b.dtype), 0.0)
        if not error <= limit:  # nor where it is not a number
            return f"differs from the reference by {error:.1e}, limit {limit:.0e}"
    return ""


def table_from_json(saved: Mapping[str, Any]) -> dict[str, Choice]:
    """What `to_json` gave; empty when it was made with other kernels or another MLX.

    Raises KeyError or TypeError for anything else.
    """
    if saved["made with"] != fingerprint():
        return {}
    return {key: Choice(**choice) for key, choice in saved["choices"].items()}


def fingerprint() -> str:
    """Of what a choice holds for: the kernels' sources, MLX, macOS's build and its power mode."""
    digest = hashlib.sha256(f"{version('mlx')} {macos()} {power_mode()}".encode())
    for path in sorted(SOURCE.glob("*.metal")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def difference(ours: mx.array, stock: mx.array) -> float:
    """The largest difference, as a share of the largest finite number; 1 for other integers.

    Equal infinities do not differ.
    """
    if not mx.issubdtype(stock.dtype, mx.floating):
        return 0.0 if mx.array_equal(ours, stock).item() else 1.0
    a, b = ours.astype(mx.float32), stock.astype(mx.float32)
    apart = mx.where(a == b, 0.0, mx.abs(a - b)).max()
    size = mx.where(mx.isfinite(b), mx.abs(b), 0.0).max()
    return float((apart / mx.maximum(size, 1e-30)).item())  # type: ignore[arg-type]
