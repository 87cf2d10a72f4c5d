"""cascade_attention: the kernels in the emulator against their reference, and it against NumPy."""

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
    arguments,
    assert_close,
    bytes_read,
    each_is_found,
    exact,
    launches,
    random_calls,
    refused,
)


def made(dim, heads, kv_heads, rows, prefix, dtype=mx.float32, **features):
    """The arguments of a call behind a causal block; features: window, sinks, slack."""
    sizes = {"dim": dim, "heads": heads, "kv_heads": kv_heads, "rows": rows, "prefix": prefix}
    return arguments(CASCADE_ATTENTION, dtype, seed=rows, **sizes, **features)


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


def test_random_calls_lie_on_both_sides_of_every_branch():
    splits, sets, words, tiles, sunk = (set() for _ in range(5))
    for queries, keys, values, seen, scale, sinks in random_calls(CASCADE_ATTENTION):
        _, _, plan = launches(CASCADE_ATTENTION, queries, keys, values, seen, scale, sinks)[0]
        template = dict(plan.template)
        splits.add(plan.grid[1])
        sets.add(-(-seen.rows * queries.shape[1] // keys.shape[1] // (8 * template["ROWS"])))
        words.add(seen.bits.shape[1] - 1)
        tiles.add((template["D"], template["KEYS"]))
        sunk.add(sinks is not None)
    assert 1 in splits and max(splits) > 32  # more than the lanes of the SIMD-group that joins them
    assert {1, 2} < sets  # rows in one go, in two, and in more
    assert words == {1, 2, 3}
    assert sunk == {False, True}
    assert len(tiles) == 2 * len(HEAD_DIMS) - 1  # of D = 64 the same for float32 and half types


def test_the_reference_is_a_softmax_over_what_each_row_sees():
    kinds = set()
    for call in random_calls(CASCADE_ATTENTION):
        queries, _, _, seen, _, sinks = call
        if queries.dtype == mx.float32 and queries.shape[1] * seen.rows < 100:
            kinds |= {(seen.first is None, sinks is None)}
            assert_close(cascade_attention_reference(*call), attend(*call))
    assert len(kinds) == 4  # with and without windows and sinks


def test_the_reference_is_one_call_of_mlxs_attention_on_views(monkeypatch):
    """So it costs what the library's own call costs."""
    calls = []

    def spy(queries, keys, values, **keywords):
        calls.append((keys.shape, keywords["mask"]))
        return queries

    given = made(64, 4, 2, 5, 33, mx.float16)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", spy)
    cascade_attention_reference(*given)
    assert calls == [((1, 2, 38, 64), "causal")]


def test_hidden_keys_do_not_matter_however_large_their_scores():
    queries, keys, values, _, scale, _ = made(64, 2, 1, 6, 40, slack=6)
    seen = Visibility(40, np.tri(6, 12, dtype=bool))
    keys[:, :, 46:] = 100 * queries[:, :1, :1]  # hidden from all rows
    with emulated():
        result = cascade_attention(queries, keys, values, seen, scale)
    assert_close(result, attend(queries, keys, values, seen, scale))


# What is read and written


@pytest.mark.parametrize("rows", [1, 16, 64, 65, 96])
def test_the_prefix_is_read_once_for_all_rows(rows):
    queries, keys, values, seen, *rest = made(64, 4, 2, rows, 130, mx.float16, slack=9)
    with emulated() as run:
        cascade_attention(queries, keys, values, seen, *rest)
    used = keys[:, :, : seen.keys].nbytes
    for name in ("keys", "values"):
        assert bytes_read(run, "cascade_attention", name) == used
    partial = run.of("cascade_attention")[0].buffers["partial"]
    assert partial.written == partial.size


def test_keys_that_no_window_reaches_are_not_read():
    queries, keys, values, seen, *rest = made(64, 1, 1, 4, 1000, mx.float16, window=1)
    assert min(seen.starts) > 0
    with emulated() as run:
        cascade_attention(queries, keys, values, seen, *rest)
    used = keys[:, :, min(seen.starts) : seen.keys].nbytes
    assert bytes_read(run, "cascade_attention", "keys") == used


# What each row sees: its mask, its bits, and what is refused


def test_visibility_takes_the_cheapest_mask_that_says_the_same():
    everything, causal = np.ones((3, 3), bool), np.tri(3, dtype=bool)
    assert Visibility(5, everything).mask is None
    assert Visibility(5, causal).mask == "causal"
    wider = np.tri(3, 4, dtype=bool)  # MLX would align its last column with the last row
    assert Visibility(5, wider).mask.tolist() == np.hstack([np.ones((3, 5), bool), wider]).tolist()
    windowed = Visibility(2, causal, (0, 1, 2)).mask.tolist()
    assert windowed[2] == [False, False, True, True, True]


def test_bits_hold_the_first_key_and_one_bit_for_each_local_key():
    local = np.zeros((2, 40), bool)
    local[0, [0, 5, 31]] = local[1, [32, 39]] = True
    bits = Visibility(9, local, (4, 0)).bits
    assert bits.shape == (8, 3)
    assert bits[:2].tolist() == [[4, 1 | 1 << 5 | 1 << 31, 0], [0, 0, 1 | 1 << 7]]


@pytest.mark.parametrize(
    ("local", "first", "message"),
    [
        (np.ones((2, 2), np.int32), None, r"local is int32 \[2, 2\], but must be bool \[R, N\]"),
        (np.ones(3, bool), None, r"local is bool \[3\], but must be bool \[R, N\]"),
        (np.ones((2, 2), bool), (0,), "length of first is 1, but must be 2"),
        (np.ones((2, 2), bool), (0, 11), r"first\[1\] is 11, but must be 0 to 10"),
        (np.zeros((2, 2), bool), (0, 10), r"local\[1\] is all False, .* nothing"),
    ],
)
def test_visibility_refuses(local, first, message):
    with refused(message):
        Visibility(10, local, first)


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


def attending(*sizes, transposed=False, **features):
    def compare():
        queries, keys, values, *rest = made(*sizes, **features)
        if transposed:  # the first slots of a cache that is stored as [slots, heads, D]
            keys, values = (
                mx.contiguous(cache.swapaxes(1, 2)).swapaxes(1, 2) for cache in (keys, values)
            )
        given = queries, keys, values, *rest
        return [(exact(cascade_attention(*given)), attend(*given))]

    return compare


BLOCK = attending(64, 4, 2, 9, 70)
MANY_ROWS = attending(64, 1, 1, 65, 70)
WIDE = attending(256, 2, 1, 5, 20)
WINDOW = attending(64, 2, 1, 4, 600, window=1, sinks=1)
SLICE = attending(64, 2, 2, 3, 40, slack=35, transposed=True)

# By what is wrong: the source, what becomes of it, and what is found
# fmt: off
test_a_fault_is_found = each_is_found(
    ("cascade_attention", BLOCK, {
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
    ("cascade_attention", MANY_ROWS, {
        "no barrier before the weights of the next rows": (
            "    simdgroup_barrier(mem_flags::mem_threadgroup);\n\n    if (tile",
            "    if (tile", "race"),
    }),
    ("cascade_attention", WINDOW, {
        "two splits write one place": ("(int64_t(split) * threadgroups_per_grid.x + head)",
            "(int64_t(0) + head)", "race"),
        "the window begins one key late": ("slot >= int(visible[seen])",
            "slot > int(visible[seen])", "result"),
    }),
    ("cascade_attention", SLICE, {
        "one slot too far in a slice": ("+ slot * keys_strides[2]",
            "+ (slot + 30) * keys_strides[2]", "bounds or result"),
    }),
    ("cascade_merge", WINDOW, {
        "one split too many": ("split < splits; ++split", "split <= splits; ++split", "bounds"),
        "sinks do not count": ("simd_sum(total) + exp(sink - top)", "simd_sum(total)", "result"),
    }),
    ("cascade_merge", BLOCK, {
        "half of the head dim is never written": ("d < width; d += 32",
            "d < width / 2; d += 32", "unwritten"),
    }),
    ("cascade_attention", WIDE, {
        "a shuffle too few": ("int apart = KEYS;", "int apart = 2 * KEYS;", "result"),
    }),
)
# fmt: on
