"""The draft vocabulary: its tokens, and the target's head for them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash_mlx.target.model import Target
from dflash_mlx.train.data import Texts
from dflash_mlx.train.vocabulary import DraftVocabulary, draft_size
from support.families import VOCAB_SIZE, make_model
from support.tiny_training import (
    CONTEXT,
    WIDTH,
    corpus_rows,
    drafter_config,
    make_network,
    texts_of,
    tiny_target,
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return texts_of(tmp_path_factory.mktemp("features"), corpus_rows())


def vocabulary(texts: Texts, size: int | None = 15, target: Any = None, **changes: Any) -> Any:
    config = replace(make_network(drafter_config())[1], **changes)
    return DraftVocabulary(target or tiny_target(), config, texts, size)


@pytest.mark.parametrize("size", [1, 15, VOCAB_SIZE, VOCAB_SIZE + 9])
def test_it_is_the_most_frequent_tokens_of_the_answers(texts, size):
    found = vocabulary(texts, size)
    answers = np.concatenate([text.tokens[text.prompt_length :] for text in texts.sequences])
    counts = np.bincount(answers, minlength=VOCAB_SIZE)
    words = found.tokens
    assert len(set(words.tolist())) == len(words) == min(size, VOCAB_SIZE)
    assert draft_size(size, VOCAB_SIZE) == len(words) == len(found.head)
    assert counts[words].tolist() == sorted(counts.tolist(), reverse=True)[: len(words)]
    covered = np.isin(answers, words).mean()
    assert found.covers(texts) == pytest.approx(covered)
    assert found.describe(texts) == f"the draft vocabulary covers {covered:.1%} of the answers"


def test_the_index_finds_its_tokens_and_no_others(texts):
    found = vocabulary(texts)
    assert found.index[found.tokens].tolist() == list(range(15))
    assert np.count_nonzero(found.index >= 0) == 15 and found.index.min() == -1


def test_by_default_it_is_a_quarter_of_the_table(texts):
    assert len(vocabulary(texts, None).tokens) == draft_size(None, VOCAB_SIZE) == VOCAB_SIZE // 4


def biased() -> Any:
    """A target's head with a bias, as some families have."""
    head = nn.Linear(WIDTH, VOCAB_SIZE)
    head.bias = mx.arange(VOCAB_SIZE) / 10
    return SimpleNamespace(head=lambda: head)


HEADS = {
    "tied": lambda: Target(make_model("llama"), CONTEXT, "llama"),
    "a head of its own": lambda: Target(make_model("mimo"), CONTEXT, "mimo"),
    "biased": biased,
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("multiplier", [1.0, 0.5])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_its_logits_are_the_target_s(texts, head, multiplier, cap):
    target = HEADS[head]()
    found = vocabulary(
        texts, target=target, output_multiplier=multiplier, final_logit_softcapping=cap
    )
    states = mx.random.normal((4, WIDTH), key=mx.random.key(0))
    expected = np.array(target.head()(states * multiplier))[:, found.tokens]
    expected = expected if cap is None else np.tanh(expected / cap) * cap
    assert np.abs(np.array(found.logits(states)) - expected).max() < 1e-5 < np.ptp(expected)
