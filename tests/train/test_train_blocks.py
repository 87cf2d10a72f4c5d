"""Blocks: every anchor in its turn, labels from the target, supervision while they hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dflash_mlx.train.blocks import (
    SAMPLERS,
    Blocks,
    BlockSampler,
    RoundStartSampler,
    TextTokens,
    cut_blocks,
    start_chances,
)


def preferring(tokens: np.ndarray, prompt: int, choices: np.ndarray) -> TextTokens:
    """A text after whose tokens the target would choose `choices`, and next to them others."""
    likely = np.stack([choices, choices + 1000, choices + 2000], axis=-1)
    shares = np.linspace(0.4, 0.9, len(tokens))[:, None] * [1.0, 0.1, 0.01]
    return TextTokens(tokens, prompt, likely, shares)


def text_of(length: int, prompt: int, first: int = 0) -> TextTokens:
    """A greedy text that counts up from `first`."""
    tokens = np.arange(first, first + length)
    return preferring(tokens, prompt, tokens + 1)


def places(blocks: Blocks) -> list[tuple[int, int]]:
    """The text and the position of every block."""
    return [
        (int(row), int(anchor))
        for row, anchors in zip(blocks.rows, blocks.anchors, strict=True)
        for anchor in anchors
    ]


def seen_in(sampler: BlockSampler, epoch: int) -> Counter[tuple[int, int]]:
    """How often an epoch has every place."""
    steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
    return Counter(place for step in steps for place in places(sampler.blocks(step)))


def equal(a: Blocks, b: Blocks) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in vars(a))


MASK = 999
TEXTS = [text_of(30, 4), text_of(21, 9, 100), text_of(12, 11, 200), text_of(40, 1, 300)]


# Anchors


@pytest.mark.parametrize("shape", [(1, 4), (3, 5), (5, 50)])
def test_an_epoch_has_every_anchor_of_every_text(shape):
    sampler = BlockSampler(TEXTS, 8, shape, seed=0)
    groups = sum(-(-len(text.anchors) // shape[1]) for text in TEXTS)
    assert text_of(9, 4).anchors.tolist() == [3, 4, 5, 6, 7], "all but the last token"
    wanted = {(i, int(anchor)) for i, text in enumerate(TEXTS) for anchor in text.anchors}
    for epoch in range(2):
        seen = seen_in(sampler, epoch)
        assert set(seen) == wanted
        filled_up = sum(-len(text.anchors) % shape[1] for text in TEXTS)
        filled_up += -groups % shape[0] * shape[1]  # a last step that begins again
        assert sum(seen.values()) - len(seen) <= filled_up


@pytest.mark.parametrize("base", [None, 0.8])
@pytest.mark.parametrize("law", SAMPLERS)
def test_the_blocks_of_a_step_depend_on_seed_and_step_alone(law, base):
    asked = SAMPLERS[law](TEXTS, 8, (2, 4), 3, base)
    for step in [9, 0, 41, 2, 9, 40, 1]:
        fresh = SAMPLERS[law](TEXTS, 8, (2, 4), 3, base)
        assert equal(asked.blocks(step), fresh.blocks(step))
    assert not equal(asked.blocks(0), SAMPLERS[law](TEXTS, 8, (2, 4), 4, base).blocks(0))
    assert not equal(asked.blocks(0), asked.blocks(1))


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.3, 90, 150), (1.0, 400, 400)])
def test_a_share_of_the_steps_has_blocks_of_half_the_size(share, least, most):
    sampler = BlockSampler(TEXTS, 8, (2, 4), 0, None, share)
    sizes = Counter(sampler.blocks(step).tokens.shape[-1] for step in range(400))
    assert sizes.keys() <= {8, 4}
    assert least <= sizes[4] <= most
    assert BlockSampler(TEXTS, 3, (2, 4), 0, 0.8, 1.0).blocks(0).tokens.shape == (2, 4, 2)


def test_a_step_has_texts_of_like_length_in_another_order_every_epoch():
    lengths = np.random.default_rng(0).integers(10, 200, size=160)
    texts = [text_of(int(length), int(length) - 4) for length in lengths]  # one group each
    sampler = BlockSampler(texts, 8, (4, 4), seed=0)
    apart, seen = [], []
    for step in range(2 * sampler.steps_per_epoch):
        rows = sampler.blocks(step).rows
        apart.append(np.ptp(lengths[rows]))
        seen.append(tuple(sorted(rows.tolist())))
    assert np.mean(apart) < 30  # in steps of any four it is 114
    assert len(set(seen)) == len(seen) == 80
    firsts = [lengths[list(rows)].mean() for rows in seen]
    assert firsts != sorted(firsts)


# Visible prefixes


@pytest.mark.parametrize(
    ("beta", "short", "least"),
    [(0.5, 0.0, 0), (1.25, 0.0, 0), (0.5, 1.0, 0), (None, 0.0, 0), (0.9, 0.0, 1), (0.9, 1.0, 9)],
)
def test_prefixes_follow_their_law(beta, short, least):
    sampler = BlockSampler(TEXTS, 8, (4, 100), 0, beta, short, least_prefix=least)
    drawn = np.concatenate([sampler.blocks(step).prefixes.ravel() for step in range(50)])
    law = (beta or 0.0) ** np.arange(3.0 if short else 7.0)  # DFlash sees the anchor alone
    law[: min(least, len(law) - 1)] = 0
    law /= law.sum()
    found = np.bincount(drawn, minlength=len(law)) / drawn.size
    assert found.shape == law.shape
    assert (np.abs(found - law) <= 4.5 * np.sqrt(law * (1 - law) / drawn.size)).all()


def test_some_masked_blocks_show_tokens_that_teach_nothing_and_the_others_none():
    sampler = BlockSampler(TEXTS, 8, (2, 40), seed=1, reveal_share=0.5)
    seen = [sampler.blocks(step) for step in range(6)]
    shown = np.concatenate([blocks.revealed[:, :, 1:].reshape(-1, 7) for blocks in seen])
    assert 0.3 < shown.any(axis=-1).mean() < 0.55, "half, some of which happen to show none"
    assert 0.15 < shown.mean() < 0.35
    for blocks in seen:
        assert not (blocks.supervised & blocks.revealed).any()
        inputs = blocks.inputs(MASK)
        assert (inputs == blocks.tokens)[blocks.revealed].all()
        assert (inputs[..., 1:] == MASK)[~blocks.revealed[..., 1:]].all()
        lengths = np.array([len(TEXTS[row].tokens) for row in blocks.rows])
        outside = blocks.anchors[..., None] + np.arange(8) >= lengths[:, None, None]
        assert not blocks.revealed[outside].any() and (inputs[outside] == MASK).all()


def drawn_text(rng: np.random.Generator) -> TextTokens:
    """A short text that follows most of the target's choices."""
    tokens = rng.integers(3, size=rng.integers(2, 15))
    choices = (np.append(tokens[1:], 0) + (rng.random(len(tokens)) < 0.25)) % 3
    return preferring(tokens, int(rng.integers(1, len(tokens))), choices)


@pytest.mark.parametrize("seed", range(40))
def test_blocks_are_what_a_loop_over_their_definition_gives(seed):
    rng = np.random.default_rng(seed)
    some, size = [drawn_text(rng) for _ in range(3)], int(rng.integers(2, 9))
    rows, prefixes = rng.integers(3, size=4), rng.integers(size - 1, size=(4, 2))
    anchors = np.stack([rng.choice(some[row].anchors, 2) for row in rows])
    blocks = cut_blocks(some, rows, anchors, size, prefixes)
    for s, a in np.ndindex(anchors.shape):
        text, prefix, on_the_path = some[rows[s]], prefixes[s, a], True
        for k, at in enumerate(range(anchors[s, a], anchors[s, a] + size)):
            exists = at < len(text.tokens)
            token = text.tokens[at] if exists else 0
            assert blocks.tokens[s, a, k] == token
            assert blocks.inputs(MASK)[s, a, k] == (token if k <= prefix else MASK)
            known = exists and k > prefix and on_the_path
            assert blocks.supervised[s, a, k] == known
            if known:
                assert np.array_equal(blocks.likely[s, a, k], text.likely[at - 1])
                assert np.allclose(blocks.shares[s, a, k], text.shares[at - 1])
                assert blocks.labels[s, a, k] == text.likely[at - 1, 0]
                on_the_path = token == text.likely[at - 1, 0]


# Anchors where rounds begin


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
    unlikely = preferring(np.arange(9), 2, np.full(9, 77))  # none is among the likeliest
    assert start_chances(unlikely)[1:] == pytest.approx([0.82] * 6)


def test_an_epoch_has_about_as_many_anchors_as_begin_rounds_each_once():
    texts = [text_of(90, 10), text_of(41, 1)]
    sampler = RoundStartSampler(texts, 4, (1, 8), seed=0)
    for epoch in range(3):
        seen = seen_in(sampler, epoch)
        assert set(seen.values()) == {1}
        assert Counter(text for text, _ in seen) == {0: 32, 1: 16}  # 0.45 of 80 and 40, in eights
    blocks = RoundStartSampler([text_of(6, 3)], 4, (1, 8), seed=0).blocks(0)  # has repeats
    assert sorted(set(blocks.anchors[0].tolist())) == [2, 3, 4] and blocks.anchors.size == 8


def test_hard_tokens_open_more_blocks_than_easy_ones():
    hard = range(20, 100, 2)
    sampler = RoundStartSampler([surprising(102, 1, *hard)], 4, (1, 4), seed=0)
    seen = Counter(at for step in range(1100) for _, at in places(sampler.blocks(step)))
    difficult = sum(seen[at] for at in hard) / len(hard)
    easy = sum(seen[at] for at in range(21, 100, 2)) / len(hard)
    assert 1.5 < difficult / easy < 0.79 / 0.22, "less than by chances: no anchor comes twice"
    assert seen[0] > 0.9 * difficult
