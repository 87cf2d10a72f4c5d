"""A training step: its batch, its learning rate, and what it limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.train.blocks import BlockSampler
from dflash_mlx.train.data import Texts
from support.tiny_training import (
    arrays_of,
    greedy_rows,
    make_trainer,
    texts_of,
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    rows = (*greedy_rows(3, 20), *greedy_rows(2, 9))
    return texts_of(tmp_path_factory.mktemp("features"), rows)


def test_the_learning_rate_rises_and_falls_as_documented(texts):
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


def test_minutes_measure_progress_where_no_steps_are_given(texts):
    trainer = make_trainer(texts, steps=None, minutes=2.0)
    trainer.step, trainer.seconds = 1000, 30.0
    assert trainer.progress == 0.25
    trainer.seconds = 1e6
    assert trainer.progress == 1.0


def test_a_step_counts_its_tokens_and_its_time(texts):
    trainer = make_trainer(texts, short_share=0.5)
    sizes = [
        BlockSampler(texts.sequences, 8, (2, 4), 0, None, 0.5).blocks(i).tokens.size
        for i in range(6)
    ]
    assert len(set(sizes)) == 2
    for _ in sizes:
        trainer.train_step()
    assert (trainer.step, trainer.tokens) == (6, sum(sizes))
    assert trainer.seconds > 0


def change(texts: Texts, **settings: Any) -> dict[str, np.ndarray]:
    """What one step changes."""
    trainer = make_trainer(texts, warmup=0, steps=1000, **settings)
    before = arrays_of(trainer.trainee.network)
    trainer.train_step()
    return {
        name: array - before[name] for name, array in arrays_of(trainer.trainee.network).items()
    }


def test_a_step_moves_every_weight_by_no_more_than_the_learning_rate(texts):
    moved = change(texts, learning_rate=1e-3, weight_decay=0.0)
    for array in moved.values():
        assert 0 < np.abs(array).max() <= 1.001e-3
        assert np.median(np.abs(array)) > 0.9e-3  # AdamW's first step has one length everywhere


def test_weights_decay(texts):
    moved, plain = (change(texts, learning_rate=1e-3, weight_decay=w) for w in (0.5, 0.0))
    before = arrays_of(make_trainer(texts).trainee.network)
    for name, array in moved.items():
        assert np.allclose(array - plain[name], -0.5e-3 * before[name], atol=1e-6)


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
