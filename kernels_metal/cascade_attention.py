"""Attention of many rows to one shared prefix and to a few local rows, reading the prefix once.

Tree verification and masked drafting of several branches are both of this kind: split over the
keys, every split against all rows, joined by log-sum-exp (as in Flash-Decoding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kernels_metal.checks import check, check_array, check_choice, check_range
from kernels_metal.factory import Kernel, Launch, launch
from kernels_metal.operation import PREFIXES, ROWS, Case, Draw, Operation, bucket, case_of

HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_ROWS = 96
MAX_LOCAL = 1024
SIMD_GROUPS = 8
THREADGROUPS = 128  # wanted, to fill the cores of a large GPU
TILE_BYTES = 8192  # of 32, 16 or 8 keys, and as many of values, in threadgroup memory
KERNEL = Kernel(
    "cascade_attention",
    inputs=("queries", "keys", "values", "visible", "sizes", "scale"),
    outputs=("partial", "sums"),
    header="widen",
    ensure_row_contiguous=False,
)
MERGE = Kernel("cascade_merge", inputs=("partial", "sums", "sinks", "sizes"), outputs=("merged",))


@dataclass(frozen=True, eq=False)
class Visibility:
    """What each of R rows sees: made once for a block, used by all layers of one kind.

    prefix: committed keys, P. local: bool [R, N], which of the N keys behind them each row sees
    (ancestors in a tree, the own branch of a forest). first: R, the first key of the prefix that
    each row sees (its sliding window); 0 for all by default. R up to 96, N up to 1,024.
    Raises ValueError for anything else, and for a row that sees nothing.
    """

    prefix: int
    local: npt.NDArray[np.bool_]
    first: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check(self.prefix >= 0, "prefix", self.prefix, "0 or more")
        shape, kind = self.local.shape, self.local.dtype
        check(len(shape) == 2 and kind == np.bool_, "local", f"{kind} {list(shape)}", "bool [R, N]")
        check_range("the rows of local", self.rows, 1, MAX_ROWS)
        check_range("the columns of local", self.columns, 1, MAX_LOCAL)
        count = len(self.starts)
        check(count == self.rows, "the length of first", count, f"{self.rows}, the rows")
        for row, start in enumerate(self.starts):
            check_range(f"first[{row}]", start, 0, self.prefix)
            sees = start < self.prefix or bool(self.local[row].any())
            check(sees, f"local[{row}]", "all False", "True somewhere: the row sees nothing")

    @property
    def rows(self) -> int:
        """R."""
        return len(self.local)

    @property
    def columns(self) -> int:
        """N."""
        return int(self.local.shape[1])

    @property
    def keys(self) -> int:
        """P + N."""
        return self.prefix + self.columns

    @property
    def starts(self) -> tuple[int, ...]:
        """First key of the prefix that each row sees."""
        return (0,) * self.rows if self.first is None else self.first

    @cached_property
    def mask(self) -> mx.array | str | None:
        """As MLX's attention takes it: None, "causal" or bool [R, P + N]."""
        starts = np.array(self.starts)
        if not starts.any():
            if self.local.all():
                return None
            if np.array_equal(self.local, np.tri(self.rows, dtype=bool)):
                return "causal"
        return mx.array(np.hstack([np.arange(self.prefix) >= starts[:, None], self.local]))

    @cached_property
    def bits(self) -> mx.array:
        """uint32 [max(R, 8), 1 + ceil(N / 32)]: `first`, then `local` as bits, lowest first.

        Eight rows or more, so that the kernel always has it in device memory.
        """
        words = -(-self.columns // 32)
        local = np.zeros((self.rows, words * 32), np.bool_)
        local[:, : self.columns] = self.local
        table = np.zeros((max(self.rows, 8), 1 + words), np.uint32)
        table[: self.rows, 0] = self.starts
        packed = np.packbits(local, axis=1, bitorder="little")
        table[: self.rows, 1:] = packed.view("<u4")
        return mx.array(table)


def cascade_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    seen: Visibility,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """softmax(scale * queries keys^T) values, [1, heads, R, D], over what each row sees.

    queries: [1, heads, R, D]. keys, values: [1, key/value heads, slots, D], any strides, a view or
    a whole cache: the prefix in slots 0 to P - 1, the local keys in the N behind it. heads is a
    multiple of the key/value heads, D 64, 80, 96, 128 or 256. All float32, float16 or bfloat16.
    sinks: [heads], one more score of each head that joins the sum and has no value.
    Raises ValueError for other shapes and dtypes, and for a prefix longer than the cache.
    """
    check_arguments(queries, keys, values, seen, scale, sinks)
    heads, width, kv_heads = queries.shape[1], queries.shape[3], keys.shape[1]
    tile = next(n for n in (32, 16, 8) if n * width * queries.itemsize <= TILE_BYTES)
    held = 8 if width <= 128 else 4  # query rows in the registers of one SIMD-group
    rows = heads // kv_heads * seen.rows
    low = min(seen.starts)
    length = tile if rows > SIMD_GROUPS * held else _split(seen.keys - low, kv_heads, tile)
    splits = -(-(seen.keys - low) // length)
    words = seen.bits.shape[1] - 1
    sizes = [seen.rows, heads // kv_heads, low, seen.prefix, seen.keys, length, words]
    plan = Launch(
        grid=(kv_heads * SIMD_GROUPS * 32, splits, 1),
        threadgroup=(SIMD_GROUPS * 32, 1, 1),
        output_shapes=((splits, kv_heads * rows, width), (splits, kv_heads * rows, 2)),
        output_dtypes=(mx.float32, mx.float32),
        template=(("T", queries.dtype), ("D", width), ("KEYS", tile), ("ROWS", held)),
    )
    inputs = [mx.contiguous(queries), keys, values, seen.bits, mx.array(sizes), mx.array([scale])]
    partial, sums = launch(KERNEL, inputs, plan)
    return _merge(partial, sums, queries, sinks)


def cascade_attention_reference(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    seen: Visibility,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """As `cascade_attention`, by MLX's own attention with a dense mask."""
    used = slice(0, seen.keys)
    return mx.fast.scaled_dot_product_attention(
        queries, keys[..., used, :], values[..., used, :], scale=scale, mask=seen.mask, sinks=sinks
    )


def _split(keys: int, kv_heads: int, tile: int) -> int:
    """Keys of one split: a multiple of the tile, four tiles or more."""
    wanted = -(-keys // max(1, THREADGROUPS // kv_heads))
    return max(4, -(-wanted // tile)) * tile


def _merge(
    partial: mx.array, sums: mx.array, queries: mx.array, sinks: mx.array | None
) -> mx.array:
    """The splits joined; sinks padded to eight, so always in device memory."""
    heads, rows = queries.shape[1:3]
    absent = mx.full(max(heads, 8) - (0 if sinks is None else heads), -mx.inf)
    scores = absent if sinks is None else mx.concatenate([sinks.astype(mx.float32), absent])
    plan = Launch(
        grid=(32, heads * rows, 1),
        threadgroup=(32, 1, 1),
        output_shapes=(queries.shape,),
        output_dtypes=(queries.dtype,),
        template=(("T", queries.dtype),),
    )
    return launch(MERGE, [partial, sums, scores, mx.array([rows])], plan)[0]


def check_arguments(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    seen: Visibility,
    scale: float,
    sinks: mx.array | None = None,
) -> None:
    """Raise ValueError for arguments the kernel does not take."""
    check_array("queries", queries, (1, None, None, None))
    check_choice("the head dim of queries", queries.shape[3], HEAD_DIMS)
    check_range("the rows of queries", queries.shape[2], 1, MAX_ROWS)
    heads, rows, width = queries.shape[1:]
    check(rows == seen.rows, "the rows of local", seen.rows, f"{rows}, those of queries")
    check_array("keys", keys, (1, None, None, width), (queries.dtype,))
    check_array("values", values, keys.shape, (queries.dtype,))
    grouped, limit = heads % keys.shape[1] == 0, f"a multiple of the {keys.shape[1]} of keys"
    check(grouped, "the heads of queries", heads, limit)
    stored = f"{seen.prefix} keys of prefix and {seen.columns} local"
    check(seen.keys <= keys.shape[2], "the cache needed", stored, f"up to {keys.shape[2]} slots")
    check(math.isfinite(scale), "scale", scale, "finite")
    if sinks is not None:
        check_array("sinks", sinks, (heads,))


def _case(
    queries: mx.array, keys: mx.array, values: mx.array, seen: Visibility, *rest: Any
) -> Case:
    sinks = [array for array in rest[1:] if array is not None]
    heads = (queries.shape[1], keys.shape[1], queries.shape[3], values.shape[3])
    arrays = [queries, keys, values, *sinks]
    return case_of(queries.shape[2], (*heads, bucket(seen.keys), len(sinks)), arrays)


def _arguments(draw: Draw) -> tuple[Any, ...]:
    """A tree behind the prefix, with a window for each row in some calls."""
    rows, prefix = draw.size("rows", ROWS), draw.size("prefix", PREFIXES)
    dim, kv_heads = draw.size("dim", HEAD_DIMS), draw.size("kv_heads", (1, 2, 3))
    heads = draw.size("heads", [kv_heads * group for group in (1, 2, 4, 8)])
    local = np.eye(rows, dtype=np.bool_)
    for node, parent in enumerate(draw.parents(rows)[1:], start=1):
        local[node] |= local[parent]
    window = draw.chance("window", 0.3)
    first = tuple(draw.rng.randint(0, prefix) for _ in range(rows)) if window else None
    slots = prefix + rows + draw.extra("slack", (0, 1, 200))
    keys, values = (draw.normal(1, kv_heads, slots, dim) for _ in range(2))
    queries = draw.normal(1, heads, rows, dim)
    sinks = draw.normal(heads) if draw.chance("sinks", 0.3) else None
    draw.sizes["window"] = window
    return queries, keys, values, Visibility(prefix, local, first), dim**-0.5, sinks


CASCADE_ATTENTION = Operation(
    name="cascade_attention",
    kernel=cascade_attention,
    reference=cascade_attention_reference,
    check=check_arguments,
    case=_case,
    kernels=(KERNEL, MERGE),
    arguments=_arguments,
    defaults={"rows": 16, "prefix": 1000, "heads": 8, "kv_heads": 2, "dim": 64},
)
