"""Does one piece of the report in a child: `python -m kernels_metal.mac.measure`.

What a kernel is not for comes back as "refused", what fails as "wrong". Rehearsed pieces run small,
in the emulator, and are not timed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from kernels_metal.children import answer
from kernels_metal.dispatch import CALLS, COLD_BYTES, race
from kernels_metal.factory import executor, metal
from kernels_metal.mac.items import Item, limit
from kernels_metal.operation import Operation, dtype_name
from kernels_metal.sweep import Trial, error
from kernels_metal.variants import Call, arguments, launches, operation_of
from kernels_metal.verify_qmm import VERIFY_QMM

Found = dict[str, Any]
RUNS = 3  # of either side of a race: hundreds of them have to end
HOST = Path(__file__).parents[2] / "scripts" / "host_cost.py"
_UNTIMED = ("error", "wrong", "refused", "bytes")  # what a rehearsal tells
_SMALL = {"depth": 256, "columns": 64, "prefix": 40, "heads": 4, "kv_heads": 2}  # rehearsed
_NUMBER = r"\((\d+)\)"
_MANY_THREADS = 2048  # more than any GPU has: MLX refuses them, and says how many it would take


def measured(item: Item) -> Found:
    """What came of an item."""
    try:
        return _KINDS[item["kind"]](item)
    except (RuntimeError, ValueError, MemoryError) as problem:
        with suppress(RuntimeError):
            mx.synchronize()  # what else fails behind it
        return {"wrong": str(problem)}


def rehearsed(item: Item) -> bool:
    """Whether it runs in the emulator, and is not timed."""
    return bool(item.get("rehearse"))


def machine(item: Item) -> Found:
    """What bounds all else, by MLX's own operations.

    GB/s: read and written by one kernel, of more than caches hold. us: of a launch that waits for
    the last one. float32, float16: TFLOP/s of a product of large matrices.
    """
    small = rehearsed(item)
    x = mx.zeros(2**10 if small else 2**26)
    mx.eval(x)
    launched, size = (10, 16) if small else (1000, 4096)

    def chained() -> None:
        y = mx.zeros(1)
        for _ in range(launched):
            y = y + 1
        mx.eval(y)

    found = {"GB/s": 2 * x.nbytes / _best(item, lambda: mx.eval(x + 1)) / 1e9}
    found["us"] = _best(item, chained) / launched * 1e6
    for dtype in (mx.float32, mx.float16):
        matrix = mx.ones((size, size), dtype)
        mx.eval(matrix)
        seconds = _best(item, lambda matrix=matrix: mx.eval(matrix @ matrix))  # type: ignore[misc]
        found[dtype_name(dtype)] = 2 * size**3 / seconds / 1e12
    return found


def _best(item: Item, work: Callable[[], None]) -> float:
    """Seconds, the least of some runs."""
    times = []
    for _ in range(1 if rehearsed(item) else 6):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def variant(item: Item) -> Found:
    """Whether a kernel is as its reference, milliseconds to build and run it, and its threads."""
    call = Call(*item["call"])
    operation = operation_of(call.operation)
    given = arguments(operation, call.dtype, call.sizes)
    try:
        operation.check(*given)
    except ValueError as refusal:
        return {"refused": str(refusal)}
    if not rehearsed(item) and call.way not in operation.ways(*given):
        return {"refused": "a GPU without safe 8x8 matrices"}
    start = time.perf_counter()
    mx.eval(operation.compared(operation.by(call.way)(*given), *given))
    spent = time.perf_counter() - start
    apart = error(Trial(replace(operation, kernel=operation.by(call.way)), given, ""))
    found: Found = {"error": min(apart, 1e30), "ms": spent * 1e3}  # JSON has no infinity
    if apart > 1:
        found["wrong"] = f"{apart:.1f} times as wrong as rounding explains"
    return {**found, "threads": threads(call) if executor() is metal else {}}


def threads(call: Call) -> dict[str, int]:
    """By kernel, the largest threadgroup that the GPU has registers for."""
    found: dict[str, int] = {}
    for kernel, inputs, plan in launches(call):
        wide = replace(plan, threadgroup=(_MANY_THREADS, 1, 1), grid=(_MANY_THREADS, 1, 1))
        try:
            mx.eval(metal(kernel, inputs, wide))
        except (TypeError, ValueError) as refusal:  # before anything is launched
            found.update((kernel.name, int(most)) for most in re.findall(_NUMBER, str(refusal)))
    return found


def raced(item: Item) -> Found:
    """Microseconds of each side, of stock alone where the kernel is refused; bytes: of a call."""
    operation = operation_of(item["operation"])
    calls = _calls(item, operation, item["sizes"], CALLS)
    found: Found = {"us": {}, "bytes": _bytes(calls[0])}
    ways: tuple[str, ...] = ()
    try:
        operation.check(*calls[0])
        ways = operation.ways(*calls[0])
    except ValueError as refusal:
        found["refused"] = str(refusal)
    if not rehearsed(item):
        chained = [calls[i % len(calls)] for i in range(CALLS)]
        return {**found, "us": race(operation, ways, chained, runs=RUNS)}
    for way in ways:
        mx.eval(operation.compared(operation.by(way)(*calls[0]), *calls[0]))
    return found


def _calls(
    item: Item, operation: Operation, sizes: dict[str, int], most: int
) -> list[tuple[Any, ...]]:
    """Random calls of one size: as many, up to `most`, as take for each to find its arrays cold."""
    if rehearsed(item):
        sizes, most = {key: min(n, _SMALL.get(key, n)) for key, n in sizes.items()}, 1
    made = [arguments(operation, "bfloat16", sizes)]
    fitting = min(most, COLD_BYTES // _bytes(made[0]))
    made += [arguments(operation, "bfloat16", sizes) for _ in range(fitting - 1)]
    mx.eval([_arrays(call) for call in made])
    return made


def _arrays(call: Sequence[Any]) -> list[mx.array]:
    parts: Any = tree_flatten([*call])  # names and leaves
    return [part for _, part in parts if isinstance(part, mx.array)]


def _bytes(call: Sequence[Any]) -> int:
    """Of all that a call reads besides its first argument, the few rows."""
    return sum(array.nbytes for array in _arrays(call[1:]))


def sustained(item: Item) -> Found:
    """Passes of products one behind the other: milliseconds at first, at last, and the longest."""
    seconds, layers = (0.0, 1) if rehearsed(item) else (item["seconds"], item["layers"])
    sides = [
        (VERIFY_QMM.by(way) if way else VERIFY_QMM.reference, _calls(item, VERIFY_QMM, sizes, 4))
        for sizes, way in item["products"]
    ]
    times: list[float] = []
    begin = time.perf_counter()
    while not times or time.perf_counter() - begin < seconds:
        start, out = time.perf_counter(), None
        for layer in range(layers):
            for step, calls in sides:
                given = calls[layer % len(calls)]
                out = step(*(given if out is None else VERIFY_QMM.after(out, *given)))
        mx.eval(out)
        times.append((time.perf_counter() - start) * 1e3)
    part = max(1, len(times) // 6)
    first, last = median(times[:part]), median(times[-part:])
    return {"passes": len(times), "first": first, "last": last, "longest": max(times)}


def host(item: Item) -> Found:
    """Microseconds of Python for a pass of Qwen3-4B's layers, ours and mlx-lm's: a table."""
    if not HOST.is_file():
        return {"refused": f"{HOST.name} is in a clone of the repository alone"}
    given = ["--help"] if rehearsed(item) else []
    done = subprocess.run(
        [sys.executable, str(HOST), *given], capture_output=True, text=True, timeout=limit(item) - 5
    )
    if done.returncode:
        return {"wrong": done.stderr}
    return {"table": [line for line in done.stdout.splitlines() if line.startswith("|")]}


_KINDS: dict[str, Callable[[Item], Found]] = {
    "machine": machine,
    "variant": variant,
    "race": raced,
    "sustained": sustained,
    "host": host,
}


def _answered(item: Item) -> Found:
    if not rehearsed(item):
        return measured(item)
    with import_module("kernels_metal.emulator").emulated():
        found = measured(item)
    return {key: found[key] for key in _UNTIMED if key in found}


if __name__ == "__main__":
    answer(_answered, limit)
