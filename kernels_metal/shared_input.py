"""Quantised products of one input as one product: queries, keys and values, or gate and up.

There is no kernel of its own: what is weighed is one launch over weights side by side against one
launch each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx

from kernels_metal.checks import check
from kernels_metal.operation import Case, Draw, Operation, case_of
from kernels_metal.verify_qmm import Matrix, Packing, drawn_matrix, drawn_packing, stock


def together(
    x: mx.array, whole: Matrix, parts: Sequence[Matrix], packing: Packing
) -> list[mx.array]:
    """The products of x and each of `parts` transposed, in one by `whole`, all parts in a row.

    x: [..., K]. whole: as `verify_qmm` takes it, [N, K]. parts: [N_i, K], whose N_i add up to N.
    """
    return mx.split(stock(x, whole, packing), bounds(parts), axis=-1)  # type: ignore[return-value]


def apart(x: mx.array, whole: Matrix, parts: Sequence[Matrix], packing: Packing) -> list[mx.array]:
    """As `together`, one product for each part."""
    return [stock(x, part, packing) for part in parts]


def side_by_side(parts: Sequence[Matrix]) -> tuple[Matrix, list[Matrix]]:
    """One matrix of all parts, and the parts as views of it, so that memory stays what it was."""
    whole, pieces = [], []
    for arrays in zip(*parts, strict=True):
        one = None if arrays[0] is None else mx.concatenate([*arrays])
        whole.append(one)
        pieces.append([None] * len(parts) if one is None else mx.split(one, bounds(parts)))
    mx.eval([a for a in whole if a is not None], [p for p in pieces if p[0] is not None])
    return tuple(whole), list(zip(*pieces, strict=True))  # type: ignore[return-value]


def bounds(parts: Sequence[Matrix]) -> list[int]:
    """Where a part ends and the next begins."""
    return [*accumulate(weights.shape[0] for weights, *_ in parts)][:-1]


def check_arguments(x: mx.array, whole: Matrix, parts: Sequence[Matrix], packing: Packing) -> None:
    """Raise ValueError for parts that are not of one width and dtype."""
    rows = sum(part[0].shape[0] for part in parts)
    check(rows == whole[0].shape[0], "the rows of parts", rows, f"{whole[0].shape[0]}, as of all")


def _case(x: mx.array, whole: Matrix, parts: Sequence[Matrix], packing: Packing) -> Case:
    rows = math.prod(x.shape[:-1])
    shape = (x.shape[-1], *(part[0].shape[0] for part in parts), packing.group)
    floats: list[Any] = [x] if packing.form else [x, *whole[1:]]
    return case_of(rows, (*shape, *[packing.form] * (packing.form > 0)), floats, packing.bits)


def _after(out: list[mx.array], x: mx.array, *rest: Any) -> tuple[Any, ...]:
    """X that depends on all products."""
    for y in out:
        x = mx.minimum(x, y[..., :1])
    return x, *rest


def _arguments(draw: Draw) -> tuple[Any, ...]:
    packing = drawn_packing(draw)
    rows, count = draw.size("rows", range(1, 33)), draw.size("parts", (2, 3))
    depth = draw.size("depth", range(packing.step, 5 * packing.step, packing.step))
    x, parts = draw.normal(rows, depth), []
    for part in range(count):
        columns = draw.size("columns", (8, 32, 64)) * (1 + part % 2)
        parts.append(drawn_matrix(draw, columns, depth, packing))
    whole, views = side_by_side(parts)
    return x, whole, views, packing


SHARED_INPUT = Operation(
    name="shared_input",
    kernel=together,
    reference=apart,
    check=check_arguments,
    case=_case,
    kernels=(),
    arguments=_arguments,
    defaults={
        **{"rows": 8, "depth": 256, "columns": 32, "parts": 3, "bits": 4, "group": 64},
        "mode": 0,
    },
    compared=lambda out, *args: out,
    after=_after,
)
