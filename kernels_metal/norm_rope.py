"""Queries and keys, normalised head by head and turned to their positions, in one launch.

Otherwise it takes four, and two copies where one product gave both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from kernels_metal.checks import check, check_array, check_choice, check_range
from kernels_metal.factory import Kernel, Launch, Prepared, Step
from kernels_metal.operation import ROWS, Case, Draw, Operation, case_of

HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_ROWS = 96
KERNEL = Kernel(
    "norm_rope",
    inputs=(
        *("queries", "keys", "query_weight", "key_weight"),
        *("positions", "periods", "epsilon"),
    ),
    outputs=("turned_queries", "turned_keys"),
    ensure_row_contiguous=False,
)


class HeadNorm(NamedTuple):
    """How heads of D numbers are normalised and turned.

    query_weight, key_weight: [D], of the RMS norms. periods: float32 [turned / 2], positions a
    radian, of the pairs i and i + turned / 2; the numbers from `turned` on stay. epsilon: added to
    the mean square. gated: behind each head of the queries stand D numbers that are passed over.
    """

    query_weight: mx.array
    key_weight: mx.array
    periods: mx.array
    epsilon: float
    gated: bool = False

    @property
    def step(self) -> int:
        """From a head of the queries to the next."""
        return self.query_weight.size * (1 + self.gated)


def turning(queries: mx.array, keys: mx.array, norm: HeadNorm) -> Step:
    """`norm_rope` for arrays of these shapes, which are not checked again.

    It is called with queries, keys and positions of eight rows or more, see `padded`.
    """
    rows, width = queries.shape[1], norm.query_weight.size
    heads, kv_heads = queries.shape[2] // norm.step, keys.shape[2] // width
    plan = Launch(
        grid=(32, heads + kv_heads, rows),
        threadgroup=(32, 1, 1),
        output_shapes=((1, heads, rows, width), (1, kv_heads, rows, width)),
        output_dtypes=(queries.dtype,) * 2,
        template=(
            *(("T", queries.dtype), ("D", width), ("HEADS", heads)),
            *(("TURNED", norm.periods.size), ("STEP", norm.step)),
        ),
    )
    launched = Prepared(KERNEL, plan)
    arrays = [norm.query_weight, norm.key_weight, norm.periods, mx.array([norm.epsilon])]

    def run(queries: mx.array, keys: mx.array, at: mx.array, arrays: Any) -> list[mx.array]:
        return launched([queries, keys, *arrays[:2], at, *arrays[2:]])

    return Step((KERNEL.name, plan), arrays, run)


def norm_rope(
    queries: mx.array, keys: mx.array, positions: mx.array, norm: HeadNorm
) -> list[mx.array]:
    """Queries [1, heads, R, D] and keys [1, key/value heads, R, D], normalised and turned.

    queries: [1, R, heads * D], or twice that where they are gated. keys: [1, R, key/value heads *
    D]; rows at any stride. positions: int32 [R] of each row. D 64, 80, 96, 128 or 256, R up to 96;
    queries, keys and weights float32, float16 or bfloat16. Raises ValueError for other shapes and
    dtypes.
    """
    check_arguments(queries, keys, positions, norm)
    return turning(queries, keys, norm)(queries, keys, padded(positions))  # type: ignore[no-any-return]


def norm_rope_reference(
    queries: mx.array, keys: mx.array, positions: mx.array, norm: HeadNorm
) -> list[mx.array]:
    """As `norm_rope`, by MLX's own norm and rotation, whose batch the rows are."""

    def turned(x: mx.array, weight: mx.array, step: int) -> mx.array:
        heads = x.reshape(x.shape[1], -1, 1, step)[..., : weight.size]
        normed = mx.fast.rms_norm(heads, weight, norm.epsilon)
        rotated = mx.fast.rope(
            normed,
            2 * norm.periods.size,
            traditional=False,
            base=None,
            scale=1.0,
            offset=positions,
            freqs=norm.periods,
        )
        return rotated.swapaxes(0, 2)

    width = norm.key_weight.size
    return [turned(queries, norm.query_weight, norm.step), turned(keys, norm.key_weight, width)]


def padded(positions: mx.array) -> mx.array:
    """With eight places or more, so that they are in device memory."""
    missing = 8 - positions.size
    return positions if missing <= 0 else mx.pad(positions, (0, missing))


def check_arguments(queries: mx.array, keys: mx.array, positions: mx.array, norm: HeadNorm) -> None:
    """Raise ValueError for arguments the kernel does not take."""
    width = norm.query_weight.size
    check_choice("the head dim", width, HEAD_DIMS)
    check_array("queries", queries, (1, None, None))
    check_range("the rows of queries", queries.shape[1], 1, MAX_ROWS)
    check_array("keys", keys, (1, queries.shape[1], None), (queries.dtype,))
    for name, array, step in (("queries", queries, norm.step), ("keys", keys, width)):
        whole = array.shape[2] % step == 0
        check(whole, f"the columns of {name}", array.shape[2], f"a multiple of {step}")
    check_array("positions", positions, (queries.shape[1],), (mx.int32,))
    for name, array in (("query_weight", norm.query_weight), ("key_weight", norm.key_weight)):
        check_array(name, array, (width,), (queries.dtype,))
    check_array("periods", norm.periods, (None,), (mx.float32,))
    check_range("the turned numbers of a head", 2 * norm.periods.size, 2, width)


def _case(queries: mx.array, keys: mx.array, positions: mx.array, norm: HeadNorm) -> Case:
    width = norm.query_weight.size
    shape: tuple[int, ...] = (queries.shape[2] // norm.step, keys.shape[2] // width, width)
    if norm.gated or 2 * norm.periods.size < width:
        shape = (*shape, norm.step, 2 * norm.periods.size)
    return case_of(queries.shape[1], shape, [queries, keys, norm.query_weight, norm.key_weight])


def _after(out: list[mx.array], queries: mx.array, *rest: Any) -> tuple[Any, ...]:
    """Queries that depend on the result, by one small kernel."""
    return mx.minimum(queries, out[1][:, 0, 0, :1]), *rest


def _arguments(draw: Draw) -> tuple[Any, ...]:
    """Queries and keys side by side, as one product gives them, in half of the calls."""
    rows, dim = draw.size("rows", ROWS), draw.size("dim", HEAD_DIMS)
    kv_heads = draw.size("kv_heads", (1, 2, 3))
    heads = draw.size("heads", [kv_heads * group for group in (1, 2, 4)])
    gated, part = draw.chance("gated", 0.3), draw.chance("partial", 0.3)
    widths = heads * dim * (1 + gated), kv_heads * dim
    size = 10.0 ** -draw.extra("small", (0, 0, 3))  # so small that epsilon counts
    if draw.chance("together", 0.5):
        queries, keys, _ = mx.split(
            size * draw.normal(1, rows, sum(widths) + dim), np.cumsum(widths).tolist(), axis=-1
        )
    else:
        queries, keys = (size * draw.normal(1, rows, width) for width in widths)
    first = draw.extra("first", (0, 1, 100, 30_000))
    positions = mx.array(
        [first + (row if draw.given else draw.rng.randrange(9)) for row in range(rows)]
    )
    turned = dim // 4 if part else dim
    periods = 1e6 ** (mx.arange(0, turned, 2) / turned)
    query_weight, key_weight = (1 + 0.1 * draw.normal(dim) for _ in range(2))
    return queries, keys, positions, HeadNorm(query_weight, key_weight, periods, 1e-6, gated)


def _tried(*args: Any) -> tuple[str, list[dict[str, int]]]:
    norm = args[3]
    dim, part = norm.query_weight.size, 2 * norm.periods.size < norm.query_weight.size
    words = (str(dim), *["gated"] * norm.gated, *["partial"] * part)
    return " ".join(words), [{"dim": dim, "gated": int(norm.gated), "partial": int(part)}]


NORM_ROPE = Operation(
    name="norm_rope",
    kernel=norm_rope,
    reference=norm_rope_reference,
    check=check_arguments,
    case=_case,
    kernels=(KERNEL,),
    arguments=_arguments,
    defaults={"rows": 8, "dim": 128, "heads": 8, "kv_heads": 2},
    compared=lambda out, *args: list(out),
    after=_after,
    tried=_tried,
    variants=[*({"dim": dim} for dim in HEAD_DIMS), {"dim": 256, "gated": 1, "partial": 1}],
)
