"""What a selector in training goes by: candidates, weights, the loss, and the law of anchors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.train.blocks import SAMPLERS
from dflash_mlx.train.selector import SelectorTrainer
from support.families import VOCAB_SIZE
from support.tiny_selector import RAW, trainer_of, walks
from support.tiny_training import arrays_of, greedy_rows, make_trainee, make_trainer, texts_of


def laws_by_loops(trainer: SelectorTrainer) -> list[tuple[float, bool]]:
    """The probability of the right candidate at every position of the first step, or of all other
    tokens where it is none; and whether it is one."""
    blocks = trainer._sampler.blocks(0)
    states, before, tokens, logprobs, *_ = map(np.array, trainer.batch(blocks))
    assert np.array_equal(before, blocks.tokens[..., :-1].reshape(-1))
    edges = np.array(trainer.maps(*map(mx.array, (states, before, tokens))))
    result: list[tuple[float, bool]] = []
    for i, label in enumerate(blocks.labels[..., 1:].reshape(-1)):
        scores = logprobs[i].astype(np.float64) + edges[i]
        others = max(1 - np.exp(logprobs[i]).sum(), 1e-6)
        law = np.append(np.exp(scores), others) / (np.exp(scores).sum() + others)
        among = bool(label in tokens[i])
        result.append((law[tokens[i].tolist().index(label) if among else -1], among))
    return result


def weights_by_loops(trainer: SelectorTrainer) -> list[float]:
    """Of the positions of the first step, 1 in all."""
    drafter, blocks = trainer.trainee, trainer._sampler.blocks(0)
    states = drafter.states(*drafter.inputs(trainer._texts, blocks))
    words = trainer.vocabulary.tokens
    chosen = words[np.array(drafter.logits(states))[..., words].argmax(axis=-1)]
    result = []
    for s, a in np.ndindex(blocks.anchors.shape):
        weight = 1.0
        for k in range(1, drafter.config.block_size):
            label = blocks.labels[s, a, k]
            known = blocks.supervised[s, a, k] and label in words
            result.append(weight * known)
            if chosen[s, a, k] != label:
                weight = 0.25
    return [weight / sum(result) for weight in result]


def loss_by_loops(laws: list[tuple[float, bool]], weights: list[float]) -> float:
    return -sum(w * np.log(c) for w, (c, _) in zip(weights, laws, strict=True))


@pytest.fixture(params=[VOCAB_SIZE, 40])
def mixed(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[SelectorTrainer, list[float]]:
    """A trainer, with the weights of its first step's positions.

    Some right tokens are not candidates, and with a small draft vocabulary not in that; a text
    was sampled; and the drafter has learned a little, so that some of its drafts are right.
    """
    rows = [*greedy_rows(3, 20), replace(greedy_rows(3, 20)[0], answer=tuple(range(9)))]
    texts = texts_of(tmp_path, rows)
    learner = make_trainer(texts, RAW, learning_rate=0.01)
    for _ in range(20):
        learner.train_step()
    drafter = learner.trainee
    size = request.param
    trainer = trainer_of(drafter, texts, top_k=20, sequences=4, draft_vocabulary=size)
    outside = trainer.vocabulary.index[trainer._sampler.blocks(0).labels] < 0
    assert outside.any() == (size < VOCAB_SIZE)
    return trainer, weights_by_loops(trainer)


def test_the_loss_is_over_the_candidates_and_all_other_tokens_together(mixed):
    trainer, weights = mixed
    laws = laws_by_loops(trainer)
    assert 0.05 < np.mean([among for _, among in laws]) < 0.95
    shares = sorted(set(np.round(np.array(weights) / max(weights), 6)))
    assert shares == [0, 0.25, 1]  # not counted, behind a wrong draft, and up to it
    assert trainer.train_step() == pytest.approx(loss_by_loops(laws, weights), rel=1e-4)


def test_candidates_are_the_likeliest_of_the_draft_vocabulary(tmp_path):
    texts = texts_of(tmp_path, greedy_rows(3, 20))
    trainer = trainer_of(make_trainee(RAW), texts, top_k=9, draft_vocabulary=40)
    blocks = trainer._sampler.blocks(0)
    states, _, tokens, logprobs, right, _ = map(np.array, trainer.batch(blocks))
    words = trainer.vocabulary.tokens
    logits = np.array(make_trainee(RAW).logits(mx.array(states)))[:, words]
    law = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    best = np.argsort(-law, axis=-1)[:, :9]
    assert np.array_equal(tokens, words[best])
    assert np.abs(np.take_along_axis(law, best, axis=-1) - logprobs).max() < 1e-4
    assert np.array_equal(right, tokens == blocks.labels[..., 1:].reshape(-1, 1))


@pytest.mark.parametrize("law", SAMPLERS)
def test_the_anchors_follow_the_chosen_law(law):
    trainer = trainer_of(make_trainee(RAW), walks(3, 0), anchor_law=law)
    assert type(trainer._sampler) is SAMPLERS[law]


def test_a_step_in_which_nothing_counts_leaves_finite_weights():
    texts = walks(2, 0)
    trainer = trainer_of(make_trainee(RAW), texts, top_k=5, draft_vocabulary=10)
    absent = int(np.flatnonzero(trainer.vocabulary.index < 0)[0])
    unknown = np.full((41, 1), absent)
    outside = [replace(t, sequence=replace(t.sequence, likely=unknown)) for t in texts.texts]
    texts = replace(texts, texts=outside)
    trainer = trainer_of(make_trainee(RAW), texts, top_k=5, draft_vocabulary=10)
    assert trainer.train_step() == 0
    assert all(np.isfinite(array).all() for array in arrays_of(trainer.maps).values())
