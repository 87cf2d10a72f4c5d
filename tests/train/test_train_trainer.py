"""A training step: its learning rate, what it limits, and the tokens that it scores."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.train.blocks import BlockSampler
from dflash_mlx.train.data import Texts
from dflash_mlx.train.loss import DraftVocabulary, draft_size
from dflash_mlx.verifier.model import Target
from support.families import VOCAB_SIZE, make_model
from support.tiny_training import (
    CONTEXT,
    WIDTH,
    arrays_of,
    greedy_rows,
    make_trainee,
    make_trainer,
    texts_of,
    tiny_target,
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    rows = (*greedy_rows(3, 20), *greedy_rows(2, 9))
    return texts_of(tmp_path_factory.mktemp("features"), rows)


def test_the_learning_rate_rises_and_falls_with_steps_or_minutes(texts):
    trainer = make_trainer(texts, steps=100, warmup=9, learning_rate=2.0)
    found, peak = [], 2.0
    for step in range(101):
        trainer.step = step
        found.append(trainer.learning_rate())
    assert found[0] == pytest.approx(peak / 10, rel=1e-2)
    assert found[:10] == sorted(found[:10]) and found[9:] == sorted(found[9:], reverse=True)
    assert found[9] == pytest.approx(peak, rel=0.03)
    assert found[50] == pytest.approx(peak * (0.02 + 0.98 / 2))
    assert found[100] == pytest.approx(peak * 0.02)
    trainer = make_trainer(texts, steps=None, minutes=2.0)
    for seconds, progress in ((30.0, 0.25), (1e6, 1.0)):
        trainer.step, trainer.seconds = 1000, seconds
        assert trainer.progress == progress


def test_a_step_counts_its_tokens_and_its_time(texts):
    trainer = make_trainer(texts, short_share=0.5)
    expected = BlockSampler(texts.texts, 8, (2, 4), 0, short_share=0.5)
    sizes = [expected.blocks(i).tokens.size for i in range(6)]
    assert len(set(sizes)) == 2
    for _ in sizes:
        trainer.train_step()
    assert (trainer.step, trainer.tokens) == (6, sum(sizes))
    assert trainer.seconds > 0


def test_a_step_is_adamw_s(texts):
    """Its first step has one length everywhere, the learning rate; then the weights decay."""
    before = arrays_of(make_trainer(texts).trainee.network)
    after = []
    for decay in (0.0, 0.5):
        given = {"warmup": 0, "steps": 1000, "learning_rate": 1e-3, "weight_decay": decay}
        trainer = make_trainer(texts, **given)
        trainer.train_step()
        after.append(arrays_of(trainer.trainee.network))
    for name, array in before.items():
        moved = np.abs(after[0][name] - array)
        assert 0 < moved.max() <= 1.001e-3 and np.median(moved) > 0.9e-3
        assert np.allclose(after[1][name] - after[0][name], -0.5e-3 * array, atol=1e-6)


def test_gradients_are_clipped_to_their_norm(texts, monkeypatch):
    seen = []
    trainer = make_trainer(texts, clip=0.05)
    update = trainer.optimizer.update

    def watch(network: Any, gradients: Any) -> None:
        flat = [np.array(array).ravel() for _, array in tree_flatten(gradients)]
        seen.append(float(np.linalg.norm(np.concatenate(flat))))
        update(network, gradients)

    monkeypatch.setattr(trainer.optimizer, "update", watch)
    trainer.train_step()
    assert seen == [pytest.approx(0.05, rel=1e-3)]


# The draft vocabulary


def vocabulary(texts: Texts, size: int | None = 15, target: Any = None, **changes: Any) -> Any:
    trainee = make_trainee()
    config = replace(trainee.config, **changes)
    trainee = replace(trainee, config=config, target=target or tiny_target())
    return DraftVocabulary(trainee, texts, size)


@pytest.mark.parametrize("size", [None, 1, 15, VOCAB_SIZE + 9])
def test_it_is_the_most_frequent_tokens_of_the_answers(texts, size):
    found = vocabulary(texts, size)
    answers = np.concatenate([text.tokens[text.prompt_length :] for text in texts.texts])
    counts = np.bincount(answers, minlength=VOCAB_SIZE)
    words = found.tokens
    assert len(set(words.tolist())) == len(words)
    wanted = VOCAB_SIZE // 4 if size is None else min(size, VOCAB_SIZE)
    assert draft_size(size, VOCAB_SIZE) == len(words) == len(found.head) == wanted
    assert counts[words].tolist() == sorted(counts.tolist(), reverse=True)[: len(words)]
    assert f"covers {np.isin(answers, words).mean():.1%} " in found.describe()
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
