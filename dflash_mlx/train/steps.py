"""What every training has in common: blocks, AdamW, a schedule, and how far the run is."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from tqdm import tqdm

from dflash_mlx.core.config import SelectorTraining, TrainConfig
from dflash_mlx.train.blocks import SAMPLERS, Blocks
from dflash_mlx.train.data import Texts
from dflash_mlx.train.trainee import Trainee
from dflash_mlx.train.vocabulary import DraftVocabulary

_FLOOR = 0.02  # of the peak, where the cosine ends
_Event = TypeVar("_Event")
_Config = TypeVar("_Config", TrainConfig, SelectorTraining)


class Training(ABC, Generic[_Config]):
    """Steps of AdamW, and where they are in the data.

    module: what is trained, the trainee's network or a part beside it. step: steps done. seconds:
    spent in steps. tokens: in their blocks, anchors included. All over all runs.
    """

    def __init__(
        self,
        module: nn.Module,
        trainee: Trainee,
        texts: Texts,
        config: _Config,
        prefix_base: float | None = None,
        short_share: float = 0.0,
    ) -> None:
        """prefix_base, short_share: as for `BlockSampler`."""
        self.trainee = trainee
        self.config: _Config = config
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self._module, self._texts = module, texts
        self._sampler = SAMPLERS[config.anchor_law](
            texts.sequences,
            trainee.config.block_size,
            (config.sequences, config.anchors),
            config.seed,
            prefix_base,
            short_share,
        )
        self.vocabulary = DraftVocabulary(trainee, texts, config.draft_vocabulary)
        self.optimizer = optim.AdamW(
            learning_rate=0.0,
            betas=[0.9, 0.95],
            weight_decay=config.weight_decay,
            bias_correction=True,
        )
        self.optimizer.init(module.trainable_parameters())
        mx.eval(self.optimizer.state)
        self._gradients = nn.value_and_grad(module, self._loss)

    @abstractmethod
    def batch(self, blocks: Blocks) -> tuple[mx.array, ...]:
        """The arrays of `blocks` that the loss takes."""

    @abstractmethod
    def _loss(self, batch: tuple[mx.array, ...]) -> mx.array:
        """The loss of a batch."""

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
        """One step; returns its loss."""
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
        """The loss of every step until the time or the steps are used up."""
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
