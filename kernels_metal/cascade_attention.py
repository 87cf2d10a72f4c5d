"""Attention of many rows to one shared prefix and to a few local rows, reading the prefix once.

Tree verification and masked drafting of several branches are both of this kind: split over the
keys, every split against all rows, joined by log-sum-exp (as in Flash-Decoding). Splits are few:
where rows are many, two at most, so that what goes through memory stays small.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from kernels_metal.checks import check, check_array, check_choice, check_range
from kernels_metal.factory import Kernel, Launch, Prepared
from kernels_metal.gpu import cores, may_use_matrices
from kernels_metal.operation import PREFIXES, ROWS, Case, Draw, Operation, bucket, case_of
from kernels_metal.visibility import MAX_ROWS, Visibility

HEAD_DIMS = (64, 80, 96, 128, 256)
BITS, GROUPS = (4, 8), (32, 64)
# Rows of one threadgroup, at a head dim of 256 half as many by as many threads: all read the keys
# once, or so few that there are more threadgroups, which read them again from caches. 96 are 384
# threads: an M1 or M2 has no registers for many more.
WAYS: dict[str, int] = {"once": 96, "apart": 32}
THREADGROUPS = 8  # wanted for each core of the GPU, so that loads of one hide behind another's work
TILES = 3  # of a split at least
TILE_BYTES = 24 * 1024  # of 32, 16 or 8 keys and as many values, in threadgroup memory
SHARE = 3  # more than two splits write at most this part of the keys and values they read
_PACKED = ("key_scales", "key_biases", "value_scales", "value_biases")
KERNEL = Kernel(
    "cascade_attention",
    inputs=("queries", "keys", "values", *_PACKED, "visible", "sizes", "scale", "sinks"),
    outputs=("result", "sums"),
    header="lanes",
    ensure_row_contiguous=False,
)
# Every array that is bound costs the host; the names of those that are not read stand for keys
PLAIN = replace(
    KERNEL,
    inputs=tuple(name for name in KERNEL.inputs if name not in _PACKED),
    before="".join(
        f"const device T* {name} = keys; const constant int64_t* {name}_strides = keys_strides; "
        for name in _PACKED
    ),
)
MERGE = Kernel("cascade_merge", inputs=("partial", "sums", "sinks", "sizes"), outputs=("merged",))


class Packed(NamedTuple):
    """Quantised keys or values: MLX's affine triple, [1, key/value heads, slots, ...] each.

    words: uint32, 4 or 8 bits for each number. scales, biases: one for each 32 or 64 numbers.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array


@dataclass(frozen=True)
class Layout:
    """How rows and keys are shared out: see `layout`."""

    groups: int  # of eight rows in a threadgroup, with `halves` SIMD-groups each
    halves: int  # of the head dim, 2 where one SIMD-group has no registers for it
    sets: int  # of rows; each reads the keys
    tile: int
    length: int  # keys of a split
    splits: int


def cascade_attention(  # noqa: PLR0913  # those of MLX's attention, and a choice
    queries: mx.array,
    keys: mx.array | Packed,
    values: mx.array | Packed,
    seen: Visibility,
    scale: float,
    sinks: mx.array | None = None,
    way: str = "once",
) -> mx.array:
    """softmax(scale * queries keys^T) values, [1, heads, R, D], over what each row sees.

    queries: [1, heads, R, D]. keys, values: [1, key/value heads, slots, D], a view or a whole
    cache: the prefix in slots 0 to P - 1, the local keys in the N behind it; or both packed. Any
    strides; views begin at a multiple of four numbers. heads is a multiple of the key/value heads,
    D 64, 80, 96, 128 or 256. All float32, float16 or bfloat16. sinks: [heads], one more score of
    each head that joins the sum and has no value. way: one of WAYS.
    Raises ValueError for other shapes and dtypes, and for a prefix longer than the cache.
    """
    check_arguments(queries, keys, values, seen, scale, sinks)
    return AttentionPlan(queries, keys, seen, scale, way)(queries, keys, values, sinks)


def cascade_attention_reference(
    queries: mx.array,
    keys: mx.array | Packed,
    values: mx.array | Packed,
    seen: Visibility,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """As `cascade_attention`, by MLX's own attention with a dense mask."""
    used = slice(0, seen.keys)
    keys, values = (
        unpacked(rows, queries.shape[-1]).astype(queries.dtype)
        if isinstance(rows, Packed)
        else rows
        for rows in (keys, values)
    )
    return mx.fast.scaled_dot_product_attention(
        queries, keys[..., used, :], values[..., used, :], scale=scale, mask=seen.mask, sinks=sinks
    )


def unpacked(rows: Packed, width: int) -> mx.array:
    """[1, heads, slots, D]: the numbers, worked out in float32 and rounded once."""
    group = width // rows.scales.shape[-1]
    scales, biases = (array.astype(mx.float32) for array in rows[1:])
    bits = _bits(rows, width)
    numbers = mx.dequantize(rows.words, scales, biases, group_size=group, bits=bits)
    return numbers.astype(rows.scales.dtype)


def layout(  # noqa: PLR0913  # a call's sizes
    rows: int, keys: int, kv_heads: int, width: int, itemsize: int, together: int = WAYS["once"]
) -> Layout:
    """For `rows` of each key/value head behind `keys`; width: D, itemsize: bytes of a number.

    together: rows of a threadgroup.

    A split writes weighted values and sums in float32. Two splits are always allowed, more as long
    as they write less than a third of the keys and values: caches keep what they write.
    """
    eights = -(-rows // 8)
    halves = 1 if width <= 128 else 2
    most = together // (8 * halves)
    sets = -(-eights // most)
    groups = -(-eights // sets)
    row_bytes = 2 * (width + 10) * itemsize  # of a key and a value in threadgroup memory
    tile = next(n for n in (32, 16, 8) if n * row_bytes <= TILE_BYTES)
    written, read = rows * (width + 2) * 4, 2 * keys * width * itemsize
    wanted = min(-(-THREADGROUPS * cores() // (kv_heads * sets)), max(2, read // (SHARE * written)))
    length = max(TILES, -(-keys // (wanted * tile))) * tile
    return Layout(groups, halves, sets, tile, length, -(-keys // length))


class AttentionPlan:
    """A call for arrays of these shapes, settled but for the arrays; a pass's layers share it.

    Arguments as of `cascade_attention`, which are not checked again.
    """

    def __init__(
        self,
        queries: mx.array,
        keys: mx.array | Packed,
        seen: Visibility,
        scale: float,
        way: str = "once",
    ) -> None:
        heads, rows, width = queries.shape[1:]
        stored = keys.words if isinstance(keys, Packed) else keys
        kv_heads, dtype = stored.shape[1], queries.dtype
        bits = _bits(keys, width) if isinstance(keys, Packed) else 0
        group = width // keys.scales.shape[-1] if isinstance(keys, Packed) else 64
        shared = heads // kv_heads * rows
        size = queries.itemsize
        plan = layout(shared, seen.keys - seen.low, kv_heads, width, size, WAYS[way])
        self._attend, self._merge = _prepared(plan, queries.shape, kv_heads, dtype, (bits, group))
        clear, words = max(seen.starts), seen.bits.shape[1] - 1
        sizes = [rows, heads // kv_heads, seen.low, clear, seen.prefix, seen.keys]
        self._settled = [seen.bits, mx.array([*sizes, plan.length, words]), mx.array([scale])]
        self._rows = mx.array([rows])
        self._no_sinks = _no_sinks(max(heads, 8))
        self._pad = 8 - heads  # eight or more are in device memory

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array | Packed,
        values: mx.array | Packed,
        sinks: mx.array | None,
    ) -> mx.array:
        """As `cascade_attention`."""
        scores = self._no_sinks if sinks is None else sinks.astype(mx.float32)
        if sinks is not None and self._pad > 0:
            scores = mx.concatenate([scores, _no_sinks(self._pad)])
        rows: list[Any] = [keys, values]
        if isinstance(keys, Packed):
            rows = [keys[0], values[0], *keys[1:], *values[1:]]
        result, sums = self._attend([queries, *rows, *self._settled, scores])
        if self._merge is None:
            return result
        return self._merge([result, sums, scores, self._rows])[0]


@functools.lru_cache(256)
def _prepared(
    plan: Layout,
    shape: tuple[int, ...],
    kv_heads: int,
    dtype: mx.Dtype,
    packing: tuple[int, int],
) -> tuple[Prepared, Prepared | None]:
    """The launches for queries of this shape; packing: bits, 0 for none, and the group."""
    (_, heads, rows, width), alone, (bits, group) = shape, plan.splits == 1, packing
    partial = shape if alone else (plan.splits, heads * rows, width)
    threads = plan.groups * plan.halves * 32
    launch = Launch(
        grid=(kv_heads * threads, plan.splits, plan.sets),
        threadgroup=(threads, 1, 1),
        output_shapes=(partial, (plan.splits, heads * rows, 2)),
        output_dtypes=(dtype if alone else mx.float32, mx.float32),
        template=(
            *(("T", dtype), ("O", dtype if alone else mx.float32), ("D", width)),
            *(("KEYS", plan.tile), ("BITS", bits), ("GROUP", group)),
        ),
    )
    merge = Launch(
        grid=(32, heads * rows, 1),
        threadgroup=(32, 1, 1),
        output_shapes=(shape,),
        output_dtypes=(dtype,),
        template=(("T", dtype),),
    )
    attend = Prepared(KERNEL if bits else PLAIN, launch)
    return attend, None if alone else Prepared(MERGE, merge)


@functools.cache
def _no_sinks(count: int) -> mx.array:
    return mx.array(np.full(count, -np.inf, np.float32))


def _bits(rows: Packed, width: int) -> int:
    return rows.words.shape[-1] * 32 // width


def check_arguments(
    queries: mx.array,
    keys: mx.array | Packed,
    values: mx.array | Packed,
    seen: Visibility,
    scale: float,
    sinks: mx.array | None = None,
) -> None:
    """Raise ValueError for arguments the kernel does not take."""
    check(may_use_matrices(), "the GPU", "one without safe 8x8 matrices", "an M1 to M4")
    check_array("queries", queries, (1, None, None, None))
    check_choice("the head dim of queries", queries.shape[3], HEAD_DIMS)
    check_range("the rows of queries", queries.shape[2], 1, MAX_ROWS)
    heads, rows, width = queries.shape[1:]
    check(rows == seen.rows, "the rows of local", seen.rows, f"{rows}, those of queries")
    stored = _check_stored("keys", keys, None, queries)
    _check_stored("values", values, keys, queries)
    grouped, limit = heads % stored[1] == 0, f"a multiple of the {stored[1]} of keys"
    check(grouped, "the heads of queries", heads, limit)
    needed = f"{seen.prefix} keys of prefix and {seen.columns} local"
    check(seen.keys <= stored[2], "the cache needed", needed, f"up to {stored[2]} slots")
    check(math.isfinite(scale), "scale", scale, "finite")
    if sinks is not None:
        check_array("sinks", sinks, (heads,))


def _check_stored(
    name: str, rows: mx.array | Packed, like: mx.array | Packed | None, queries: mx.array
) -> tuple[int, ...]:
    """The shape of keys or values, of which the values' must be `like` the keys'."""
    width, dtype = queries.shape[3], queries.dtype
    if not isinstance(rows, Packed):
        check(not isinstance(like, Packed), name, "an array", "packed, as keys are")
        shape = like.shape if isinstance(like, mx.array) else (1, None, None, width)
        check_array(name, rows, shape, (dtype,))
        return rows.shape
    check(like is None or isinstance(like, Packed), name, "packed", "an array, as keys are")
    shapes = [(1, None, None, None)] * 3 if like is None else [part.shape for part in like]
    check_array(f"the words of {name}", rows.words, shapes[0], (mx.uint32,))
    check_choice(f"the bits of {name}", rows.words.shape[3] * 32 // width, BITS)
    groups = [width // group for group in GROUPS if width % group == 0]
    check_array(f"the scales of {name}", rows.scales, shapes[1], (dtype,))
    check_choice(f"the scales of one row of {name}", rows.scales.shape[3], groups)
    same = (*rows.words.shape[:3], rows.scales.shape[3])
    check_array(f"the scales of {name}", rows.scales, same, (dtype,))
    check_array(f"the biases of {name}", rows.biases, same, (dtype,))
    return rows.words.shape


def _case(
    queries: mx.array,
    keys: mx.array | Packed,
    values: mx.array | Packed,
    seen: Visibility,
    *rest: Any,
) -> Case:
    arrays, stored = [queries], []
    for rows in (keys, values):
        stored.append(rows.words if isinstance(rows, Packed) else rows)
        arrays += rows[1:] if isinstance(rows, Packed) else [rows]
    sinks = [array for array in rest[1:] if isinstance(array, mx.array)]
    shape = (queries.shape[1], stored[0].shape[1], queries.shape[3], stored[1].shape[3])
    case = (*shape, bucket(seen.keys), len(sinks))
    return case_of(queries.shape[2], case, [*arrays, *sinks])


def _ways(queries: mx.array, keys: mx.array | Packed, *rest: Any) -> tuple[str, ...]:
    """Those that share rows out otherwise."""
    kv_heads = keys.words.shape[1] if isinstance(keys, Packed) else keys.shape[1]
    shared = queries.shape[1] // kv_heads * queries.shape[2]
    return tuple(WAYS) if shared > WAYS["apart"] else ("once",)


def _copied(
    queries: mx.array, keys: mx.array | Packed, values: mx.array | Packed, *rest: Any
) -> tuple[tuple[Any, ...], list[mx.array]]:
    """The call with keys and values elsewhere in memory."""
    stored = [
        Packed(*(part + 0 for part in rows)) if isinstance(rows, Packed) else rows + 0
        for rows in (keys, values)
    ]
    arrays = [part for rows in stored for part in (rows if isinstance(rows, Packed) else [rows])]
    return (queries, *stored, *rest), arrays


def _tried(
    queries: mx.array, keys: mx.array | Packed, *rest: Any
) -> tuple[str, list[dict[str, int]]]:
    """Every variant of the kernels for this head dim, packing and dtype."""
    width = queries.shape[3]
    bits = _bits(keys, width) if isinstance(keys, Packed) else 0
    same = {"dim": width, "heads": 8, "kv_heads": 2, "kv_bits": bits}
    shapes = ((1, 8), (8, 1000), (32, 1000), (96, 100))
    return f"{width}/{bits}", [{"rows": rows, "prefix": prefix, **same} for rows, prefix in shapes]


def _arguments(draw: Draw) -> tuple[Any, ...]:
    """A tree behind the prefix, with a window for each row in some calls, packed in others."""
    rows, prefix = draw.size("rows", ROWS), draw.size("prefix", PREFIXES)
    dim, kv_heads = draw.size("dim", HEAD_DIMS), draw.size("kv_heads", (1, 2, 3))
    heads = draw.size("heads", [kv_heads * group for group in (1, 2, 4, 8)])
    local = np.eye(rows, dtype=np.bool_)
    for node, parent in enumerate(draw.parents(rows)[1:], start=1):
        local[node] |= local[parent]
    window = draw.chance("window", 0.3)
    first = tuple(draw.rng.randint(0, prefix) for _ in range(rows)) if window else None
    if window and draw.chance("edge", 0.5):  # one row does not see the first key of a tile
        tile = draw.rng.randint(0, max(prefix // 32 - 1, 0)) * 32
        first = (min(tile + 1, prefix), *(0,) * (rows - 1))
    slots = prefix + rows + draw.extra("slack", (0, 1, 200))
    plain = [draw.normal(1, kv_heads, slots, dim) for _ in range(2)]
    group = next((group for group in reversed(GROUPS) if dim % group == 0), 0)
    bits = draw.extra("kv_bits", (0, 0, 4, 8)) if group else 0
    stored: list[Any] = plain
    if bits:
        stored = [Packed(*mx.quantize(rows, group_size=group, bits=bits)) for rows in plain]
    queries = draw.normal(1, heads, rows, dim)
    sinks = draw.normal(heads) if draw.chance("sinks", 0.3) else None
    draw.sizes |= {"window": window, "kv_bits": bits}
    return queries, *stored, Visibility(prefix, local, first), dim**-0.5, sinks


CASCADE_ATTENTION = Operation(
    name="cascade_attention",
    kernel=cascade_attention,
    reference=cascade_attention_reference,
    check=check_arguments,
    case=_case,
    kernels=(KERNEL, PLAIN, MERGE),
    arguments=_arguments,
    defaults={"rows": 16, "prefix": 1000, "heads": 8, "kv_heads": 2, "dim": 64},
    ways=_ways,
    after=lambda out, queries, *rest: (out, *rest),
    copied=_copied,
    tried=_tried,
    variants=[
        {"dim": dim, "kv_bits": bits}
        for dim in HEAD_DIMS
        for bits in (0, *BITS)
        if not bits or any(dim % group == 0 for group in GROUPS)
    ],
)
