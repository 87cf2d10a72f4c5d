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
from support.tiny_training import CONTEXT, WIDTH, corpus_rows, make_trainee, texts_of, tiny_target


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return texts_of(tmp_path_factory.mktemp("features"), corpus_rows())


def vocabulary(texts: Texts, size: int | None = 15, target: Any = None, **changes: Any) -> Any:
    trainee = make_trainee()
    config = replace(trainee.config, **changes)
    trainee = replace(trainee, config=config, target=target or tiny_target())
    return DraftVocabulary(trainee, texts, size)


@pytest.mark.parametrize("size", [None, 1, 15, VOCAB_SIZE + 9])
def test_it_is_the_most_frequent_tokens_of_the_answers(texts, size):
    found = vocabulary(texts, size)
    answers = np.concatenate([text.tokens[text.prompt_length :] for text in texts.sequences])
    counts = np.bincount(answers, minlength=VOCAB_SIZE)
    words = found.tokens
    assert len(set(words.tolist())) == len(words)
    wanted = VOCAB_SIZE // 4 if size is None else min(size, VOCAB_SIZE)
    assert draft_size(size, VOCAB_SIZE) == len(words) == len(found.head) == wanted
    assert counts[words].tolist() == sorted(counts.tolist(), reverse=True)[: len(words)]
    covered = np.isin(answers, words).mean()
    assert f"covers {covered:.1%} " in found.describe()
    expected = np.full(VOCAB_SIZE, -1)
    expected[words] = np.arange(len(words))
    assert np.array_equal(found.index, expected)


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
@pytest.mark.parametrize(("multiplier", "cap"), [(1.0, None), (0.5, 2.0)])
def test_its_logits_are_the_target_s(texts, head, multiplier, cap):
    target = HEADS[head]()
    found = vocabulary(
        texts, target=target, output_multiplier=multiplier, final_logit_softcapping=cap
    )
    states = mx.random.normal((4, WIDTH), key=mx.random.key(0))
    expected = np.array(target.head()(states * multiplier))[:, found.tokens]
    expected = expected if cap is None else np.tanh(expected / cap) * cap
    assert np.abs(np.array(found.logits(states)) - expected).max() < 1e-5 < np.ptp(expected)
