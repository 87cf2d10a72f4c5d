"""The draft_head kernels in the emulator against their reference."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.draft_head import draft_head, draft_head_reference
from kernels_metal.emulator import emulated
from support import kernel_cases as cases

# rows, V, k
SHAPES = [
    (1, 1, 1),
    (2, 2, 2),
    (96, 3, 3),
    (3, 5, 5),
    (7, 31, 4),
    (8, 32, 16),
    (9, 33, 5),
    (15, 64, 1),
    (16, 100, 16),
    (5, 255, 7),
    (4, 256, 4),
    (6, 257, 8),
    (33, 300, 3),
    (64, 511, 2),
    (2, 512, 16),
    (11, 513, 9),
    (13, 1000, 6),
    (1, 1023, 10),
    (1, 1024, 4),
    (1, 1025, 11),
    (3, 2000, 12),
    (12, 2048, 2),
    (2, 3001, 13),
    (5, 4096, 1),
    (1, 4097, 14),
    (1, 8191, 4),
    (1, 8192, 4),
    (1, 8193, 4),
    (2, 8193, 16),
    (3, 10_007, 15),
    (2, 16_384, 3),
    (1, 16_385, 5),
    (17, 997, 4),
    (31, 129, 6),
    (32, 128, 4),
    (48, 65, 16),
    (95, 20, 2),
    (10, 777, 4),
    (1, 32_000, 4),
    (2, 50_257, 8),
    (1, 270_001, 4),
]


def check(logits, k):
    """Equal numbers, and of equal logits the lower id first, which the reference may not do.

    A log-probability is a difference of numbers as large as the normaliser, so its error is a share
    of that: 1e-6 against float64, 1e-5 against the reference, whose one-by-one sum in float32 loses
    more than that itself over hundreds of thousands of logits.
    """
    head, reference = draft_head(logits, k), draft_head_reference(logits, k)
    values, normal = cases.exact(logits), cases.log_sum_exp(logits)[:, None]
    order = np.argsort(-values, axis=1, kind="stable")[:, :k]
    assert np.array_equal(np.array(head.ids), order)
    assert np.array_equal(np.array(head.tokens), values.argmax(axis=1))
    logprobs = np.take_along_axis(values, order, axis=1) - normal
    scale = np.maximum(np.abs(normal), np.abs(logprobs))
    assert np.all(np.abs(cases.exact(head.logprobs) - logprobs) <= 1e-6 * scale)
    assert np.all(np.abs(cases.exact(head.logsumexp)[:, None] - normal) <= 1e-6 * np.abs(normal))
    if logits.shape[1] < 100_000:
        apart = np.abs(cases.exact(head.logprobs - reference.logprobs))
        assert np.all(apart <= 1e-5 * scale)
        cases.assert_close(head.logsumexp[:, None], reference.logsumexp[:, None])


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.name)
def test_the_draft_head_equals_its_reference(dtype):
    rng = np.random.default_rng(0)
    assert len(SHAPES) >= 40
    with emulated():
        for rows, vocabulary, k in SHAPES:
            check(cases.normal(rng, (rows, vocabulary), dtype) * 4, k)


def test_equal_logits_and_logits_of_minus_infinity_are_in_order_of_their_ids():
    rng = np.random.default_rng(0)
    few = mx.array(rng.integers(0, 3, (4, 9000)).astype(np.float32))
    banned = mx.where(mx.array(rng.random((3, 300)) < 0.98), -mx.inf, few[:3, :300])
    with emulated():
        check(few, 16)
        head = draft_head(banned, 16)
    order = np.argsort(-cases.exact(banned), axis=1, kind="stable")[:, :16]
    values = np.take_along_axis(cases.exact(banned), order, axis=1)
    assert np.isneginf(values).any() and np.isfinite(values).any()
    assert np.array_equal(np.array(head.ids), order)
    assert np.allclose(np.array(head.logprobs), values - cases.log_sum_exp(banned)[:, None])


def test_each_logit_is_read_once():
    logits = cases.normal(np.random.default_rng(0), (5, 20_000), mx.float16)
    with emulated() as run:
        draft_head(logits, 8)
    assert cases.bytes_read(run, "draft_head", "logits") == logits.nbytes
