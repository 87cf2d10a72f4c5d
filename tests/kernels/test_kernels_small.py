"""The smaller kernels in the emulator, and their references, against NumPy and loops of Python."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.cache_commit import CACHE_COMMIT, accepted_rows_reference, cache_commit
from kernels_metal.checks import FLOATS
from kernels_metal.draft_head import DRAFT_HEAD, draft_head, draft_head_reference
from kernels_metal.emulator import emulated
from kernels_metal.norm_rope import (
    HEAD_DIMS,
    NORM_ROPE,
    HeadNorm,
    norm_rope,
    norm_rope_reference,
    padded,
)
from support.kernels import (
    against,
    arguments,
    assert_close,
    bytes_read,
    each_is_found,
    exact,
    launches,
)

# cache_commit


def test_committed_rows_stand_behind_each_other():
    keys, values = (mx.random.normal((1, 2, 30, 8), key=mx.random.key(i)) for i in range(2))
    ours, rows = [mx.array(keys), mx.array(values)], np.array(keys)[:, :, [10, 12, 13, 17]]
    assert np.array_equal(accepted_rows_reference(ours, [0, 2, 3, 7], [10, 10])[0], rows)
    with emulated():
        cache_commit(ours, [0, 2, 3, 7], [10, 10])
    assert np.array_equal(np.array(ours[0])[:, :, 10:14], rows)
    assert mx.array_equal(ours[1][:, :, 10:14], values[:, :, mx.array([10, 12, 13, 17])])


def test_a_leading_run_of_rows_moves_nothing():
    def gather(*arguments):
        raise AssertionError("gathered")

    caches = [mx.zeros((1, 1, 4, 2))]
    cache_commit(caches, [0, 1, 2], [1], gather)
    with pytest.raises(AssertionError, match="gathered"):
        cache_commit(caches, [0, 2], [1], gather)


def test_eight_caches_take_one_launch():
    assert len(launches(CACHE_COMMIT, *arguments(CACHE_COMMIT, caches=16))) == 2


def strided(*_):
    """Two launches; unequal caches, each every second number of one stored as [slots, heads, D]."""
    shapes = [(1, 20 + i, 2 + i % 3, 16 + i) for i in range(9)]
    stored = [mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes)]
    caches = [cache.swapaxes(1, 2)[..., ::2] for cache in stored]
    return caches, [0, 2, 5, 9, 10], [i % 9 + 1 for i in range(9)]


# draft_head


def best(logits: mx.array, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids and log-probabilities of the k likeliest, the lower id first, and the log of the sum."""
    values = exact(logits)
    ids = np.argsort(-values, axis=1, kind="stable")[:, :k]
    top = values.max(axis=1, keepdims=True)
    normal = np.log(np.exp(values - top).sum(axis=1, keepdims=True)) + top
    return ids, np.take_along_axis(values, ids, axis=1) - normal, normal


@pytest.mark.parametrize(
    ("shape", "k"),
    [
        ((96, 3), 3),
        ((1, 1), 1),
        ((7, 31), 4),
        ((1, 8192), 4),
        ((3, 8193), 16),
        ((2, 16_385), 5),
        ((1, 270_001), 4),  # in longer parts: 32 are the most
    ],
)
def test_kernel_and_reference_sort_and_normalise(shape, k):
    """A log-probability is a difference of numbers as large as the normaliser.

    The kernel's exponentials and logarithms are fast ones, 1e-6 off.
    """
    logits = 4 * mx.random.normal(shape, key=mx.random.key(k))
    ids, logprobs, normal = best(logits, k)
    whole = np.maximum(np.abs(normal), 1)
    scale = np.maximum(whole, np.abs(logprobs))
    with emulated():
        found = draft_head(logits, k), draft_head_reference(logits, k)
    for head, share in zip(found, (3e-6, 1e-4), strict=True):  # MLX sums one by one
        assert np.array_equal(np.array(head.ids), ids)
        assert np.all(np.abs(exact(head.logprobs) - logprobs) <= share * scale)
        assert np.all(np.abs(exact(head.logsumexp)[:, None] - normal) <= share * whole)


def test_equal_logits_and_logits_of_minus_infinity_are_in_order_of_their_ids():
    rng = np.random.default_rng(0)
    few = mx.array(rng.integers(0, 3, (4, 9000)).astype(np.float32))
    banned = mx.where(mx.array(rng.random((3, 300)) < 0.98), -mx.inf, few[:3, :300])
    for logits in (few, banned):
        with emulated():
            head = draft_head(logits, 16)
        ids, logprobs, _ = best(logits, 16)
        assert np.array_equal(np.array(head.ids), ids)
        assert np.allclose(np.array(head.logprobs), logprobs)
    assert np.isneginf(logprobs).any() and np.isfinite(logprobs).any()


def test_each_logit_is_read_once():
    logits, k = arguments(DRAFT_HEAD, mx.float16, rows=5, vocabulary=20_000)
    with emulated() as run:
        draft_head(logits, k)
    assert bytes_read(run, "draft_head", "logits") == logits.nbytes


def drafting():
    """Some logits are equal, so the lower id must win."""
    rng = np.random.default_rng(0)
    rounded = np.round(rng.standard_normal((3, 9000)) * 4).astype(np.float32)
    logits = mx.array(np.concatenate([rounded, np.zeros((1, 9000), np.float32)]))
    head = draft_head(logits, 4)
    ours = np.array(head.ids), exact(head.logprobs), exact(head.logsumexp)[:, None]
    return list(zip(ours, best(logits, 4), strict=True))


# norm_rope


def turned(x: mx.array, positions: mx.array, weight: mx.array, norm: HeadNorm, step: int):
    """[1, heads, R, D]: normed, weighted and turned head by head."""
    half = norm.periods.size
    heads = exact(x)[0].reshape(x.shape[1], -1, step)[..., : weight.size]
    mean = (heads**2).mean(axis=-1, keepdims=True)
    normed = heads / np.sqrt(mean + norm.epsilon) * exact(weight)
    a, b, rest = np.split(normed, [half, 2 * half], axis=-1)
    angles = np.array(positions)[:, None, None] / exact(norm.periods)
    c, s = np.cos(angles), np.sin(angles)
    return np.concatenate([a * c - b * s, a * s + b * c, rest], axis=-1).swapaxes(0, 1)[None]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("how", [{}, {"together": 1}, {"together": 1, "gated": 1, "partial": 1}])
def test_kernel_and_reference_norm_and_turn_every_head_as_numpy_does(dim, how, dtype):
    *sides, _, norm = arguments(NORM_ROPE, dtype, dim=dim, rows=5, heads=4, **how)
    assert sides[0].shape == (1, 5, 4 * dim * (1 + norm.gated))
    given = *sides, mx.array([50, 51, 51, 52, 51]), norm  # of a tree's rows
    with emulated():
        both = zip(norm_rope(*given), norm_rope_reference(*given), strict=True)
    steps = norm.step, dim
    for (kernel, reference), x, weight, step in zip(both, sides, norm[:2], steps, strict=True):
        assert_close(kernel, turned(x, given[2], weight, norm, step), dtype)
        assert mx.abs(reference - kernel).max().item() <= {4: 1e-4, 2: 0.04}[dtype.size]


def test_everything_is_read_and_written_once_but_the_weights_once_for_each_head():
    given = arguments(NORM_ROPE, mx.float16, rows=8, dim=128, heads=8, kv_heads=2, together=1)
    with emulated() as run:
        norm_rope(*given)
    for name, array in zip(("queries", "keys"), given, strict=False):
        assert bytes_read(run, "norm_rope", name) == array.nbytes
        out = run.counters[0].buffers[f"turned_{name}"]
        assert out.written == out.size == array.nbytes
    assert bytes_read(run, "norm_rope", "query_weight") == 8 * 8 * 128 * 2


def test_few_positions_are_padded_and_many_are_not():
    assert padded(mx.array([3, 4])).tolist() == [3, 4, 0, 0, 0, 0, 0, 0]
    nine = mx.arange(9)
    assert padded(nine) is nine


COMMITTING = against(CACHE_COMMIT, {}, change=strided)
SIZES = {"rows": 3, "dim": 80, "heads": 2, "kv_heads": 1, "together": 1, "first": 9}
TURNING = against(NORM_ROPE, SIZES, {**SIZES, "gated": 1, "partial": 1})


# By what is wrong: the source, what becomes of it, and what is found
# fmt: off
test_a_fault_is_found = each_is_found(
    ("cache_commit", COMMITTING, {
        "one thread too many": ("if (element >= heads", "if (element > heads", "bounds"),
        "one thread too few": ("if (element >= heads * rows * width)",
            "if (element + 1 >= heads * rows * width)", "unwritten"),
        "a cache is written": (
            "    rows0[element] =\n        cache0[",
            "    rows0[element] = 0; ((device float*)cache0)[0] = 0 * \n"
            "        cache0[", "read-only"),
        "the path begins at slot 0": ("sizes[cache * 4 + 2] + path", "path", "result"),
    }),
    ("draft_head", drafting, {
        "no barrier between the groups' best and the choice": (
            "threadgroup_barrier(mem_flags::mem_threadgroup);\n", "", "uninitialised or race"),
        "every lane writes the group's peak": ("if (lane == 0) {\n  group_sums[group * 2] = ",
            "if (true) {\n  group_sums[group * 2] = ", "race"),
        "the threads of other groups skip the barrier": (
            "threadgroup_barrier(mem_flags::mem_threadgroup);\n",
            "if (group < 7) { threadgroup_barrier(mem_flags::mem_threadgroup); }\n", "divergence"),
        "one token too many": ("const int end = min(begin + sizes[0], vocabulary);",
            "const int end = begin + sizes[0];", "bounds or result"),
        "lists too short": ("group_values[SIMD_GROUPS * TOP]",
            "group_values[SIMD_GROUPS * TOP - 1]", "bounds"),
    }),
    ("draft_head_merge", drafting, {
        "idle lanes leave before the SIMD-group's sum": ("float peak = -INFINITY;",
            "if (lane >= parts) return;\nfloat peak = -INFINITY;", "divergence"),
        "a peak without a value": ("float peak = -INFINITY;", "float peak;", "uninitialised"),
        "parts are added without scaling": ("total * rescale(peak, row_peak)", "total", "result"),
    }),
    ("top_k", drafting, {
        "a list starts anywhere": ("    values[i] = -INFINITY;\n", "", "result or uninitialised"),
        "a pointer without address space": ("inline void clear_list(thread float* values",
            "inline void clear_list(float* values", "lint"),
        "of equal logits the last wins": ("value == values[i] && id < ids[i]",
            "value == values[i] && id > ids[i]", "result"),
    }),
    ("norm_rope", TURNING, {
        "rows as if nothing stood between them": ("row * queries_strides[1]",
            "row * HEADS * D", "bounds or result"),
        "keys are read as queries": (": keys + row * keys_strides[1]",
            ": queries + row * keys_strides[1]", "result"),
        "heads of keys are counted with the queries'": ("(is_query ? 0 : HEADS)", "0",
            "bounds or race"),
        "only the first lanes add up": ("rsqrt(simd_sum(squares)",
            "rsqrt((lane < 16 ? simd_sum(squares) : 0.0f)", "divergence"),
        "a pair behind the last": ("if (at < HALF) {\n    const", "if (at <= HALF) {\n    const",
            "bounds or race or result"),
        "what stays is turned": ("if (at < TURNED)", "if (at < HALF)", "bounds or result"),
        "gates are read as queries": ("head * STEP", "head * D", "result"),
        "halves of the whole head": ("at < TURNED ? TURNED : HALF - TURNED", "HALF - TURNED",
            "bounds or race or result"),
        "the lane's second pair is left out": ("(HALF + 31) / 32", "HALF / 32", "unwritten"),
        "the norm is that of half a head": ("squares += pairs[i][0] * pairs[i][0] + ",
            "squares += ", "result"),
        "no weight": (" * float(weight[first])", "", "result"),
        "turned backwards": ("a * c - b * s", "a * c + b * s", "result"),
        "every row at the first's position": ("positions[row]", "positions[0]", "result"),
        "an epsilon of its own": ("+ epsilon[0]", "+ 1.0f", "result"),
    }),
)
# fmt: on
