"""Training steps: blocks, AdamW, a schedule; and a drafter's own loss."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from tqdm import tqdm

from dflash_mlx.train.blocks import SAMPLERS, Blocks
from dflash_mlx.train.config import StepConfig, TrainConfig
from dflash_mlx.train.data import Texts
from dflash_mlx.train.loss import (
    DraftVocabulary,
    cross_entropy,
    decay_weights,
    dpace_weights,
    soft_shares,
)
from dflash_mlx.train.trainee import Trainee

_FLOOR = 0.02  # of the peak, where the cosine ends
_Event = TypeVar("_Event")


class Training(ABC):
    """Steps of AdamW, and where they are in the data: what every training has in common."""

    config: StepConfig

    def __init__(
        self,
        module: nn.Module,  # what is trained, the trainee's network or a part beside it
        trainee: Trainee,
        texts: Texts,
        config: StepConfig,
        **law: Any,  # further settings of the sampler
    ) -> None:
        self.trainee, self.config = trainee, config
        self.step, self.seconds = 0, 0.0  # done, and spent in them, over all runs
        self.tokens = 0  # in their blocks, anchors included
        self._module, self._texts = module, texts
        self._sampler = SAMPLERS[config.anchor_law](
            texts.texts,
            trainee.config.block_size,
            (config.sequences, config.anchors),
            config.seed,
            **law,
        )
        self.vocabulary = DraftVocabulary(trainee, texts, config.draft_vocabulary)
        decay = config.weight_decay
        self.optimizer = optim.AdamW(0.0, [0.9, 0.95], weight_decay=decay, bias_correction=True)
        self.optimizer.init(module.trainable_parameters())
        mx.eval(self.optimizer.state)
        self._gradients = nn.value_and_grad(module, self._loss)

    @abstractmethod
    def batch(self, blocks: Blocks) -> tuple[mx.array, ...]:
        """The arrays of `blocks` that the loss takes."""

    @abstractmethod
    def _loss(self, batch: tuple[mx.array, ...]) -> mx.array: ...

    @property
    def progress(self) -> float:
        """From 0 to 1, by steps or by minutes, whichever the run is measured in."""
        if self.config.steps is not None:
            return min(1.0, self.step / self.config.steps)
        assert self.config.minutes is not None
        return min(1.0, self.seconds / (60 * self.config.minutes))

    def learning_rate(self) -> float:
        """Of the next step: linear warm-up, then a cosine down to a fiftieth of the peak."""
        rising = min(1.0, (self.step + 1) / (self.config.warmup + 1))
        falling = (1 + math.cos(math.pi * self.progress)) / 2
        return self.config.learning_rate * rising * (_FLOOR + (1 - _FLOOR) * falling)

    def train_step(self) -> float:
        started = time.perf_counter()
        blocks = self._sampler.blocks(self.step)
        loss, gradients = self._gradients(self.batch(blocks))
        gradients, _ = optim.clip_grad_norm(gradients, self.config.clip)
        self.optimizer.learning_rate = self.learning_rate()
        self.optimizer.update(self._module, gradients)
        mx.eval(self._module.parameters(), self.optimizer.state, loss)
        self.step += 1
        self.tokens += blocks.tokens.size
        self.seconds += time.perf_counter() - started
        return float(loss)

    def losses(self) -> Iterator[float]:
        while self.progress < 1:
            yield self.train_step()

    def show(self, events: Iterable[_Event]) -> Iterator[_Event]:
        """Hand on what a run yields, behind a progress bar with the newest loss."""
        with tqdm(total=100, unit="%", bar_format="{l_bar}{bar}| {elapsed} {postfix}") as bar:
            for event in events:
                bar.n = round(100 * self.progress, 1)
                if isinstance(event, float):
                    bar.set_postfix_str(f"step {self.step} loss {event:.3f}")
                bar.refresh()
                yield event


class Trainer(Training):
    """Trains a drafter's network."""

    config: TrainConfig

    def __init__(self, trainee: Trainee, texts: Texts, config: TrainConfig) -> None:
        law: dict[str, Any] = {"short_share": config.short_share}
        if config.mode == "variable-prefix":
            law |= {"prefix_base": config.prefix_base, "least_prefix": config.least_prefix}
        if config.mode == "specdiff":
            law["reveal_share"] = config.reveal_share
        super().__init__(trainee.network, trainee, texts, config, **law)

    def batch(self, blocks: Blocks) -> tuple[mx.array, ...]:
        labels = self.vocabulary.index[blocks.likely].reshape(-1, blocks.likely.shape[-1])
        weights = decay_weights(blocks.prefixes, blocks.tokens.shape[-1], self.config.tau)
        places = np.flatnonzero(blocks.supervised.reshape(-1) & (labels[:, 0] >= 0))
        labels, shares = labels[places], blocks.shares.reshape(labels.shape)[places]
        shares = soft_shares(shares, labels >= 0, self.config.soft)
        arrays = (places, np.maximum(labels, 0), shares, weights.reshape(-1)[places])
        return *self.trainee.inputs(self._texts, blocks), *(mx.array(array) for array in arrays)

    def _loss(self, batch: tuple[mx.array, ...]) -> mx.array:
        """Weighted mean of the cross-entropies.

        batch: the trainee's inputs; [N] indices into S*A*B of the
        positions that are trained on; labels [N, K] in the draft vocabulary; [N, K] shares, what
        the drafter should give them; [N] weights of the decay loss.
        """
        *inputs, places, labels, shares, weights = batch
        states = self.trainee.states(*inputs)
        logits = self.vocabulary.logits(states.flatten(0, 2)[places])
        losses, confidences = cross_entropy(logits, labels, shares)
        if self.config.loss == "dpace":
            shape, zeros = states.shape[:-1], mx.zeros(math.prod(states.shape[:-1]))
            dense = zeros.at[places].add(confidences).reshape(shape)
            supervised = zeros.at[places].add(1.0).reshape(shape)
            weights = dpace_weights(dense, supervised > 0, self.config.alpha)
            weights = weights.reshape(-1)[places]
        return (weights * losses).sum() / mx.maximum(weights.sum(), 1e-9)  # 0 / 0 without places
