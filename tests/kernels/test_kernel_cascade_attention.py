"""cascade_attention: the kernels in the emulator against their reference, and it against NumPy."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal import cascade_attention as module
from kernels_metal import factory, gpu
from kernels_metal.cascade_attention import (
    BITS,
    CASCADE_ATTENTION,
    HEAD_DIMS,
    SHARE,
    TILES,
    WAYS,
    Packed,
    cascade_attention,
    cascade_attention_reference,
    layout,
    unpacked,
)
from kernels_metal.emulator import emulated
from kernels_metal.visibility import Visibility
from support.kernels import (
    against,
    arguments,
    assert_close,
    bytes_read,
    each_is_found,
    exact,
    launches,
    random_calls,
    refused,
)


def sizes(dim, heads, kv_heads, rows, prefix, **features):
    given = {"dim": dim, "heads": heads, "kv_heads": kv_heads, "rows": rows, "prefix": prefix}
    return given | features


def made(dim, heads, kv_heads, rows, prefix, dtype=mx.float32, **features):
    """The arguments of a call behind a causal block; features: window, sinks, slack, kv_bits."""
    given = sizes(dim, heads, kv_heads, rows, prefix, **features)
    return arguments(CASCADE_ATTENTION, dtype, seed=rows, **given)


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
        (_, _, plan), *merge = launches(CASCADE_ATTENTION, *call)
        assert len(merge) == (plan.grid[1] > 1)  # one split is finished without a second launch
        template = dict(plan.template)
        splits.add(plan.grid[1])
        sets.add(plan.grid[2])
        words.add(call[3].bits.shape[1] - 1)
        tiles.add((template["D"], template["KEYS"]))
        bits.add(template["BITS"])
        sunk.add(call[5] is not None)
        assert plan.threadgroup[0] % (64 if template["D"] == 256 else 32) == 0
        assert plan.threadgroup[0] <= 384
    assert {1, 2} < splits and max(splits) > 2  # with no merge, and with one
    assert {1, 2} < sets  # rows in one threadgroup, in two, and in more
    assert words == {1, 2, 3}
    assert sunk == {False, True}
    assert bits == {0, *BITS}
    dims, keys = (set(each) for each in zip(*tiles, strict=True))
    assert dims == set(HEAD_DIMS) and keys == {8, 16, 32}


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


@pytest.mark.parametrize(
    ("rows", "prefix", "features"),
    [
        *((rows, 130, {"slack": 9}) for rows in (1, 16, 64, 65, 96)),
        *((7, 130, {"slack": 9, "kv_bits": bits}) for bits in BITS),
        (4, 1000, {"window": 1}),  # keys that no window reaches are not read
    ],
)
def test_the_prefix_is_read_once_and_packed_for_96_rows_of_a_key_value_head(rows, prefix, features):
    given = made(64, 4, 2, rows, prefix, mx.float16, **features)
    seen = given[3]
    with emulated() as run:
        cascade_attention(*given)
    first = min(seen.starts)
    assert (first > 0) == ("window" in features)
    for name, stored in zip(("keys", "values"), given[1:], strict=False):
        words = stored.words if isinstance(stored, Packed) else stored
        used = words[:, :, first : seen.keys].nbytes * -(-rows * 2 // 96)
        assert bytes_read(run, "cascade_attention", name) == used
    assert words.nbytes == words.shape[1] * words.shape[2] * 64 * features.get("kv_bits", 16) // 8
    result = run.of("cascade_attention")[0].buffers["result"]
    assert result.written == result.size


@pytest.mark.parametrize("keys", [1, 40, 1000, 4096, 32768])
@pytest.mark.parametrize("rows", [1, 4, 32, 128, 129, 768])
@pytest.mark.parametrize("width", HEAD_DIMS)
def test_splits_write_twice_the_results_at_most_or_a_third_of_what_they_read(rows, keys, width):
    for kv_heads in (1, 2, 8):
        found = layout(rows, keys, kv_heads, width, 2)
        written = found.splits * rows * (width + 2) * 4
        assert found.splits <= 2 or written * SHARE <= 2 * keys * width * 2
        assert (found.splits - 1) * found.length < keys <= found.splits * found.length
        assert found.length % found.tile == 0
        assert found.sets * found.groups * 8 >= rows
        assert (found.sets - 1) * found.groups * 8 < rows


# By rows of a key/value head, keys, these heads and width: what 40 cores, an M4 Max, are given
SHARED_OUT = {
    (32, 4096, 8, 128): 256,  # 8 rows of Qwen3-8B
    (64, 4096, 8, 128): 152,
    (128, 4096, 8, 128): 160,
    (32, 1024, 8, 128): 64,
    (48, 4096, 4, 256): 104,  # 8 rows of a hybrid 27B
}


@pytest.mark.parametrize(("shape", "threadgroups"), SHARED_OUT.items(), ids=str)
def test_a_large_gpu_has_no_idle_cores_behind_a_long_prefix(shape, threadgroups):
    rows, keys, kv_heads, width = shape
    found = layout(rows, keys, kv_heads, width, 2)
    assert kv_heads * found.splits * found.sets == threadgroups >= 1.5 * 40
    assert found.length >= TILES * found.tile


@pytest.mark.parametrize(("family", "count"), [("applegpu_g13g", 10), ("applegpu_g15d", 80)])
def test_the_letter_of_a_gpu_tells_its_cores(monkeypatch, family, count):
    monkeypatch.setattr(gpu, "gpu_family", lambda: family)
    monkeypatch.setattr(gpu, "executor", lambda: factory.metal)
    assert gpu.cores() == count
    monkeypatch.setattr(gpu, "gpu_family", lambda: "another")
    assert gpu.cores() == 40


def test_rows_apart_give_the_same_and_read_the_keys_once_for_every_32_of_them():
    call = made(64, 4, 2, 40, 130, mx.float32)  # 80 rows of each key/value head
    with emulated() as run:
        assert_close(cascade_attention(*call, way="apart"), attend(*call))
    keys = run.of("cascade_attention")[0].buffers["keys"]
    assert keys.read == 3 * call[1].nbytes
    assert CASCADE_ATTENTION.ways(*call) == tuple(WAYS)
    assert CASCADE_ATTENTION.ways(*made(64, 4, 2, 16, 130)) == ("once",)


def test_without_safe_matrices_it_is_refused(monkeypatch):
    monkeypatch.setattr(module, "may_use_matrices", lambda: False)
    with refused("the GPU is one without safe 8x8 matrices"):
        cascade_attention(*made(64, 4, 2, 3, 20))


# What each row sees


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


def attending(dim, heads, kv_heads, rows, prefix, stored=None, **features):
    """stored: an order of axes; the slots are then a view of a cache that is stored so."""

    def turned(queries, keys, values, *rest):
        if stored:
            back = np.argsort(stored).tolist()
            keys, values = (
                mx.contiguous(cache.transpose(stored)).transpose(back) for cache in (keys, values)
            )
        return queries, keys, values, *rest

    return against(
        CASCADE_ATTENTION, sizes(dim, heads, kv_heads, rows, prefix, **features), change=turned
    )


BLOCK = attending(64, 4, 2, 9, 70)
MANY_ROWS = attending(64, 1, 1, 65, 70)
WINDOW = attending(64, 2, 1, 4, 600, window=1, sinks=1)
SLICE = attending(64, 2, 2, 3, 40, slack=35, stored=(0, 2, 1, 3))
TURNED = attending(64, 2, 2, 3, 40, slack=35, stored=(0, 1, 3, 2))
PACKED_IN_4 = attending(128, 2, 2, 3, 40, slack=35, kv_bits=4)
WIDE = attending(256, 7, 1, 8, 40)  # two SIMD-groups for every eight rows, two of which are idle
PACKED_IN_8 = attending(96, 2, 2, 3, 40, slack=35, kv_bits=8)


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
        "nobody writes the largest scores": ("if (c == 0 && side", "if (c == 1 && side",
            "unwritten"),
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
    ("cascade_attention", WIDE, {
        "scores of half of the dimensions": ("(group ^ 1) * PAIRS", "group * PAIRS", "result"),
        "both write half of the result": ("const int d = side + i", "const int d = i", "race"),
        "both sides write the sums": ("c == 0 && side == 0", "c == 0", "race"),
        "scores of the neighbour are not waited for": (
            "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    #pragma",
            "    #pragma", "uninitialised or race"),
        "rows behind the last come to no barrier": ("!busy && HALVES == 1", "!busy",
            "divergence"),
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
