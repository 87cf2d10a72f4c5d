"""The next tokens that are kept for training are the likeliest, in order, as a sort finds them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.train.features import CHOICE, CHOICES, likeliest


def by_sorting(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first tokens of a stable sort, their probabilities, and all probabilities, in float64."""
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    p = powers / powers.sum(axis=-1, keepdims=True)
    tokens = np.argsort(-logits, axis=-1, kind="stable")[:, :CHOICES]
    return tokens, np.take_along_axis(p, tokens, axis=-1), p


def drawn(rows: int, words: int, scale: float = 3.0) -> np.ndarray:
    logits: np.ndarray = np.random.default_rng([rows, words]).normal(size=(rows, words)) * scale
    return logits.astype(np.float32)


@pytest.mark.parametrize(("rows", "words"), [(1, 9), (5, 8), (70, 300)])
def test_tokens_and_probabilities_are_those_of_a_sort(rows, words):
    logits = drawn(rows, words)
    before = logits.copy()
    found = likeliest(logits)
    tokens, probabilities, _ = by_sorting(logits)
    assert found.dtype == CHOICE and found.shape == (rows, CHOICES) == (rows, 8)
    assert np.array_equal(found["token"], tokens)
    assert np.allclose(found["probability"], probabilities, rtol=1e-5)
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("words", [1, 2, 7])
def test_of_few_words_all_are_kept_however_unlikely_and_the_rest_has_no_probability(words):
    logits = drawn(4, words, scale=1000.0)
    logits[0, 1:] = -np.inf
    found = likeliest(logits)
    tokens, probabilities, _ = by_sorting(logits)
    assert np.array_equal(found["token"][:, :words], tokens)
    assert np.allclose(found["probability"][:, :words], probabilities, atol=1e-6)
    assert np.allclose(found["probability"].sum(axis=-1), 1.0)
    assert not found["token"][:, words:].any() and not found["probability"][:, words:].any()


@settings(max_examples=60)
@given(
    words=st.sampled_from([1, 5, 8, 9, 12, 97, 300, 2000]),
    levels=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_equal_logits_are_ordered_by_token_and_the_first_is_the_greedy_choice(words, levels, seed):
    logits = np.random.default_rng(seed).integers(levels, size=(3, words)).astype(np.float32)
    found = likeliest(logits)
    _, probabilities, p = by_sorting(logits)
    count = min(CHOICES, words)
    assert np.array_equal(found["token"][:, 0], logits.argmax(axis=-1))
    tokens = found["token"][:, :count].astype(np.int64)
    for row, chosen in zip(logits, tokens, strict=True):
        assert chosen.tolist() == sorted(set(chosen.tolist()), key=lambda t: (-row[t], t))
    # Which of the equal ones at the edge are kept is left open, but not their probabilities.
    kept = found["probability"][:, :count]
    assert np.allclose(kept, probabilities, rtol=1e-5)
    assert np.allclose(kept, np.take_along_axis(p, tokens, axis=-1), rtol=1e-5)
    edge = np.take_along_axis(logits, tokens[:, -1:], axis=-1)
    for row, chosen, least in zip(logits, tokens, edge, strict=True):
        above = np.flatnonzero(row > least)
        assert set(above.tolist()) <= set(chosen.tolist())
