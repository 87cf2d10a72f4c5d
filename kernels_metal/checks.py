"""Checks of arguments before a kernel is launched: the argument, its value and the limit."""

from __future__ import annotations

from collections.abc import Collection

import mlx.core as mx

FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def check(holds: bool, argument: str, value: object, limit: str) -> None:
    """Raise ValueError unless the limit holds."""
    if not holds:
        raise ValueError(f"{argument} is {value}, but must be {limit}")


def check_range(argument: str, value: int, low: int, high: int) -> None:
    """An integer from `low` to `high`, both included."""
    check(low <= value <= high, argument, value, f"{low} to {high}")


def check_choice(argument: str, value: int | str, choices: Collection[int | str]) -> None:
    """One of a few integers or words."""
    check(value in choices, argument, value, "one of " + ", ".join(map(str, choices)))


def check_array(
    argument: str,
    array: mx.array,
    shape: tuple[int | None, ...],
    dtypes: Collection[mx.Dtype] = FLOATS,
) -> None:
    """An array's shape, in which None stands for any size of 1 or more, and its dtype."""
    fits = array.ndim == len(shape) and all(
        actual > 0 if wanted is None else actual == wanted
        for actual, wanted in zip(array.shape, shape, strict=True)
    )
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    check(fits, f"the shape of {argument}", list(array.shape), f"[{wanted}]")
    names = " or ".join(str(dtype).removeprefix("mlx.core.") for dtype in dtypes)
    dtype = str(array.dtype).removeprefix("mlx.core.")
    check(array.dtype in dtypes, f"the dtype of {argument}", dtype, names)


def check_contiguous(argument: str, array: mx.array) -> None:
    """An array without gaps, in row order. Waits for it, so only for arrays that are not computed.

    MLX tells the strides of evaluated arrays only. It would copy a strided weight at every call.
    """
    strides = memoryview(array).strides  # type: ignore[arg-type]
    check(memoryview(array).c_contiguous, f"{argument} with strides", strides, "contiguous")  # type: ignore[arg-type]
