"""draft_head: the kernels in the emulator and their reference against NumPy in float64."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.draft_head import DRAFT_HEAD, draft_head, draft_head_reference
from kernels_metal.emulator import emulated
from support.kernels import arguments, bytes_read, each_is_found, exact, refused


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
    """A log-probability is a difference of numbers as large as the normaliser."""
    logits = 4 * mx.random.normal(shape, key=mx.random.key(k))
    ids, logprobs, normal = best(logits, k)
    scale = np.maximum(np.abs(normal), np.abs(logprobs))
    with emulated():
        found = draft_head(logits, k), draft_head_reference(logits, k)
    for head, share in zip(found, (1e-6, 1e-4), strict=True):  # MLX sums one by one
        assert np.array_equal(np.array(head.ids), ids)
        assert np.all(np.abs(exact(head.logprobs) - logprobs) <= share * scale)
        assert np.all(np.abs(exact(head.logsumexp)[:, None] - normal) <= share * np.abs(normal))


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


@pytest.mark.parametrize(
    ("shape", "k", "dtype", "message"),
    [
        ((2, 50), 17, mx.float32, "k is 17, but must be 1 to 16"),
        ((2, 50), 0, mx.float32, "k is 0, but must be 1 to 16"),
        ((2, 5), 6, mx.float32, "k is 6, but must be up to the 5 columns of logits"),
        ((1025, 5), 2, mx.float32, "rows of logits is 1025, but must be 1 to 1024"),
        ((1, 2, 50), 2, mx.float32, r"shape of logits is \[1, 2, 50\], but must be \[any, any\]"),
        ((2, 50), 2, mx.int32, "dtype of logits is int32, but must be float32"),
    ],
)
def test_what_it_refuses(shape, k, dtype, message):
    with refused(message):
        draft_head(mx.zeros(shape, dtype), k)


def drafting():
    """Some logits are equal, so the lower id must win."""
    rng = np.random.default_rng(0)
    rounded = np.round(rng.standard_normal((3, 9000)) * 4).astype(np.float32)
    logits = mx.array(np.concatenate([rounded, np.zeros((1, 9000), np.float32)]))
    head = draft_head(logits, 4)
    ours = np.array(head.ids), exact(head.logprobs), exact(head.logsumexp)[:, None]
    return list(zip(ours, best(logits, 4), strict=True))


# By what is wrong: the source, what becomes of it, and what is found
# fmt: off
test_a_fault_is_found = each_is_found(
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
)
# fmt: on
