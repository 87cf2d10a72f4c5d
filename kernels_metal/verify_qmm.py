"""Quantised matrix product for the few rows of a verification, reading each weight once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from kernels_metal.checks import check, check_array, check_choice, check_contiguous, check_range
from kernels_metal.factory import Kernel, Launch, launch
from kernels_metal.operation import Case, Draw, Operation, case_of

BITS, GROUPS = (4, 8), (32, 64, 128)
MAX_ROWS = 32
SIMD_GROUPS = 8
RUN = 256  # weights along K that a SIMD-group reads at a time
WANTED = 1024  # SIMD-groups, to fill the cores of a large GPU
KERNEL = Kernel(
    "verify_qmm",
    inputs=("x", "weights", "scales", "biases", "sizes"),
    outputs=("y",),
    header="widen",
)


@dataclass(frozen=True)
class Packing:
    """Affine quantisation: 4 or 8 bits, one scale and bias for 32, 64 or 128 weights along K.

    invariant: sum every row as if it were alone, so that n rows give the bits of n single rows.
    Otherwise the sum over K is split as suits the number of rows.
    """

    bits: int
    group: int
    invariant: bool = False

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, BITS)
        check_choice("group", self.group, GROUPS)


def verify_qmm(
    x: mx.array, weights: mx.array, scales: mx.array, biases: mx.array, packing: Packing
) -> mx.array:
    """Rows x [M, K] times the transposed dequantised weights: [M, N], M from 1 to 32.

    weights: uint32 [N, K * bits / 32]. scales, biases: [N, K / group], both of the dtype of x:
    float32, float16 or bfloat16; sums are float32. Raises ValueError for other shapes and dtypes,
    and for weights with gaps.
    """
    check_arguments(x, weights, scales, biases, packing)
    (rows, depth), columns = x.shape, weights.shape[0]
    each = _columns_held(rows)
    parts = _parts(columns, depth, _columns_held(1) if packing.invariant else each)
    sizes = [rows, depth, columns, packing.group.bit_length() - 1, parts]
    plan = Launch(
        grid=(-(-columns // (SIMD_GROUPS // parts * each)) * SIMD_GROUPS * 32, 1, 1),
        threadgroup=(SIMD_GROUPS * 32, 1, 1),
        output_shapes=((rows, columns),),
        output_dtypes=(x.dtype,),
        template=(("T", x.dtype), ("BITS", packing.bits), ("COLS", each)),
    )
    return launch(KERNEL, [x, weights, scales, biases, mx.array(sizes)], plan)[0]


def verify_qmm_reference(
    x: mx.array, weights: mx.array, scales: mx.array, biases: mx.array, packing: Packing
) -> mx.array:
    """As `verify_qmm`, by MLX's own product; row by row where the rows must not mind each other."""

    def product(rows: mx.array) -> mx.array:
        return mx.quantized_matmul(
            rows, weights, scales, biases, group_size=packing.group, bits=packing.bits
        )

    if not packing.invariant or x.shape[0] == 1:
        return product(x)
    return mx.concatenate([product(x[i : i + 1]) for i in range(x.shape[0])])


def _columns_held(rows: int) -> int:
    """Columns of one SIMD-group: rows times columns are sums in registers."""
    return 4 if rows <= 8 else 2 if rows <= 16 else 1


def _parts(columns: int, depth: int, each: int) -> int:
    """SIMD-groups that share the sum over K of the same columns."""
    parts = 1
    while parts < SIMD_GROUPS and columns // each * parts < WANTED and parts * 2 * RUN <= depth:
        parts *= 2
    return parts


def check_arguments(
    x: mx.array, weights: mx.array, scales: mx.array, biases: mx.array, packing: Packing
) -> None:
    """Raise ValueError for arguments the kernel does not take."""
    check_array("x", x, (None, None))
    check_range("the rows of x", x.shape[0], 1, MAX_ROWS)
    depth = x.shape[1]
    check(depth % packing.group == 0, "the columns of x", depth, f"a multiple of {packing.group}")
    check_array("weights", weights, (None, depth * packing.bits // 32), (mx.uint32,))
    check_contiguous("weights", weights)
    for name, array in (("scales", scales), ("biases", biases)):
        check_array(name, array, (weights.shape[0], depth // packing.group), (x.dtype,))
        check_contiguous(name, array)


def _case(
    x: mx.array, weights: mx.array, scales: mx.array, biases: mx.array, packing: Packing
) -> Case:
    shape = (x.shape[1], weights.shape[0], packing.group, int(packing.invariant))
    return case_of(x.shape[0], shape, [x, scales, biases], packing.bits)


def _arguments(draw: Draw) -> tuple[Any, ...]:
    packing = Packing(group=draw.size("group", GROUPS), bits=draw.size("bits", BITS))
    rows = draw.size("rows", range(1, MAX_ROWS + 1))
    depth = draw.size("depth", range(packing.group, 21 * packing.group, packing.group))
    columns = draw.size("columns", (5, 8, 31, 33, 64, 100, 257))
    words = (columns, depth * packing.bits // 32)
    weights = mx.random.randint(0, 2**32, words, mx.uint32, key=draw.key())
    scales, biases = (draw.normal(columns, depth // packing.group) for _ in range(2))
    x = draw.normal(rows, depth)
    packing = replace(packing, invariant=draw.chance("invariant", 0.5))
    return x, weights, scales * 2.0**-packing.bits, biases, packing


VERIFY_QMM = Operation(
    name="verify_qmm",
    kernel=verify_qmm,
    reference=verify_qmm_reference,
    check=check_arguments,
    case=_case,
    kernels=(KERNEL,),
    arguments=_arguments,
    defaults={"rows": 8, "depth": 1024, "columns": 256, "bits": 4, "group": 64},
)
