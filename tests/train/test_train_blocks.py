"""Blocks: every anchor in its turn, labels from the target, supervision while they hold."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.train.blocks import BlockSampler, TextTokens, cut_blocks
from support.training_blocks import equal, places, preferring, text_of

MASK = 99


def sampled(length: int, prompt: int, *wrong: int) -> TextTokens:
    """A text that counts up, but where the target preferred 77 at the places `wrong`."""
    text = text_of(length, prompt)
    choices = text.choices.copy()
    for at in wrong:
        choices[at - 1] = 77
    return preferring(text.tokens, prompt, choices)


TEXTS = [text_of(30, 4), text_of(21, 9, 100), text_of(12, 11, 200), text_of(40, 1, 300)]


# Anchors


def test_a_text_opens_blocks_from_the_end_of_its_prompt_to_its_last_but_one_token():
    assert text_of(9, 4).anchors.tolist() == [3, 4, 5, 6, 7]
    assert text_of(2, 1).anchors.tolist() == [0]


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 4), (3, 5), (1, 50)])
def test_an_epoch_has_every_anchor_of_every_text(shape):
    sampler = BlockSampler(TEXTS, 8, shape, seed=0)
    groups = sum(-(-len(text.anchors) // shape[1]) for text in TEXTS)
    wanted = {(i, int(anchor)) for i, text in enumerate(TEXTS) for anchor in text.anchors}
    for epoch in range(3):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        seen = Counter(p for step in steps for p in places(sampler.blocks(step)))
        assert set(seen) == wanted
        filled_up = sum(-len(text.anchors) % shape[1] for text in TEXTS)
        filled_up += -groups % shape[0] * shape[1]  # a last step that begins again
        assert sum(seen.values()) - len(seen) <= filled_up


def test_every_epoch_has_groups_and_an_order_of_its_own():
    texts = [text_of(41, 1), text_of(25, 5)]  # 40 and 20 anchors: no group is filled up
    sampler = BlockSampler(texts, 8, (1, 4), seed=0)
    steps = [sampler.blocks(step) for step in range(2 * sampler.steps_per_epoch)]
    groups = [frozenset(places(blocks)) for blocks in steps]
    assert len(set(groups)) == len(groups) == 30
    assert [int(blocks.rows[0]) for blocks in steps[:15]] != sorted([0] * 10 + [1] * 5)
    rows = [int(blocks.rows[0]) for blocks in steps]
    assert rows[:15] != rows[15:]


def test_fewer_groups_than_sequences_are_repeated():
    sampler = BlockSampler(TEXTS[:2], 8, (5, 30), seed=0)
    blocks = sampler.blocks(3)
    assert blocks.anchors.shape == (5, 30)
    assert Counter(blocks.rows.tolist()) in ({0: 3, 1: 2}, {0: 2, 1: 3})


@pytest.mark.parametrize("base", [None, 0.8])
def test_the_blocks_of_a_step_do_not_depend_on_what_was_asked_before(base):
    asked = BlockSampler(TEXTS, 8, (2, 4), 3, base)
    for step in [9, 0, 41, 2, 9, 40, 1]:
        fresh = BlockSampler(TEXTS, 8, (2, 4), 3, base)
        assert equal(asked.blocks(step), fresh.blocks(step))


@pytest.mark.parametrize("base", [None, 0.8])
def test_another_seed_or_step_gives_other_blocks(base):
    sampler = BlockSampler(TEXTS, 8, (2, 4), 3, base)
    other = BlockSampler(TEXTS, 8, (2, 4), 4, base)
    assert not equal(sampler.blocks(0), other.blocks(0))
    assert not equal(sampler.blocks(0), sampler.blocks(1))


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.3, 90, 150), (1.0, 400, 400)])
def test_a_share_of_the_steps_has_blocks_of_half_the_size(share, least, most):
    sampler = BlockSampler(TEXTS, 8, (2, 4), 0, None, share)
    sizes = Counter(sampler.blocks(step).tokens.shape[-1] for step in range(400))
    assert sizes.keys() <= {8, 4}
    assert least <= sizes[4] <= most


def test_a_block_of_half_the_size_has_a_draft_at_least():
    sampler = BlockSampler(TEXTS, 3, (2, 4), 0, 0.8, 1.0)
    assert sampler.blocks(0).tokens.shape == (2, 4, 2)
    assert not sampler.blocks(0).prefixes.any()


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


def test_dflash_sees_the_anchor_alone():
    sampler = BlockSampler(TEXTS, 8, (2, 50), seed=0)
    assert not any(sampler.blocks(step).prefixes.any() for step in range(5))


@pytest.mark.parametrize("beta", [0.5, 0.8, 1.0, 1.25])
def test_prefixes_follow_their_law(beta):
    sampler = BlockSampler(TEXTS, 8, (4, 100), 0, beta)
    drawn = np.concatenate([sampler.blocks(step).prefixes.ravel() for step in range(50)])
    law = beta ** np.arange(7.0)
    law /= law.sum()
    found = np.bincount(drawn, minlength=7) / drawn.size
    deviation = np.sqrt(law * (1 - law) / drawn.size)
    assert found.shape == (7,)
    assert (np.abs(found - law) < 4.5 * deviation).all()


def test_prefixes_of_short_blocks_follow_the_law_cut_short():
    sampler = BlockSampler(TEXTS, 8, (4, 100), 0, 0.5, 1.0)
    drawn = np.concatenate([sampler.blocks(step).prefixes.ravel() for step in range(50)])
    assert np.allclose(np.bincount(drawn) / drawn.size, np.array([4, 2, 1]) / 7, atol=0.02)


def test_anchor_and_prefix_are_visible_and_the_rest_is_masked():
    blocks = cut_blocks(TEXTS, np.array([0]), np.array([[5, 5, 5]]), 4, np.array([[0, 1, 2]]))
    assert blocks.inputs(MASK).tolist() == [
        [[5, MASK, MASK, MASK], [5, 6, MASK, MASK], [5, 6, 7, MASK]]
    ]


# Labels and where they are known


def one(text: TextTokens, anchor: int, prefix: int = 0, size: int = 6) -> tuple[list, list]:
    blocks = cut_blocks([text], np.array([0]), np.array([[anchor]]), size, np.array([[prefix]]))
    return blocks.labels[0, 0].tolist(), blocks.supervised[0, 0].tolist()


def test_in_a_greedy_text_the_labels_are_the_text():
    labels, supervised = one(text_of(20, 4), 5)
    assert supervised == [False, True, True, True, True, True]
    assert labels[1:] == [6, 7, 8, 9, 10]


def test_supervision_stops_with_the_first_token_that_is_not_the_choice():
    labels, supervised = one(sampled(20, 4, 8), 5)
    assert supervised == [False, True, True, True, False, False]
    assert labels[1:4] == [6, 7, 77]


def test_a_token_that_is_not_the_choice_may_be_the_anchor_or_in_the_prefix():
    text = sampled(20, 4, 5, 6, 7)
    assert one(text, 5)[1] == [False, True, False, False, False, False]
    assert one(text, 5, prefix=1)[1] == [False, False, True, False, False, False]
    assert one(text, 5, prefix=2)[1] == [False, False, False, True, True, True]
    assert one(text, 7)[1] == [False, True, True, True, True, True]


def test_supervision_stops_at_the_end_of_the_text():
    labels, supervised = one(text_of(8, 4), 5)
    assert supervised == [False, True, True, False, False, False]
    assert labels[1:3] == [6, 7]
    assert one(text_of(8, 4), 5, prefix=2)[1] == [False] * 6
    assert one(text_of(8, 4), 5, prefix=4)[1] == [False] * 6


def test_behind_the_end_of_the_text_tokens_are_zero():
    blocks = cut_blocks(TEXTS, np.array([0]), np.array([[28]]), 4, np.array([[0]]))
    assert blocks.tokens.tolist() == [[[28, 29, 0, 0]]]


def test_other_choices_and_their_probabilities_are_those_before_each_token():
    text = sampled(20, 4, 7)
    blocks = cut_blocks([text], np.array([0]), np.array([[5]]), 4, np.array([[0]]))
    assert blocks.likely.shape == blocks.shares.shape == (1, 1, 4, 3)
    assert blocks.likely[0, 0, 1:].tolist() == [[6, 1006, 2006], [77, 1077, 2077], [8, 1008, 2008]]
    assert np.array_equal(blocks.shares[0, 0, 1:], text.shares[5:8].astype(np.float32))
    assert len(set(blocks.shares[0, 0, 1:].ravel().tolist())) == 9


def by_definition(
    text: TextTokens, anchor: int, size: int, prefix: int
) -> tuple[list[int | None], list[int], list[bool]]:
    """Tokens (None behind the end), labels where they are known, and whether they are."""
    tokens: list[int | None] = []
    labels, supervised = [], []
    on_the_path = True
    for k in range(size):
        at = anchor + k
        exists = at < len(text.tokens)
        tokens.append(int(text.tokens[at]) if exists else None)
        known = exists and k > prefix and on_the_path
        supervised.append(known)
        labels.append(int(text.choices[at - 1]) if known else -1)
        if k > prefix and exists and text.tokens[at] != text.choices[at - 1]:
            on_the_path = False
    return tokens, labels, supervised


@st.composite
def texts(draw: st.DrawFn) -> TextTokens:
    length = draw(st.integers(2, 14))
    small = st.lists(st.integers(0, 2), min_size=length, max_size=length)
    tokens = np.array(draw(small))
    greedy = np.append(tokens[1:], 0)
    noise = np.array(
        draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=length, max_size=length))
    )
    return preferring(tokens, draw(st.integers(1, length - 1)), (greedy + noise) % 3)


@settings(max_examples=200)
@given(data=st.data(), some=st.lists(texts(), min_size=1, max_size=3), size=st.integers(2, 8))
def test_blocks_are_what_a_loop_over_their_definition_gives(data, some, size):
    rows = np.array(data.draw(st.lists(st.integers(0, len(some) - 1), min_size=1, max_size=3)))
    anchors = np.array(
        [
            data.draw(st.lists(st.sampled_from(some[r].anchors.tolist()), min_size=2, max_size=2))
            for r in rows
        ]
    )
    prefixes = np.array(
        [data.draw(st.lists(st.integers(0, size - 2), min_size=2, max_size=2)) for _ in rows]
    )
    blocks = cut_blocks(some, rows, anchors, size, prefixes)
    for s, a in np.ndindex(anchors.shape):
        text, prefix = some[rows[s]], int(prefixes[s, a])
        tokens, labels, supervised = by_definition(text, int(anchors[s, a]), size, prefix)
        assert blocks.supervised[s, a].tolist() == supervised
        assert blocks.tokens[s, a].tolist() == [0 if t is None else t for t in tokens]
        assert np.where(supervised, blocks.labels[s, a], -1).tolist() == labels
        before = int(anchors[s, a]) - 1 + np.flatnonzero(supervised)
        assert np.array_equal(blocks.likely[s, a, supervised], text.likely[before])
        assert np.allclose(blocks.shares[s, a, supervised], text.shares[before])
        visible = blocks.inputs(MASK)[s, a].tolist()
        assert visible == [(tokens[k] or 0) if k <= prefix else MASK for k in range(size)]
