"""Anchors drawn by how often rounds of decoding begin there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dflash_mlx.train.blocks import RoundStartSampler, TextTokens, start_chances
from support.training_blocks import equal, places, preferring, text_of


def surprising(length: int, prompt: int, *hard: int) -> TextTokens:
    """A text that the target was sure of, except for the tokens at `hard`, which it hardly saw."""
    text = text_of(length, prompt)
    likely, shares = text.likely.copy(), np.zeros_like(text.shares)
    shares[:, 0] = 1.0
    for at in hard:
        likely[at - 1, :2], shares[at - 1, :2] = (77, text.tokens[at]), (0.9, 0.05)
    return replace(text, likely=likely, shares=shares)


def test_chances_fall_with_the_probability_of_the_token_at_the_anchor():
    text = surprising(12, 4, 6, 8)
    chances = dict(zip(text.anchors.tolist(), start_chances(text), strict=True))
    assert chances.pop(3) == 1.0, "a round always begins at the first"
    assert chances.pop(6) == chances.pop(8) == pytest.approx(0.22 + 0.6 * 0.95)
    assert list(chances.values()) == pytest.approx([0.22] * 5)


def test_a_token_that_is_not_among_the_likeliest_has_no_probability():
    text = preferring(np.arange(9), 2, np.full(9, 77))
    assert start_chances(text)[1:] == pytest.approx([0.82] * 6)


def test_an_epoch_has_about_as_many_anchors_as_begin_rounds_each_once():
    texts = [text_of(90, 10), text_of(41, 1)]
    sampler = RoundStartSampler(texts, 4, (1, 8), seed=0)
    for epoch in range(3):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        seen = Counter(place for step in steps for place in places(sampler.blocks(step)))
        assert set(seen.values()) == {1}
        assert Counter(text for text, _ in seen) == {0: 32, 1: 16}  # 0.45 of 80 and 40, in eights


def test_a_text_shorter_than_a_group_fills_it_with_repeats():
    blocks = RoundStartSampler([text_of(6, 3)], 4, (1, 8), seed=0).blocks(0)
    assert sorted(set(blocks.anchors[0].tolist())) == [2, 3, 4]
    assert blocks.anchors.shape == (1, 8)


def test_hard_tokens_open_more_blocks_than_easy_ones():
    hard = range(20, 100, 2)
    sampler = RoundStartSampler([surprising(102, 1, *hard)], 4, (1, 4), seed=0)
    seen = Counter(at for step in range(1100) for _, at in places(sampler.blocks(step)))
    difficult = sum(seen[at] for at in hard) / len(hard)
    easy = sum(seen[at] for at in range(21, 100, 2)) / len(hard)
    assert 1.5 < difficult / easy < 0.79 / 0.22, "less than by chances: no anchor comes twice"
    assert seen[0] > 0.9 * difficult


def test_the_blocks_of_a_step_do_not_depend_on_what_was_asked_before():
    texts = [surprising(60, 5, 20, 30), text_of(50, 3)]
    used, fresh = (RoundStartSampler(texts, 4, (2, 5), seed=3) for _ in range(2))
    for step in (0, 9, 4):
        used.blocks(step)
    assert equal(used.blocks(7), fresh.blocks(7))
    assert not equal(used.blocks(7), RoundStartSampler(texts, 4, (2, 5), seed=4).blocks(7))
