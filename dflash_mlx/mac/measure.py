"""Does one piece of the report in a child: `python -m dflash_mlx.mac.measure`.

What a kernel is not for comes back as "refused", what fails as "wrong". Rehearsed pieces run small,
in the emulator, and are not timed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from statistics import median
from typing import Any

import mlx.core as mx

from dflash_mlx.mac.host import host_cost
from dflash_mlx.mac.items import Item, limit
from kernels_metal.cascade_attention import CASCADE_ATTENTION
from kernels_metal.children import answer
from kernels_metal.dispatch import COLD_BYTES, chain, race
from kernels_metal.factory import Kernel, Launch, executor, metal
from kernels_metal.operation import Operation
from kernels_metal.sweep import Trial, error
from kernels_metal.variants import Call, arguments, launches, operation_of
from kernels_metal.verify_qmm import VERIFY_QMM, Packing

Found = dict[str, Any]
RUNS = 3  # of either side of a race: hundreds of them have to end
LAYERS = 12  # that a chain goes through
_UNTIMED = ("error", "wrong", "refused", "bytes")  # what a rehearsal tells
_SMALL = {"depth": 256, "columns": 64, "prefix": 40, "heads": 4, "kv_heads": 2}  # rehearsed
_MANY_THREADS = 2048  # more than any GPU has: MLX refuses them, and says how many it would take


def measured(item: Item) -> Found:
    """What came of an item."""
    item = {
        **item,
        **{k: min(v, _SMALL[k]) for k, v in item.items() if k in _SMALL and rehearsed(item)},
    }
    try:
        return _KINDS[item["kind"]](item)
    except (RuntimeError, ValueError, MemoryError) as problem:
        with suppress(RuntimeError):
            mx.synchronize()  # what else fails behind it
        return {"wrong": str(problem)}


def rehearsed(item: Item) -> bool:
    """Whether it runs in the emulator, and is not timed."""
    return bool(item.get("rehearse"))


def copy(item: Item) -> Found:
    """Bytes that one kernel reads and writes in a second, of more than caches hold."""
    count = 2**10 if rehearsed(item) else 2**26
    x = mx.zeros(count)
    mx.eval(x)
    return {"GB/s": 8 * count / _best(item, lambda: mx.eval(x + 1)) / 1e9}


def launch_gap(item: Item) -> Found:
    """Microseconds of a launch that waits for the last one and does next to nothing."""
    count = 10 if rehearsed(item) else 1000

    def chained() -> None:
        x = mx.zeros(1)
        for _ in range(count):
            x = x + 1
        mx.eval(x)

    return {"us": _best(item, chained) / count * 1e6}


def float_products(item: Item) -> Found:
    """TFLOP/s of MLX's own product of large matrices, float32 and float16."""
    size = 16 if rehearsed(item) else 4096
    found = {}
    for dtype in (mx.float32, mx.float16):
        x = mx.ones((size, size), dtype)
        mx.eval(x)
        seconds = _best(item, lambda x=x: mx.eval(x @ x))  # type: ignore[misc]
        found[str(dtype).removeprefix("mlx.core.")] = 2 * size**3 / seconds / 1e12
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
    found = {}
    for kernel, inputs, plan in launches(call):
        with suppress(TypeError):
            found[kernel.name] = _ceiling(kernel, inputs, plan)
    return {name: most for name, most in found.items() if most}


def _ceiling(kernel: Kernel, inputs: Sequence[mx.array], plan: Launch) -> int:
    wide = replace(plan, threadgroup=(_MANY_THREADS, 1, 1), grid=(_MANY_THREADS, 1, 1))
    try:
        mx.eval(metal(kernel, inputs, wide))
    except ValueError as refusal:  # before anything is launched
        numbers = re.findall(r"\((\d+)\)", str(refusal))
        return int(numbers[-1]) if numbers else 0
    return 0


_held: dict[tuple[Any, ...], list[tuple[mx.array, ...]]] = {}  # of the newest matrix alone


def product(item: Item) -> Found:
    """A race of products; bytes: of the matrix."""
    depth, columns, gated = item["depth"], item["columns"], item["gated"]
    layers = _matrices(depth, columns, 1 if rehearsed(item) else LAYERS)
    x = mx.random.normal((item["rows"], depth)).astype(mx.bfloat16)
    packing = Packing(4, 64, gated=gated)
    calls = [(x, *layer, packing) for layer in layers]
    size = sum(array.nbytes for array in layers[0])
    return {**_raced(item, VERIFY_QMM, calls), "bytes": size}


def _matrices(depth: int, columns: int, most: int) -> list[tuple[mx.array, ...]]:
    """Several of one shape, so that each is found cold."""
    key = depth, columns
    if key not in _held:
        _held.clear()
        count = max(1, min(most, COLD_BYTES // (depth * columns * 9 // 16)))
        made: list[tuple[mx.array, ...]] = []
        for _ in range(count):
            words = mx.random.randint(0, 2**32, (columns, depth // 8), mx.uint32)
            scales, biases = (
                (mx.random.normal((columns, depth // 64)) / 16).astype(mx.bfloat16)
                for _ in range(2)
            )
            made.append((words, scales, biases))
        mx.eval(made)
        _held[key] = made
    return _held[key]


def attention(item: Item) -> Found:
    """A race of attention; bytes: of keys and values."""
    _held.clear()
    sizes = {k: item[k] for k in ("heads", "kv_heads", "dim", "kv_bits", "prefix", "rows")}
    given = arguments(CASCADE_ATTENTION, "bfloat16", sizes)
    parts = CASCADE_ATTENTION.copied(*given)[1] if CASCADE_ATTENTION.copied else []
    calls = [given] if rehearsed(item) else chain(CASCADE_ATTENTION, given, ())
    return {
        **_raced(item, CASCADE_ATTENTION, calls),
        "bytes": sum(part.nbytes for part in parts),
    }


def _raced(item: Item, operation: Operation, calls: list[tuple[Any, ...]]) -> Found:
    """Microseconds of each side; of stock alone where the kernel is refused."""
    refused = ""
    ways: tuple[str, ...] = ()
    try:
        operation.check(*calls[0])
        ways = operation.ways(*calls[0])
    except ValueError as refusal:
        refused = str(refusal)
    said = {"refused": refused} if refused else {}
    if rehearsed(item):
        for way in ways:
            mx.eval(operation.compared(operation.by(way)(*calls[0]), *calls[0]))
        return {"us": {}, **said}
    chained = [calls[i % len(calls)] for i in range(LAYERS)]
    return {"us": race(operation, ways, chained, runs=RUNS), **said}


def sustained(item: Item) -> Found:
    """Passes of products one behind the other: milliseconds at first, at last, and the longest."""
    sides = [_side(item, *shape) for shape in item["matrices"].values()]
    seconds = 0.0 if rehearsed(item) else item["seconds"]
    layers = 1 if rehearsed(item) else item["layers"]
    times: list[float] = []
    begin = time.perf_counter()
    while not times or time.perf_counter() - begin < seconds:
        start, out = time.perf_counter(), mx.zeros(1, mx.bfloat16)
        for i in range(layers):
            for multiply in sides:
                out = multiply(out, i)
        mx.eval(out)
        times.append((time.perf_counter() - start) * 1e3)
    part = max(1, len(times) // 6)
    first, last = median(times[:part]), median(times[-part:])
    return {"passes": len(times), "first": first, "last": last, "longest": max(times)}


def _side(item: Item, depth: int, columns: int, way: str) -> Callable[[mx.array, int], mx.array]:
    """A product that waits for the last one, of one layer after the other."""
    depth, columns = (min(depth, 128), min(columns, 64)) if rehearsed(item) else (depth, columns)
    _held.clear()
    layers = _matrices(depth, columns, 4)
    x = mx.random.normal((item["rows"], depth)).astype(mx.bfloat16)
    step = VERIFY_QMM.by(way) if way else VERIFY_QMM.reference

    def multiply(before: mx.array, layer: int) -> mx.array:
        y = step(x + before * 0, *layers[layer % len(layers)], Packing(4, 64))
        return y[:1, :1]  # type: ignore[no-any-return]

    return multiply


def host(item: Item) -> Found:
    """Microseconds of Python for a pass of Qwen3-4B's layers, ours and mlx-lm's, by rows."""
    layers = 1 if rehearsed(item) else item["layers"]
    rounds = 1 if rehearsed(item) else 30
    return {str(rows): host_cost(rows, layers, rounds) for rows in item["rows"]}


_KINDS: dict[str, Callable[[Item], Found]] = {
    "copy": copy,
    "launch gap": launch_gap,
    "float products": float_products,
    "variant": variant,
    "product": product,
    "attention": attention,
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
