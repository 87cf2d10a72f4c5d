"""The gated delta rule along a tree of rows, in one launch that first replays rows of a tape.

A pass leaves a tape: key, decay and delta of every row. Which of its rows stay is known when they
are verified, so the next pass replays these before its own rows: nothing is launched in between,
one state is read and one written a pass, however many branches there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from kernels_metal.checks import check, check_array, check_choice, check_range
from kernels_metal.factory import Kernel, Launch, Prepared
from kernels_metal.operation import Case, Draw, Operation, case_of

KEY_DIMS = (64, 128)
MAX_ROWS = 32  # a lane keeps the delta of one of them
SIMD_GROUPS = 4  # of a threadgroup, a row of the state each
KERNEL = Kernel(
    "gated_delta",
    inputs=(
        *("q", "k", "v", "decays", "beta", "state"),
        *("taped_k", "taped_decays", "taped_deltas", "orders"),
    ),
    outputs=("y", "begun", "deltas"),
)


class DeltaRows(NamedTuple):
    """What the rows of a pass ask of the state.

    q, k: [1, R, key heads, DK], as mlx-lm's `normalize_qk` makes them. v: [1, R, value heads, DV].
    decays: float32 [1, R, value heads]. beta: the same, of v's dtype.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    decays: mx.array
    beta: mx.array


class Taped(NamedTuple):
    """What the rows of an earlier pass did to it, and those of them that stay, in order.

    k: [1, M, key heads, DK]. decays: float32 [1, M, value heads]. deltas: float32 [1, M, value
    heads, DV]. path: rows, each behind its parent.
    """

    k: mx.array
    decays: mx.array
    deltas: mx.array
    path: Sequence[int] = ()


class GatedDelta:
    """A call for rows of this shape, settled but for the arrays."""

    def __init__(self, rows: DeltaRows) -> None:
        (_, count, heads, width), (*_, value_heads, value_width) = rows.k.shape, rows.v.shape
        self._nothing = Taped(rows.k, rows.decays, mx.zeros((1, 1, value_heads, value_width)))
        plan = Launch(
            grid=(32, value_width, value_heads),
            threadgroup=(32, SIMD_GROUPS, 1),
            output_shapes=(
                (1, count, value_heads, value_width),
                (1, value_heads, value_width, width),
                (1, count, value_heads, value_width),
            ),
            output_dtypes=(rows.v.dtype, mx.float32, mx.float32),
            template=(
                ("T", rows.v.dtype),
                *(("DK", width), ("DV", value_width), ("HK", heads), ("HV", value_heads)),
            ),
        )
        self._run = Prepared(KERNEL, plan)

    def __call__(
        self, rows: DeltaRows, state: mx.array, taped: Taped | None, parents: Sequence[int]
    ) -> list[mx.array]:
        """As `gated_delta`."""
        *tape, path = taped or self._nothing
        return self._run([*rows, state, *tape, orders(tuple(path), tuple(parents))])


def gated_delta(
    rows: DeltaRows, state: mx.array, taped: Taped | None, parents: Sequence[int]
) -> list[mx.array]:
    """Y [1, R, value heads, DV], the state behind the taped path, and the deltas of the rows.

    state: float32 [1, value heads, DV, DK]. parents: the row before each row, -1 for the state. DK
    64 or 128, DV a multiple of 4, up to 32 rows. Raises ValueError for other shapes and dtypes.
    """
    check_arguments(rows, state, taped, parents)
    return GatedDelta(rows)(rows, state, taped, parents)


def gated_delta_reference(
    rows: DeltaRows, state: mx.array, taped: Taped | None, parents: Sequence[int]
) -> list[mx.array]:
    """As `gated_delta`, by MLX's own operations, with a state for every row."""
    begun = state if taped is None else replayed(state, taped)
    shared = rows.v.shape[2] // rows.k.shape[2]
    keys, queries = (mx.repeat(x, shared, 2)[0, :, :, None] for x in (rows.k, rows.q))
    states: list[mx.array] = []
    ys, deltas = [], []
    for row, parent in enumerate(parents):
        held = (begun if parent < 0 else states[parent]) * rows.decays[0, row, :, None, None]
        delta = (rows.v[:, row] - (held * keys[row]).sum(-1)) * rows.beta[:, row, :, None]
        states.append(held + keys[row] * delta[..., None])
        ys.append((states[-1] * queries[row]).sum(-1).astype(rows.v.dtype))
        deltas.append(delta)
    return [mx.stack(ys, axis=1), begun, mx.stack(deltas, axis=1)]


def replayed(state: mx.array, taped: Taped) -> mx.array:
    """The state behind the rows that stay, by MLX's own operations."""
    shared = taped.decays.shape[2] // taped.k.shape[2]
    for row in taped.path:
        key = mx.repeat(taped.k[:, row], shared, 1)[:, :, None].astype(mx.float32)
        decay = taped.decays[:, row, :, None, None]
        state = state * decay + key * taped.deltas[:, row, :, :, None]
    return state


@lru_cache(256)
def orders(path: tuple[int, ...], parents: tuple[int, ...]) -> mx.array:
    """What the kernel does one after the other: a walk into the depth, so one state is enough.

    Where a branch begins, its ancestors are done again from the first state.
    """
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(parents):
        children.setdefault(parent, []).append(row)
    walk: list[int] = []
    last, ahead = -1, children[-1][::-1]
    while ahead:
        row = ahead.pop()
        above: list[int] = []
        parent = parents[row]
        while last != parents[row] and parent >= 0:
            above.insert(0, parent)
            parent = parents[parent]
        again = 2 if last != parents[row] else 0
        walk += [4 * node + 1 + (again if i == 0 else 0) for i, node in enumerate(above)]
        walk.append(4 * row + (again if not above else 0))
        last, ahead = row, ahead + children.get(row, [])[::-1]
    made = [len(path), len(walk), *path, *walk]
    return mx.array([*made, *[0] * (8 - len(made))])  # in device memory


def check_arguments(
    rows: DeltaRows, state: mx.array, taped: Taped | None, parents: Sequence[int]
) -> None:
    """Raise ValueError for arguments the kernel does not take."""
    dtype, count = (rows.v.dtype,), rows.k.shape[1]
    check_array("k", rows.k, (1, None, None, None))
    check_range("the rows of k", count, 1, MAX_ROWS)
    check_array("v", rows.v, (1, count, None, None))
    (*_, heads, width), (*_, value_heads, value_width) = rows.k.shape, rows.v.shape
    check_array("k", rows.k, (1, count, None, None), dtype)
    check_array("q", rows.q, (1, count, heads, width), dtype)
    check_array("decays", rows.decays, (1, count, value_heads), (mx.float32,))
    check_array("beta", rows.beta, (1, count, value_heads), dtype)
    check_choice("the head dim of keys", width, KEY_DIMS)
    whole = f"a multiple of {SIMD_GROUPS}"
    check(value_width % SIMD_GROUPS == 0, "the head dim of values", value_width, whole)
    check(value_heads % heads == 0, "the heads of values", value_heads, f"a multiple of {heads}")
    check_array("state", state, (1, value_heads, value_width, width), (mx.float32,))
    known = len(parents) == count and all(-1 <= p < row for row, p in enumerate(parents))
    check(known, "parents", list(parents), f"{count} earlier rows or -1")
    if taped is not None:
        kept = taped.k.shape[1]
        check_array("the tape's k", taped.k, (1, None, heads, width), dtype)
        check_array("its decays", taped.decays, (1, kept, value_heads), (mx.float32,))
        check_array("its deltas", taped.deltas, (1, kept, value_heads, value_width), (mx.float32,))
        check(all(0 <= row < kept for row in taped.path), "its path", taped.path, "rows of it")


def _case(rows: DeltaRows, state: mx.array, *_: Any) -> Case:
    shape = (*rows.k.shape[2:], *rows.v.shape[2:])
    return case_of(rows.k.shape[1], shape, [rows.v])


def _after(out: list[mx.array], rows: DeltaRows, *rest: Any) -> tuple[Any, ...]:
    return rows._replace(v=mx.minimum(rows.v, out[0][:, :1])), *rest


def _rows(draw: Draw, count: int, heads: tuple[int, int], dims: tuple[int, int]) -> DeltaRows:
    (key_heads, value_heads), (width, value_width) = heads, dims
    q, k = (draw.normal(1, count, key_heads, width) / width**power for power in (1, 0.5))
    gates = [draw.normal(1, count, value_heads) for _ in range(2)]
    decays, beta = map(mx.sigmoid, gates)
    v = draw.normal(1, count, value_heads, value_width)
    return DeltaRows(q, k, v, decays.astype(mx.float32), beta)


def _arguments(draw: Draw) -> tuple[Any, ...]:
    heads = draw.size("heads", (1, 2))
    made = partial(
        _rows,
        draw,
        heads=(heads, heads * draw.size("shared", (1, 2, 3))),
        dims=(draw.size("dim", KEY_DIMS), draw.size("value_dim", (4, 12, 64))),
    )
    rows = made(draw.size("rows", (1, 2, 5, 8, 16, 31, 32)))
    parents = draw.parents(rows.k.shape[1])
    before = draw.extra("taped", (0, 1, 4, 16))
    state = mx.random.normal((1, *rows.v.shape[2:], rows.k.shape[3]), key=draw.key())
    if not before:
        return rows, state, None, parents
    earlier = made(before)
    path = [row for row in range(before) if draw.given or draw.rng.random() < 0.7]
    deltas = earlier.v.astype(mx.float32)
    return rows, state, Taped(earlier.k, earlier.decays, deltas, path), parents


def _tried(rows: DeltaRows, *_: Any) -> tuple[str, list[dict[str, int]]]:
    heads, width = rows.k.shape[2:]
    shared, dim = rows.v.shape[2] // heads, rows.v.shape[3]
    sizes = {"heads": heads, "shared": shared, "dim": width, "value_dim": dim}
    words = f"{heads}x{width} keys, {heads * shared}x{dim} values"
    return words, [{**sizes, "rows": 8}, {**sizes, "rows": 3, "taped": 4}]


GATED_DELTA = Operation(
    name="gated_delta",
    kernel=gated_delta,
    reference=gated_delta_reference,
    check=check_arguments,
    case=_case,
    kernels=(KERNEL,),
    arguments=_arguments,
    defaults={"rows": 8, "heads": 2, "shared": 2, "dim": 128, "value_dim": 8},
    compared=lambda out, *args: list(out),
    after=_after,
    tried=_tried,
    variants=[{"dim": dim} for dim in KEY_DIMS],
)
