"""draft_head: the kernels in the emulator and their reference against NumPy in float64."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.draft_head import DRAFT_HEAD, draft_head, draft_head_reference
from kernels_metal.emulator import emulated
from support.kernels import (
    DTYPES,
    arguments,
    assert_close,
    bytes_read,
    each_is_found,
    exact,
    faults,
    refused,
)

# rows, V, k
SHAPES = [
    *[(1, 1, 1), (2, 2, 2), (96, 3, 3), (3, 5, 5), (7, 31, 4), (8, 32, 16), (9, 33, 5)],
    *[(15, 64, 1), (16, 100, 16), (5, 255, 7), (4, 256, 4), (6, 257, 8), (64, 511, 2)],
    *[(2, 512, 16), (11, 513, 9), (1, 1025, 11), (3, 2000, 12), (2, 3001, 13), (1, 4097, 14)],
    # Around one part of a row, and some of them
    *[(1, 8191, 4), (1, 8192, 4), (1, 8193, 4), (2, 8193, 16), (3, 10_007, 15), (2, 16_384, 3)],
    *[(1, 16_385, 5), (17, 997, 4), (31, 129, 6), (32, 128, 4), (48, 65, 16), (95, 20, 2)],
    (2, 50_257, 8),
]
LONGER_PARTS = (1, 270_001, 4)  # 32 are the most


def log_sum_exp(logits: mx.array) -> np.ndarray:
    values = exact(logits)
    top = values.max(axis=-1, keepdims=True)
    return np.log(np.exp(values - top).sum(axis=-1, keepdims=True)) + top


def check(logits, k):
    """Equal numbers, and of equal logits the lower id first, which the reference may not do.

    A log-probability is a difference of numbers as large as the normaliser, so its error is a share
    of that: 1e-6 for the kernel, 1e-5 for the reference, whose one-by-one sum in float32 loses more
    than that itself over hundreds of thousands of logits.
    """
    head, reference = draft_head(logits, k), draft_head_reference(logits, k)
    values, normal = exact(logits), log_sum_exp(logits)
    order = np.argsort(-values, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(values, order, axis=1)
    assert np.array_equal(np.array(head.ids), order)
    scale = np.maximum(np.abs(normal), np.abs(best - normal))
    assert np.all(np.abs(exact(head.logprobs) - (best - normal)) <= 1e-6 * scale)
    assert np.all(np.abs(exact(head.logsumexp)[:, None] - normal) <= 1e-6 * np.abs(normal))
    assert np.array_equal(np.take_along_axis(values, np.array(reference.ids), axis=1), best)
    if logits.shape[1] < 100_000:
        assert np.all(np.abs(exact(reference.logprobs) - (best - normal)) <= 1e-5 * scale)
        assert_close(reference.logsumexp[:, None], normal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_and_reference_sort_and_normalise(dtype):
    with emulated():
        for rows, vocabulary, k in SHAPES + [LONGER_PARTS] * (dtype == mx.float16):
            logits, _ = arguments(DRAFT_HEAD, dtype, rows=rows, vocabulary=vocabulary, k=k)
            check(logits * 4, k)


def test_equal_logits_and_logits_of_minus_infinity_are_in_order_of_their_ids():
    rng = np.random.default_rng(0)
    few = mx.array(rng.integers(0, 3, (4, 9000)).astype(np.float32))
    banned = mx.where(mx.array(rng.random((3, 300)) < 0.98), -mx.inf, few[:3, :300])
    with emulated():
        check(few, 16)
        head = draft_head(banned, 16)
    order = np.argsort(-exact(banned), axis=1, kind="stable")[:, :16]
    values = np.take_along_axis(exact(banned), order, axis=1)
    assert np.isneginf(values).any() and np.isfinite(values).any()
    assert np.array_equal(np.array(head.ids), order)
    assert np.allclose(np.array(head.logprobs), values - log_sum_exp(banned))


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
    head, normal = draft_head(logits, 4), log_sum_exp(logits)
    ids = np.argsort(-exact(logits), axis=1, kind="stable")[:, :4]
    logprobs = np.take_along_axis(exact(logits), ids, axis=1) - normal
    ours = np.array(head.ids), exact(head.logprobs), exact(head.logsumexp)[:, None]
    return list(zip(ours, (ids, logprobs, normal), strict=True))


# By what is wrong: the source, what becomes of it, and what is found
# fmt: off
test_a_fault_is_found = each_is_found(
    *faults("draft_head", drafting, {
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
    *faults("draft_head_merge", drafting, {
        "idle lanes leave before the SIMD-group's sum": ("float peak = -INFINITY;",
            "if (lane >= parts) return;\nfloat peak = -INFINITY;", "divergence"),
        "a peak without a value": ("float peak = -INFINITY;", "float peak;", "uninitialised"),
        "parts are added without scaling": ("total * rescale(peak, row_peak)", "total", "result"),
    }),
    *faults("top_k", drafting, {
        "a list starts anywhere": ("    values[i] = -INFINITY;\n", "", "result or uninitialised"),
        "a pointer without address space": ("inline void clear_list(thread float* values",
            "inline void clear_list(float* values", "lint"),
        "of equal logits the last wins": ("value == values[i] && id < ids[i]",
            "value == values[i] && id > ids[i]", "result"),
    }),
)
# fmt: on
