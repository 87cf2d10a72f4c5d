"""Calls that run every variant of every kernel: each text that Apple's compiler may be given."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from kernels_metal.catalog import OPERATIONS
from kernels_metal.checks import FLOATS
from kernels_metal.factory import Kernel, Launch, executing
from kernels_metal.operation import Draw, Operation, dtype_name


class Call(NamedTuple):
    """A random call of these sizes. way: which of the operation's kernels, see `Operation.ways`."""

    operation: str
    dtype: str
    sizes: dict[str, int]
    way: str


def operation_of(name: str) -> Operation:
    """The operation of this name. StopIteration for another."""
    return next(operation for operation in OPERATIONS if operation.name == name)


def arguments(operation: Operation, dtype: str, sizes: dict[str, int]) -> tuple[Any, ...]:
    """Of a random call, the same for the same sizes; those that are not given by default."""
    given = {**operation.defaults, **sizes}
    return operation.arguments(Draw(random.Random(0), getattr(mx, dtype), given))


def calls() -> list[Call]:
    """Of all operations and dtypes, as first tries on a machine have them: each text once."""
    found: dict[str, Call] = {}
    with executing(_nothing):  # all kernels, whatever this machine's GPU has
        for operation in OPERATIONS:
            for name in map(dtype_name, FLOATS):
                for variant in operation.variants:
                    tried = operation.tried(*arguments(operation, name, dict(variant)))[1]
                    for sizes in ({**variant, **more} for more in tried):
                        args = arguments(operation, name, sizes)
                        for way in operation.ways(*args):
                            made = _launched(operation.by(way), args)
                            plans = [(k, p.template, p.output_dtypes) for k, _, p in made]
                            call = Call(operation.name, name, sizes, way)
                            found.setdefault(repr(plans), call)
    return [*found.values()]


def _nothing(kernel: Kernel, inputs: Sequence[mx.array], plan: Launch) -> list[mx.array]:
    given = zip(plan.output_shapes, plan.output_dtypes, strict=True)
    return [mx.zeros(shape, dtype) for shape, dtype in given]


def launches(call: Call) -> list[tuple[Kernel, Sequence[mx.array], Launch]]:
    """What a call would launch, of which nothing is: results are zeros."""
    operation = operation_of(call.operation)
    given = arguments(operation, call.dtype, call.sizes)
    return _launched(operation.by(call.way), given)


def _launched(
    kernel: Callable[..., Any], args: tuple[Any, ...]
) -> list[tuple[Kernel, Sequence[mx.array], Launch]]:
    made: list[tuple[Kernel, Sequence[mx.array], Launch]] = []

    def note(kernel: Kernel, inputs: Sequence[mx.array], plan: Launch) -> list[mx.array]:
        made.append((kernel, list(inputs), plan))
        return _nothing(kernel, inputs, plan)

    with executing(note):
        kernel(*args)
    return made
