"""Tiny selectors in training, for tests."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.core.config import SelectorTraining
from dflash_mlx.train.blocks import TextTokens
from dflash_mlx.train.corpus.rows import CorpusRow
from dflash_mlx.train.data import Text, Texts
from dflash_mlx.train.selector import SelectorTrainer
from dflash_mlx.train.trainee import Trainee
from support.families import VOCAB_SIZE
from support.tiny_training import TAPS, WIDTH, drafter_config

RAW = drafter_config(block_size=6)


def trainer_of(trainee: Trainee, texts: Texts, **settings: Any) -> SelectorTrainer:
    given = {"rank": 16, "top_k": 97, "sequences": 2, "anchors": 8, "warmup": 5, "steps": 100}
    given = {**given, "draft_vocabulary": VOCAB_SIZE, "learning_rate": 0.005}
    config = SelectorTraining(**{**given, **settings})
    return SelectorTrainer(trainee, texts, config)


class Noise:
    """Features that say nothing of the text that they are of."""

    def features(self, place: int) -> mx.array:
        rows = np.random.default_rng(place).normal(size=(60, len(TAPS) * WIDTH))
        return mx.array(rows.astype(np.float32))


def walks(count: int, first: int) -> Texts:
    """Texts in which every token is decided by the one before, and by nothing else."""
    order = np.random.default_rng(0).permutation(VOCAB_SIZE)
    after = dict(zip(order.tolist(), np.roll(order, -1).tolist(), strict=True))  # one cycle
    texts: list[Text] = []
    cache: Any = Noise()
    for i in range(first, first + count):
        tokens = [i * 7 % VOCAB_SIZE]
        for _ in range(40):
            tokens.append(after[tokens[-1]])
        likely = np.array([[after[token]] for token in tokens])
        row = CorpusRow(str(i), "", (), (), 0.0)
        sequence = TextTokens(np.array(tokens), 4, likely, np.ones((41, 1)))
        texts.append(Text(row, i, sequence, cache, i))
    return Texts("walks", texts)
