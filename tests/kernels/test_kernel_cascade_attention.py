"""cascade_attention: the kernels in the emulator against their reference, and it against NumPy."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.cascade_attention import (
    CASCADE_ATTENTION,
    HEAD_DIMS,
    Visibility,
    cascade_attention,
    cascade_attention_reference,
)
from kernels_metal.emulator import emulated
from support.kernels import (
    DTYPES,
    arguments,
    assert_close,
    bytes_read,
    each_is_found,
    exact,
    faults,
    launches,
    refused,
)


@dataclass(frozen=True)
class Attention:
    """One call: sizes and kinds, from which the arguments are made."""

    dim: int
    heads: int
    kv_heads: int
    rows: int
    prefix: int
    columns: int = 0  # as many as rows
    mask: str = "tree"
    window: bool = False
    sinks: bool = False
    start: int = 0  # of the keys inside a larger cache
    slack: int = 0  # slots behind the last key
    transposed: bool = False  # stored as [slots, heads, D]

    def arguments(self, dtype):
        rng = np.random.default_rng(self.rows * 10_007 + self.prefix)
        seen = self.visibility(rng)
        sizes = {"rows": self.rows, "prefix": self.prefix, "dim": self.dim, "heads": self.heads}
        sizes |= {"kv_heads": self.kv_heads, "sinks": self.sinks}
        sizes["slack"] = self.start + seen.columns + self.slack  # local keys beyond one a row
        made = arguments(CASCADE_ATTENTION, dtype, **sizes)
        slots = slice(self.start, self.start + seen.keys + self.slack)
        caches = [cache[:, :, slots] for cache in made[1:3]]
        if self.transposed:
            caches = [mx.contiguous(cache.swapaxes(1, 2)).swapaxes(1, 2) for cache in caches]
        return made[0], *caches, seen, *made[4:]

    def visibility(self, rng: np.random.Generator) -> Visibility:
        columns = self.columns or self.rows
        first = None
        if self.window:
            low = rng.integers(self.prefix // 2 + 1)
            first = tuple(int(low + rng.integers(self.prefix - low + 1)) for _ in range(self.rows))
        return Visibility(self.prefix, local_mask(self.mask, self.rows, columns, rng), first)


def local_mask(kind: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Which of the local keys each row sees; every row sees at least one."""
    row, column = np.arange(rows)[:, None], np.arange(columns)[None]
    if kind == "all":
        return np.ones((rows, columns), bool)
    if kind == "causal":
        return row >= column
    if kind == "branches":
        return row % columns // 4 == column // 4
    mask = row % columns == column
    for node in range(1, min(rows, columns)):
        mask[node] |= mask[rng.integers(node)]
    return mask


def attend(queries, keys, values, seen: Visibility, scale: float, sinks=None) -> np.ndarray:
    """Softmax attention, one query row at a time."""
    q, k, v = exact(queries)[0], exact(keys)[0], exact(values)[0]
    out = np.zeros_like(q)
    for head in range(q.shape[0]):
        shared = head // (q.shape[0] // k.shape[0])
        for row in range(q.shape[1]):
            prefix = range(seen.starts[row], seen.prefix)
            shown = [*prefix, *(seen.prefix + np.flatnonzero(seen.local[row]))]
            scores = scale * (k[shared, shown] @ q[head, row])
            top = scores.max()
            weights = np.exp(scores - top)
            total = weights.sum()
            if sinks is not None:
                total += np.exp(exact(sinks)[head] - top)
            out[head, row] = weights @ v[shared, shown] / total
    return out[None]


SHAPES = [
    # One row, and prefixes around the tiles of 8, 16 and 32 keys
    Attention(64, 1, 1, 1, 0),
    Attention(64, 2, 1, 1, 1, mask="all"),
    Attention(96, 3, 1, 1, 8, sinks=True),
    Attention(64, 2, 2, 2, 31, window=True),
    Attention(80, 2, 1, 3, 32),
    Attention(96, 4, 2, 5, 33, mask="causal"),
    # Blocks and trees behind longer prefixes: one split, then several
    Attention(64, 4, 1, 9, 64, mask="causal", start=3, slack=7),
    Attention(80, 4, 2, 15, 65, mask="all", sinks=True),
    Attention(96, 2, 2, 16, 100, transposed=True),
    Attention(128, 2, 1, 16, 127, window=True),
    Attention(80, 1, 1, 17, 129, sinks=True, window=True),
    Attention(256, 1, 1, 24, 70, mask="branches"),
    # Local keys that need a second and a third word of bits
    Attention(64, 2, 1, 31, 40),
    Attention(64, 2, 1, 32, 30),
    Attention(80, 2, 2, 33, 20),
    Attention(96, 1, 1, 48, 17, mask="branches", window=True),
    Attention(128, 1, 1, 64, 10, mask="causal"),
    Attention(80, 2, 1, 4, 9, columns=96, mask="branches"),
    # More query rows than the registers of a threadgroup hold: 64, with a head dim of 256 32
    Attention(64, 1, 1, 65, 70),
    Attention(80, 4, 2, 33, 33, mask="causal"),
    Attention(96, 1, 1, 96, 40, sinks=True),
    Attention(256, 1, 1, 33, 9, mask="causal"),
    Attention(256, 4, 1, 9, 17, sinks=True, window=True),
    # Nine or more query heads; more splits than lanes join them
    Attention(64, 9, 3, 2, 300, mask="causal", sinks=True),
    Attention(128, 12, 12, 1, 77, sinks=True),
    Attention(96, 1, 1, 3, 2047, window=True),
    Attention(64, 1, 1, 2, 4500),
    Attention(64, 2, 1, 2, 5000, mask="causal", start=120, slack=136),
]
# Every shape in float32 and one of the half types in turn: those differ in nothing but rounding.
CALLS = [(shape, mx.float32) for shape in SHAPES]
CALLS += [(shape, DTYPES[1 + i % 2]) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize(("shape", "dtype"), CALLS, ids=str)
def test_the_kernels_equal_their_reference(shape, dtype):
    queries, keys, values, seen, scale, sinks = shape.arguments(dtype)
    with emulated():
        result = cascade_attention(queries, keys, values, seen, scale, sinks)
    wide = [None if a is None else a.astype(mx.float32) for a in (queries, keys, values, sinks)]
    assert_close(result, cascade_attention_reference(*wide[:3], seen, scale, wide[3]), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_shapes_lie_on_both_sides_of_every_branch(dtype):
    splits, sets, words, tiles, sunk = (set() for _ in range(5))
    for shape in (shape for shape, of in CALLS if of == dtype):
        *_, seen, _, sinks = given = shape.arguments(dtype)
        plan = launches(CASCADE_ATTENTION, *given)[0].plan
        template = dict(plan.template)
        splits.add(plan.grid[1])
        sets.add(-(-shape.rows * shape.heads // shape.kv_heads // (8 * template["ROWS"])))
        words.add(seen.bits.shape[1] - 1)
        tiles.add((template["D"], template["KEYS"]))
        sunk.add(sinks is not None)
    assert 1 in splits and max(splits) > 32  # more than the lanes of the SIMD-group that joins them
    assert sets == {1, 2}  # rows in one go, and in two
    assert words == {1, 2, 3}
    assert sunk == {False, True}
    assert len(tiles) == len(HEAD_DIMS)


@pytest.mark.parametrize(
    "shape",
    [
        Attention(64, 4, 2, 5, 33),
        Attention(96, 2, 1, 12, 40, window=True, sinks=True),
        Attention(128, 8, 2, 9, 17, columns=40, mask="branches", start=5, slack=3),
        Attention(256, 2, 2, 3, 9, sinks=True, transposed=True),
    ],
)
def test_the_reference_is_a_softmax_over_what_each_row_sees(shape):
    given = shape.arguments(mx.float32)
    assert_close(cascade_attention_reference(*given), attend(*given))


def test_the_reference_is_one_call_of_mlxs_attention_on_views(monkeypatch):
    """So it costs what the library's own call costs."""
    calls = []

    def spy(queries, keys, values, **keywords):
        calls.append((keys.shape, keywords["mask"]))
        return queries

    given = Attention(64, 4, 2, 5, 33, mask="causal").arguments(mx.float16)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", spy)
    cascade_attention_reference(*given)
    assert calls == [((1, 2, 38, 64), "causal")]


def test_hidden_keys_do_not_matter_however_large_their_scores():
    shape = Attention(64, 2, 1, 6, 40, columns=12)
    queries, keys, values, seen, scale, _ = shape.arguments(mx.float32)
    hidden = ~mx.any(seen.mask, axis=0)
    assert hidden.tolist() == [False] * 46 + [True] * 6  # from all rows
    keys = mx.where(hidden[:, None], 100 * queries[:, :1, :1], keys)
    with emulated():
        result = cascade_attention(queries, keys, values, seen, scale)
    assert_close(result, attend(queries, keys, values, seen, scale))


# What is read and written


@pytest.mark.parametrize("rows", [1, 16, 64, 65, 96])
def test_the_prefix_is_read_once_for_all_rows(rows):
    shape = Attention(64, 4, 2, rows, 130, mask="causal", slack=9)
    queries, keys, values, seen, *rest = shape.arguments(mx.float16)
    with emulated() as run:
        cascade_attention(queries, keys, values, seen, *rest)
    used = keys[:, :, : seen.keys].nbytes
    for name in ("keys", "values"):
        assert bytes_read(run, "cascade_attention", name) == used
    partial = run.of("cascade_attention")[0].buffers["partial"]
    assert partial.written == partial.size


def test_keys_that_no_window_reaches_are_not_read():
    queries, keys, *rest = Attention(64, 1, 1, 4, 1000, window=True).arguments(mx.float16)
    seen = rest[1]
    assert min(seen.starts) > 0
    with emulated() as run:
        cascade_attention(queries, keys, *rest)
    used = keys[:, :, min(seen.starts) : seen.keys].nbytes
    assert bytes_read(run, "cascade_attention", "keys") == used


def call(dim=64, heads=4, rows=5, prefix=20, dtype=mx.float32, **changed):
    """With 25 slots, or other arrays."""
    local = np.tri(changed.pop("mask_rows", rows), changed.pop("columns", rows), dtype=bool)
    given = {
        "queries": mx.zeros((1, heads, rows, dim), dtype),
        "keys": mx.zeros((1, 2, 25, dim), dtype),
        "values": mx.zeros((1, 2, 25, dim), dtype),
        "seen": Visibility(prefix, local),
        "scale": 0.1,
    }
    return cascade_attention(**(given | changed))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 72}, "head dim of queries is 72, but must be one of 64, 80, 96, 128, 256"),
        ({"rows": 97}, "rows of local is 97, but must be 1 to 96"),
        ({"mask_rows": 4}, "rows of local is 4, but must be 5, those of queries"),
        ({"prefix": 21}, "21 keys of prefix and 5 local, but must be up to 25 slots"),
        ({"prefix": -1}, "prefix is -1, but must be 0 or more"),
        ({"columns": 1025}, "columns of local is 1025, but must be 1 to 1024"),
        ({"heads": 3}, "heads of queries is 3, but must be a multiple of the 2 of keys"),
        ({"dtype": mx.int32}, "queries is int32, but must be float32 or float16 or bfloat16"),
        ({"keys": mx.zeros((1, 2, 25, 64), mx.float16)}, "dtype of keys is float16, .* float32"),
        ({"values": mx.zeros((1, 2, 24, 64))}, r"of values is \[1, 2, 24, 64\], .* 25, 64\]"),
        ({"keys": mx.zeros((2, 25, 64))}, r"of keys is \[2, 25, 64\], but .* \[1, any, any, 64"),
        ({"sinks": mx.zeros(3)}, r"shape of sinks is \[3\], but must be \[4\]"),
        ({"scale": float("inf")}, "scale is inf, but must be finite"),
    ],
)
def test_what_it_refuses(changes, message):
    with refused(message):
        call(**changes)


def attending(shape: Attention):
    def compare():
        given = shape.arguments(mx.float32)
        return [(exact(cascade_attention(*given)), attend(*given))]

    return compare


TREE = attending(Attention(64, 4, 2, 9, 70))
MANY_ROWS = attending(Attention(64, 1, 1, 65, 70))
WIDE = attending(Attention(256, 2, 1, 5, 20))
WINDOW = attending(Attention(64, 2, 1, 4, 600, window=True, sinks=True))
SLICE = attending(Attention(64, 2, 2, 3, 40, start=5, slack=30, transposed=True))

# By what is wrong: the source, what becomes of it, and what is found
# fmt: off
test_a_fault_is_found = each_is_found(
    *faults("cascade_attention", TREE, {
        "no barrier before the next tile": (
            "tile += KEYS) {\n  threadgroup_barrier(mem_flags::mem_threadgroup);",
            "tile += KEYS) {", "race"),
        "no barrier after the tile is loaded": (
            "  threadgroup_barrier(mem_flags::mem_threadgroup);\n\n  for (int block",
            "  for (int block", "uninitialised"),
        "barrier for the wrong memory": (
            "threadgroup_barrier(mem_flags::mem_threadgroup);\n\n  for (int block",
            "threadgroup_barrier(mem_flags::mem_device);\n\n  for (int block", "race"),
        "barrier of the SIMD-group instead of the threadgroup": (
            "  threadgroup_barrier(mem_flags::mem_threadgroup);\n\n  for (int block",
            "  simdgroup_barrier(mem_flags::mem_threadgroup);\n"
            "\n"
            "  for (int block", "uninitialised"),
        "no barrier between weights and their use": (
            "    simdgroup_barrier(mem_flags::mem_threadgroup);\n\n    for (int k",
            "    for (int k", "uninitialised or race"),
        "a lane stays away from the maximum": ("if (i < count) {\n        float score",
            "if (i < count && lane < 31) {\n        float score", "divergence"),
        "one key too many": ("if (slot < end) {\n      for",
            "if (slot <= end) {\n      for", "bounds"),
        "the sum of weights starts anywhere": ("        total[i] = 0.0f;\n", "", "uninitialised"),
        "nobody writes the largest scores": ("          if (lane == 0) {",
            "          if (lane == 32) {", "unwritten"),
        "a query pointer into threadgroup memory": ("const device T* row",
            "const threadgroup T* row", "address space"),
        "the wrong bit of the mask": (">> (local % 32)", ">> (31 - local % 32)", "result"),
        "the mask of the next row": ("% sizes[0] * (1 + words)",
            "% sizes[0] * words", "result or bounds"),
        "old sums are not scaled": ("total[i] = total[i] * keep +",
            "total[i] = total[i] +", "result"),
    }),
    *faults("cascade_attention", MANY_ROWS, {
        "no barrier before the weights of the next rows": (
            "    simdgroup_barrier(mem_flags::mem_threadgroup);\n\n    if (tile",
            "    if (tile", "race"),
    }),
    *faults("cascade_attention", WINDOW, {
        "two splits write one place": ("(int64_t(split) * threadgroups_per_grid.x + head)",
            "(int64_t(0) + head)", "race"),
        "the window begins one key late": ("slot >= int(visible[seen])",
            "slot > int(visible[seen])", "result"),
    }),
    *faults("cascade_attention", SLICE, {
        "one slot too far in a slice": ("+ slot * keys_strides[2]",
            "+ (slot + 30) * keys_strides[2]", "bounds or result"),
    }),
    *faults("cascade_merge", WINDOW, {
        "one split too many": ("split < splits; ++split", "split <= splits; ++split", "bounds"),
        "sinks do not count": ("simd_sum(total) + exp(sink - top)", "simd_sum(total)", "result"),
    }),
    *faults("cascade_merge", TREE, {
        "half of the head dim is never written": ("d < width; d += 32",
            "d < width / 2; d += 32", "unwritten"),
    }),
    *faults("cascade_attention", WIDE, {
        "a shuffle too few": ("int apart = KEYS;", "int apart = 2 * KEYS;", "result"),
    }),
)
# fmt: on
