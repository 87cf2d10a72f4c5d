"""A tiny drafter learns twenty answers by heart, and what is measured is what decoding accepts."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train import evaluate
from dflash_mlx.train.corpus.rows import CorpusRow
from dflash_mlx.train.data import Texts
from dflash_mlx.train.evaluate import ANCHORS, hits_at, measure, walk
from dflash_mlx.train.trainee import Trainee
from dflash_mlx.train.trainer import Trainer
from support.reference_dflash import hidden_states
from support.tiny_training import (
    arrays_of,
    decoded,
    drafter_config,
    greedy_rows,
    make_trainee,
    make_trainer,
    sampled_row,
    texts_of,
    tiny_target,
)

RAW = drafter_config()
BLOCK = RAW["block_size"]
ANSWER = 40


def known() -> tuple[CorpusRow, ...]:
    return greedy_rows(20, ANSWER)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return texts_of(tmp_path_factory.mktemp("features"), known())


@pytest.fixture(scope="module")
def trained(texts: Texts) -> Trainer:
    """A drafter that knows twenty answers, in about 1,000 blocks of each."""
    shape = {"sequences": 10, "anchors": 16}
    trainer = make_trainer(texts, RAW, steps=200, learning_rate=8e-3, warmup=10, **shape)
    list(trainer.losses())
    return trainer


def test_a_drafter_overfits_twenty_sequences(trained, texts):
    assert measure(make_trainee(RAW), texts).tokens_per_round < 1.5
    assert measure(trained.trainee, texts).tokens_per_round > 6
    assert walk(trained.trainee, texts).tokens_per_round > 6


def test_decoding_accepts_what_was_measured(trained, texts, tmp_path):
    trained.trainee.save(tmp_path)
    saved = Trainee.read(tmp_path, tiny_target())
    target = tiny_target()
    pair = Pair(target, None, (BlockModel(saved.network, saved.config, target),))
    drafter = make_drafter(pair, DecodeConfig("dflash"))
    answers = [decoded(target, drafter, row) for row in known()]
    assert [tuple(sum(map(list, rounds), [])) for rounds in answers] == [
        row.answer for row in known()
    ]
    lengths = [len(tokens) for rounds in answers for tokens in rounds]
    walked = 1 + walk(saved, texts).hits.sum(axis=-1)
    over = walked - lengths  # a walk counts the token behind an answer's last one
    assert over.min() == 0 and over.max() == 1 and over.sum() <= len(known())
    assert np.mean(lengths) > 6


# Measuring


def hits_by_loops(trainer: Trainer, texts: Texts, prefix: int) -> np.ndarray:
    """Text after text, anchor after anchor, by the NumPy drafter."""
    tensors = arrays_of(trainer.trainee.network)
    table = np.array(tiny_target().embedding().weight)
    result = []
    for i, text in enumerate(texts.sequences):
        anchors = text.anchors[: max(1, len(text.anchors) - prefix)]
        spread = np.linspace(0, len(anchors) - 1, ANCHORS).round().astype(int)
        for anchor in anchors[spread]:
            features = np.array(texts.features([i], int(anchor))[0])
            tokens = [int(t) for t in text.tokens[anchor : anchor + 1 + prefix]]
            tokens += [0] * (prefix + 1 - len(tokens)) + [5] * (BLOCK - 1 - prefix)
            logits = hidden_states(tensors, RAW, table[tokens], features) @ table.T
            hits = []
            for k in range(prefix + 1, BLOCK):
                at = anchor + k
                right = at < len(text.tokens) and logits[k].argmax() == text.choices[at - 1]
                hits.append(bool(right) and all(hits))
                if at < len(text.tokens) and text.tokens[at] != text.choices[at - 1]:
                    hits += [False] * (BLOCK - 1 - prefix - len(hits))
                    break
            result.append(hits)
    return np.array(result, float)


@pytest.mark.parametrize("prefix", [0, 2, BLOCK - 2])
def test_a_measurement_is_what_loops_over_texts_and_anchors_find(trained, tmp_path, prefix):
    rows = [*known()[:3], *greedy_rows(12, 9, seed=1)[:6], sampled_row("s", known()[4])]
    texts = texts_of(tmp_path / "cache", rows)  # more than one batch, known texts and new ones
    found = measure(trained.trainee, texts, prefix)
    expected = hits_by_loops(trained, texts, prefix)
    assert 0 < expected.mean() < 1
    assert np.array_equal(found.hits, expected)
    assert found.tokens_per_round == pytest.approx(1 + expected.sum(axis=-1).mean())
    assert found.by_position == pytest.approx(expected.mean(axis=0))


@pytest.mark.parametrize("chunk", [2048, 24])
def test_a_walk_begins_every_round_where_the_one_before_ended(
    trained, tmp_path, monkeypatch, chunk
):
    monkeypatch.setattr(evaluate, "_CHUNK", chunk)
    texts = texts_of(tmp_path / "cache", [*known()[:2], greedy_rows(12, 9, seed=1)[0]])
    walked, rounds = walk(trained.trainee, texts).hits, []
    for i, text in enumerate(texts.sequences):
        place = 0
        while place < len(text.anchors):
            anchor = text.anchors[place : place + 1][None]
            rounds.append(hits_at(trained.trainee, texts, np.array([i]), anchor)[0, 0])
            place += 1 + int(rounds[-1].sum())
    assert np.array_equal(walked, rounds)
