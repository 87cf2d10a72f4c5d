"""cascade_attention: the kernels in the emulator against their reference, and it against NumPy."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal import cascade_attention as module
from kernels_metal.cascade_attention import (
    BITS,
    CASCADE_ATTENTION,
    HEAD_DIMS,
    SHARE,
    WAYS,
    AttentionPlan,
    Packed,
    cascade_attention,
    cascade_attention_reference,
    layout,
    unpacked,
)
from kernels_metal.emulator import emulated
from kernels_metal.factory import executing
from kernels_metal.visibility import Visibility
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
    """The arguments of a call behind a causal block; features: window, sinks, slack, kv_bits."""
    sizes = {"dim": dim, "heads": heads, "kv_heads": kv_heads, "rows": rows, "prefix": prefix}
    return arguments(CASCADE_ATTENTION, dtype, seed=rows, **sizes, **features)


def attend(queries, keys, values, seen: Visibility, scale: float, sinks=None) -> np.ndarray:
    """Softmax attention, one query row at a time."""
    width = queries.shape[-1]
    keys, values = (unpacked(a, width) if isinstance(a, Packed) else a for a in (keys, values))
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
    splits, sets, words, tiles, sunk, bits = (set() for _ in range(6))
    for call in random_calls(CASCADE_ATTENTION):
        plan = launches(CASCADE_ATTENTION, *call)[0][2]
        template = dict(plan.template)
        splits.add(plan.grid[1])
        sets.add(plan.grid[2])
        words.add(call[3].bits.shape[1] - 1)
        tiles.add((template["D"], template["KEYS"]))
        bits.add(template["BITS"])
        sunk.add(call[5] is not None)
    assert {1, 2} < splits and max(splits) > 2  # with no merge, and with one
    assert {1, 2} < sets  # rows in one threadgroup, in two, and in more
    assert words == {1, 2, 3}
    assert sunk == {False, True}
    assert bits == {0, *BITS}
    assert {dim for dim, _ in tiles} == set(HEAD_DIMS) and {keys for _, keys in tiles} == {
        8,
        16,
        32,
    }


def test_the_reference_is_a_softmax_over_what_each_row_sees():
    kinds = set()
    for call in [*random_calls(CASCADE_ATTENTION), made(64, 4, 2, 5, 33, window=1, sinks=1)]:
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
def test_the_prefix_is_read_once_for_128_rows_of_a_key_value_head(rows):
    queries, keys, values, seen, *rest = made(64, 4, 2, rows, 130, mx.float16, slack=9)
    with emulated() as run:
        cascade_attention(queries, keys, values, seen, *rest)
    used = keys[:, :, : seen.keys].nbytes * -(-rows * 2 // 128)
    for name in ("keys", "values"):
        assert bytes_read(run, "cascade_attention", name) == used
    result = run.of("cascade_attention")[0].buffers["result"]
    assert result.written == result.size


@pytest.mark.parametrize("bits", BITS)
def test_packed_keys_and_values_are_read_packed_and_once(bits):
    queries, keys, values, *rest = made(64, 4, 2, 7, 130, mx.float16, slack=9, kv_bits=bits)
    with emulated() as run:
        cascade_attention(queries, keys, values, *rest)
    for name, rows in (("keys", keys), ("values", values)):
        assert bytes_read(run, "cascade_attention", name) == rows.words[:, :, :137].nbytes
    assert keys.words.nbytes == keys.words.shape[1] * keys.words.shape[2] * 64 * bits // 8


def test_behind_4096_keys_32_rows_of_four_heads_read_them_once_and_write_no_third_split():
    """Qwen3-4B's shape, by the plan alone: 8 key/value heads, 4 query heads for each."""
    found = layout(rows=4 * 32, keys=4096 + 32, kv_heads=8, width=128, itemsize=2)
    assert (found.sets, found.splits) == (1, 2)
    assert found.groups * 8 == 4 * 32


@pytest.mark.parametrize("keys", [1, 40, 1000, 4096, 32768])
@pytest.mark.parametrize("rows", [1, 4, 32, 128, 129, 768])
@pytest.mark.parametrize("width", HEAD_DIMS)
def test_splits_write_twice_the_results_at_most_or_a_sixteenth_of_what_they_read(rows, keys, width):
    for kv_heads in (1, 2, 8):
        found = layout(rows, keys, kv_heads, width, 2)
        written = found.splits * rows * (width + 2) * 4
        assert found.splits <= 2 or written * SHARE <= 2 * keys * width * 2
        assert (found.splits - 1) * found.length < keys <= found.splits * found.length
        assert found.length % found.tile == 0
        assert found.sets * found.groups * 8 >= rows
        assert (found.sets - 1) * found.groups * 8 < rows


def test_rows_apart_give_the_same_and_read_the_keys_once_for_every_32_of_them():
    call = made(64, 4, 2, 40, 130, mx.float32)  # 80 rows of each key/value head
    with emulated() as run:
        assert_close(cascade_attention(*call, way="apart"), attend(*call))
    keys = run.of("cascade_attention")[0].buffers["keys"]
    assert keys.read == 3 * call[1].nbytes
    assert CASCADE_ATTENTION.ways(*call) == tuple(WAYS)
    assert CASCADE_ATTENTION.ways(*made(64, 4, 2, 16, 130)) == ("once",)


def test_one_split_is_finished_without_a_second_launch():
    for sinks in (False, True):
        call = made(64, 4, 2, 3, 20, sinks=sinks)
        assert [kernel.name for kernel, _, _ in launches(CASCADE_ATTENTION, *call)] == [
            "cascade_attention"
        ]
        with emulated():
            assert_close(cascade_attention(*call), attend(*call))


def test_a_plan_serves_every_layer_of_its_shapes():
    queries, keys, values, seen, scale, _ = made(64, 4, 2, 3, 20)
    plan = AttentionPlan(queries, keys, seen, scale)
    with emulated():
        for layer in range(3):
            ours = plan(queries, keys + layer, values, None)
            assert mx.array_equal(
                ours, cascade_attention(queries, keys + layer, values, seen, scale)
            )


def test_a_layer_after_the_first_makes_no_array_and_no_launch(monkeypatch):
    queries, keys, values, seen, scale, _ = made(64, 4, 2, 3, 20)
    given = []

    def record(kernel, inputs, plan):
        given.append((inputs, plan))
        return [mx.zeros(shape) for shape in plan.output_shapes]

    with executing(record):
        planned = AttentionPlan(queries, keys, seen, scale)
        planned(queries, keys, values, None)
        for name in ("layout", "Launch", "Prepared"):
            monkeypatch.setattr(module, name, None)
        planned(queries, keys, values, None)
    (first, plan), (second, again) = given
    assert plan is again and all(a is b for a, b in zip(first, second, strict=True))


def test_without_safe_matrices_it_is_refused(monkeypatch):
    monkeypatch.setattr(module, "may_use_matrices", lambda: False)
    with refused("the GPU is one without safe 8x8 matrices"):
        cascade_attention(*made(64, 4, 2, 3, 20))


def test_keys_that_no_window_reaches_are_not_read():
    queries, keys, values, seen, *rest = made(64, 1, 1, 4, 1000, mx.float16, window=1)
    assert min(seen.starts) > 0
    with emulated() as run:
        cascade_attention(queries, keys, values, seen, *rest)
    used = keys[:, :, min(seen.starts) : seen.keys].nbytes
    assert bytes_read(run, "cascade_attention", "keys") == used


# What is refused


PACKED = Packed(*mx.quantize(mx.zeros((1, 2, 25, 64)), group_size=64, bits=4))


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
        ({"keys": PACKED}, "values is an array, but must be packed, as keys are"),
        ({"values": PACKED}, "values is packed, but must be an array, as keys are"),
        ({"keys": PACKED._replace(words=PACKED.words[..., :6])}, "bits of keys is 3, .* 4, 8"),
        (
            {"keys": PACKED, "values": PACKED._replace(biases=PACKED.scales[..., :0])},
            r"biases of values is \[1, 2, 25, 0\], but must be \[1, 2, 25, 1\]",
        ),
    ],
)
def test_what_it_refuses(changes, message):
    with refused(message):
        call(**changes)


def attending(*sizes, stored=None, **features):
    """stored: an order of axes; the slots are then a view of a cache that is stored so."""

    def compare():
        queries, keys, values, *rest = made(*sizes, **features)
        if stored:
            back = np.argsort(stored).tolist()
            keys, values = (
                mx.contiguous(cache.transpose(stored)).transpose(back) for cache in (keys, values)
            )
        given = queries, keys, values, *rest
        return [(exact(cascade_attention(*given)), attend(*given))]

    return compare


BLOCK = attending(64, 4, 2, 9, 70)
MANY_ROWS = attending(64, 1, 1, 65, 70)
WIDE = attending(256, 2, 1, 5, 20)
ODD = attending(80, 2, 1, 5, 40)
WINDOW = attending(64, 2, 1, 4, 600, window=1, sinks=1)
SLICE = attending(64, 2, 2, 3, 40, slack=35, stored=(0, 2, 1, 3))
TURNED = attending(64, 2, 2, 3, 40, slack=35, stored=(0, 1, 3, 2))
PACKED_IN_4 = attending(128, 2, 2, 3, 40, slack=35, kv_bits=4)
PACKED_IN_8 = attending(96, 2, 2, 3, 40, slack=35, kv_bits=8)


@pytest.mark.parametrize("run", [SLICE, TURNED, ODD, WIDE, PACKED_IN_4, PACKED_IN_8])
def test_caches_of_any_order_width_and_packing_are_read_right(run):
    with emulated():
        for ours, wanted in run():
            np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4)


# By what is wrong: the source, what becomes of it, and what is found
# fmt: off
test_a_fault_is_found = each_is_found(
    ("cascade_attention", BLOCK, {
        "no barrier before the next tile": (
            "tile += KEYS) {\n  threadgroup_barrier(mem_flags::mem_threadgroup);",
            "tile += KEYS) {", "race"),
        "no barrier after the tile is loaded": (
            "  threadgroup_barrier(mem_flags::mem_threadgroup);\n  if (!busy",
            "  if (!busy", "uninitialised or race"),
        "barrier for the wrong memory": (
            "threadgroup_barrier(mem_flags::mem_threadgroup);\n  if (!busy",
            "threadgroup_barrier(mem_flags::mem_device);\n  if (!busy", "race"),
        "barrier of the SIMD-group instead of the threadgroup": (
            "  threadgroup_barrier(mem_flags::mem_threadgroup);\n  if (!busy",
            "  simdgroup_barrier(mem_flags::mem_threadgroup);\n  if (!busy",
            "uninitialised or race"),
        "a lane stays away from the maximum": (
            "  top = max(top, simd_shuffle_xor(top, 1));\n",
            "  if (lane < 31) {\n    top = max(top, simd_shuffle_xor(top, 1));\n  }\n",
            "divergence"),
        "half of the keys do not count for the maximum": (
            "  top = max(top, simd_shuffle_xor(top, 8));\n", "", "result"),
        "half of the keys do not count for the sum": (
            "total += simd_shuffle_xor(total, 8);\n", "", "result"),
        "one key too many": ("slot < end) {\n      if (BITS",
            "slot <= end) {\n      if (BITS", "bounds"),
        "the sum of weights starts anywhere": ("float total = 0.0f;\n", "float total;\n",
            "uninitialised"),
        "nobody writes the largest scores": ("  if (c == 0) {", "  if (c == 1) {", "unwritten"),
        "a key pointer into device memory": ("const threadgroup T* from",
            "const device T* from", "address space"),
        "the wrong bit of the mask": (">> (local % 32)", ">> (31 - local % 32)", "result"),
        "the mask of the next row": ("row % sizes[0] * (1 + words)",
            "row % sizes[0] * words", "result or bounds"),
        "old sums are not scaled": ("  total *= keep;\n", "", "result"),
        "keys behind the last are seen": ("tile + KEYS > min(prefix, end)",
            "tile + KEYS > end + KEYS", "result"),
        "dimensions of queries in another order": ("b * BLOCK + STEPS * c + i;",
            "b * BLOCK + STEPS * (6 - c) + i;", "result"),
    }),
    ("cascade_attention", MANY_ROWS, {
        "a row behind the last is written": ("if (first + r < rows)",
            "if (first + r <= rows)", "race or bounds"),
    }),
    ("cascade_attention", WINDOW, {
        "two splits write one place": ("(int64_t(split) * threadgroups_per_grid.x + head)",
            "(int64_t(0) + head)", "race"),
        "the window begins one key late": ("slot >= window", "slot > window", "result"),
        "windows count in the last tiles only": ("if (tile < clear || ", "if (", "result"),
    }),
    ("cascade_attention", SLICE, {
        "one slot too far in a slice": ("+ slot * keys_strides[2]",
            "+ (slot + 30) * keys_strides[2]", "bounds or result"),
    }),
    ("cascade_attention", TURNED, {
        "numbers of a key that lie apart are read in a run": ("if (runs)", "if (true)",
            "bounds or result or alignment"),
    }),
    ("cascade_attention", PACKED_IN_4, {
        "the first number of a word eight times": ("packed = packed >> BITS;", "", "result"),
        "the scale of the first group for all": ("eight * 8 / GROUP * key_scales_strides[3]",
            "0 * key_scales_strides[3]", "result"),
    }),
    ("cascade_attention", PACKED_IN_8, {
        "the first word of two twice": ("(eight * 8 + i) * BITS / 32", "eight * 8 * BITS / 32",
            "result"),
    }),
    ("cascade_merge", WINDOW, {
        "one split too many": ("split < splits; ++split", "split <= splits; ++split", "bounds"),
        "sinks do not count": ("simd_sum(total) + exp2(sink - top)", "simd_sum(total)", "result"),
    }),
    ("cascade_merge", WINDOW, {
        "half of the head dim is never written": ("d < width; d += 32",
            "d < width / 2; d += 32", "unwritten"),
    }),
)
# fmt: on
