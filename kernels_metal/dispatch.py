"""Which operations go through a kernel, and why: one table.

    kernels = Dispatch("auto")      # one for each model instance
    kernels.table.update(loaded)    # of an earlier session, if there was one
    choice = kernels.choose(CASCADE_ATTENTION, queries, keys, values, seen, scale)
    saved = kernels.to_json()       # the caller keeps it, one for each machine

On Metal the first call of each case probes the kernel (does it agree with the reference?) and races
it against the stock path; the outcome and its reason stay in the table.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Literal, get_args

import mlx.core as mx

from kernels_metal.factory import SOURCE, executor, metal
from kernels_metal.operation import Operation, dtype_name

Mode = Literal["auto", "off", "on"]
RUNS = 5  # of either side in a race, the fastest counts
TOLERANCES = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Choice:
    """Kernel or reference, and the reason in words."""

    kernel: bool
    reason: str


class Dispatch:
    """The choices of one machine, for one model instance; it changes nothing outside itself.

    mode: "on" is the kernel wherever one can run, "auto" what probe and race say; switched "off"
    nothing is to be asked. table: what was raced, now and by the sessions of `table_from_json`.
    Raises ValueError for another mode.
    """

    def __init__(self, mode: Mode = "auto", clock: Callable[[], float] = time.perf_counter) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"kernels is {mode!r}, but must be one of {', '.join(get_args(Mode))}")
        self.mode = mode
        self.table: dict[str, Choice] = {}
        self._unraced: dict[str, Choice] = {}
        self._family = gpu_family()
        self._clock = clock

    @property
    def choices(self) -> dict[str, Choice]:
        """All that was chosen so far: raced now or before, and not raced."""
        return {**self.table, **self._unraced}

    def choose(self, operation: Operation, *args: Any) -> Choice:
        """The choice for these arguments, made now where there is none.

        To be asked where `executor()` can run kernels and they are not switched off.
        """
        raced = self.mode == "auto" and executor() is metal
        choices = self.table if raced else self._unraced
        rows, shape, bits, dtype = operation.case(*args)
        sizes = "x".join(map(str, shape))
        key = f"{operation.name}/{rows}/{sizes}/{bits}/{dtype}/{self._family}"
        if key not in choices:
            choices[key] = self._decide(operation, args, raced)
        return choices[key]

    def to_json(self) -> dict[str, Any]:
        """The table as plain values, without what was not raced; see `table_from_json`."""
        choices = {key: asdict(choice) for key, choice in self.table.items()}
        return {"made with": fingerprint(), "choices": choices}

    def _decide(self, operation: Operation, args: tuple[Any, ...], raced: bool) -> Choice:
        try:
            operation.check(*args)
        except ValueError as error:
            return Choice(False, str(error))
        if not raced:
            on = self.mode == "on"
            return Choice(True, "kernels are switched on" if on else "not on Metal, so not raced")
        try:
            return self._probe(operation, args) or self._race(operation, args)
        except (RuntimeError, ValueError) as error:  # the compiler refuses it, or this GPU cannot
            return Choice(False, f"does not run here: {str(error).strip().splitlines()[0]}")

    def _probe(self, operation: Operation, args: tuple[Any, ...]) -> Choice | None:
        """The reference, where the kernel does not agree with it."""
        ours = operation.compared(operation.kernel(*args), *args)
        stock = operation.compared(operation.reference(*args), *args)
        for a, b in zip(ours, stock, strict=True):
            error, limit = difference(a, b), TOLERANCES.get(dtype_name(b.dtype), 0.0)
            if not error <= limit:  # nor where it is not a number
                words = f"differs from the reference by {error:.1e}, limit {limit:.0e}"
                return Choice(False, words)
        return None

    def _race(self, operation: Operation, args: tuple[Any, ...]) -> Choice:
        kernel = self._time(operation, operation.kernel, args)
        stock = self._time(operation, operation.reference, args)
        words = f"{kernel * 1e6:.0f} us against {stock * 1e6:.0f} us"
        return Choice(kernel < stock, ("faster: " if kernel < stock else "not faster: ") + words)

    def _time(self, operation: Operation, f: Callable[..., Any], args: tuple[Any, ...]) -> float:
        times = []
        for _ in range(RUNS):
            start = self._clock()
            mx.eval(operation.compared(f(*args), *args))
            times.append(self._clock() - start)
        return min(times)


def table_from_json(saved: Mapping[str, Any]) -> dict[str, Choice]:
    """What `to_json` gave; empty when it was made with other kernels or another MLX.

    Raises KeyError or TypeError for anything else.
    """
    if saved["made with"] != fingerprint():
        return {}
    return {key: Choice(**choice) for key, choice in saved["choices"].items()}


def fingerprint() -> str:
    """Of what a choice holds for: the kernels' sources and the version of MLX."""
    digest = hashlib.sha256(version("mlx").encode())
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


def gpu_family() -> str:
    """The GPU's architecture as MLX names it, "none" without Metal."""
    return str(mx.device_info()["architecture"]) if mx.metal.is_available() else "none"
