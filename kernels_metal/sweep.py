"""Every operation at random shapes: how far its kernel is from its reference.

for trial in trials(seed=0, each=40):
    print(trial.label, error(trial))  # above 1: further than rounding explains
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kernels_metal.catalog import OPERATIONS
from kernels_metal.checks import FLOATS
from kernels_metal.operation import Draw, Operation, dtype_name

FLOAT32 = 1e-5  # error of a sum, as a share of the largest number in the result
ROUNDOFF = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}  # of one rounded result
LETTERS = {"vocabulary": "V", "depth": "K", "columns": "N"}  # as the docstrings call them


@dataclass(frozen=True)
class Trial:
    """One call of an operation on random arguments."""

    operation: Operation
    arguments: tuple[Any, ...]
    label: str


def trials(seed: int, each: int) -> Iterator[Trial]:
    """`each` calls of every operation, dtypes in turn; the same for the same seed."""
    rng = random.Random(seed)
    for operation in OPERATIONS:
        for i in range(each):
            draw = Draw(rng, FLOATS[i % len(FLOATS)])
            arguments = operation.arguments(draw)
            names = [name for name in operation.defaults if name in draw.sizes]
            names += [name for name in draw.sizes if name not in names]
            sizes = " ".join(f"{LETTERS.get(name, name)} {draw.sizes[name]}" for name in names)
            yield Trial(operation, arguments, f"{operation.name} {dtype_name(draw.dtype)}: {sizes}")


def error(trial: Trial) -> float:
    """The largest difference between kernel and float32 reference, 1 being what rounding explains.

    The reference runs on the CPU: newer GPUs round the factors of float32 products to TF32.
    Infinite for results that are not numbers, and for integers that differ.
    """
    operation = trial.operation
    ours = operation.compared(operation.kernel(*trial.arguments), *trial.arguments)
    with mx.stream(mx.cpu):
        arguments = [_widened(a) for a in trial.arguments]
        wide = operation.compared(operation.reference(*arguments), *arguments)
    return max(share(a, b) for a, b in zip(ours, wide, strict=True))


def share(ours: mx.array, reference: mx.array) -> float:
    """The difference as a share of what rounding explains; see `error`."""
    if not mx.issubdtype(ours.dtype, mx.floating):
        return 0.0 if mx.array_equal(ours, reference).item() else float("inf")
    size = mx.abs(reference)
    bound = FLOAT32 * size.max() + ROUNDOFF.get(ours.dtype, 0.0) * size
    apart = mx.abs(ours.astype(mx.float32) - reference) / (bound + 2.0**-25)
    worst = float(apart.max().item())  # type: ignore[arg-type]
    return worst if worst == worst else float("inf")


def _widened(argument: Any) -> Any:
    """In float32; what is packed stays as it is."""
    if isinstance(argument, list):
        return [_widened(item) for item in argument]
    if isinstance(argument, tuple):
        packed = any(isinstance(item, mx.array) and item.dtype == mx.uint32 for item in argument)
        items = argument if packed else [*map(_widened, argument)]
        return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
    if isinstance(argument, mx.array) and mx.issubdtype(argument.dtype, mx.floating):
        return argument.astype(mx.float32)
    return argument
