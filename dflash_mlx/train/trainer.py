"""One training step, and the state that a run stops and goes on with."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from dflash_mlx.core.config import TrainConfig
from dflash_mlx.drafters.dflash.network import Network, NetworkConfig
from dflash_mlx.target.model import Target
from dflash_mlx.train.blocks import SAMPLERS, Blocks
from dflash_mlx.train.data import Texts
from dflash_mlx.train.evaluate import embed
from dflash_mlx.train.loss import cross_entropy, decay_weights, dpace_weights, soft_shares
from dflash_mlx.train.packed import hidden_states
from dflash_mlx.train.schedule import share_of_peak
from dflash_mlx.train.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class Batch:
    """A step's arrays: features [S, T, m*d], anchors [S, A], x [S, A, B, d].

    places: [N] indices into S*A*B of the positions that are trained on. labels: [N, K] in the
    draft vocabulary. shares: [N, K], what the drafter should give them. decay: [N] weights of the
    decay loss.
    """

    features: mx.array
    anchors: mx.array
    x: mx.array
    places: mx.array
    labels: mx.array
    shares: mx.array
    decay: mx.array


class Trainer:
    """A drafter network, its optimiser, and where they are in the data.

    step: steps done. seconds: spent in steps. tokens: in their blocks, anchors included. All over
    all runs.
    """

    def __init__(
        self,
        network: Network,
        network_config: NetworkConfig,
        target: Target,
        texts: Texts,
        config: TrainConfig,
    ) -> None:
        self.network, self.network_config, self.config = network, network_config, config
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self._target, self._texts = target, texts
        self._sampler = SAMPLERS[config.anchor_law](
            texts.sequences,
            network_config.block_size,
            (config.sequences, config.anchors),
            config.seed,
            config.prefix_base if config.mode == "variable-prefix" else None,
            config.short_share,
        )
        self.optimizer = optim.AdamW(
            learning_rate=0.0,
            betas=[0.9, 0.95],
            weight_decay=config.weight_decay,
            bias_correction=True,
        )
        self.optimizer.init(network.trainable_parameters())
        self.vocabulary = DraftVocabulary(target, network_config, texts, config.draft_vocabulary)
        mx.eval(self.optimizer.state)
        self._gradients = nn.value_and_grad(network, self._loss)

    @property
    def progress(self) -> float:
        """From 0 to 1, by steps or by minutes, whichever the run is measured in."""
        if self.config.steps is not None:
            return min(1.0, self.step / self.config.steps)
        assert self.config.minutes is not None
        return min(1.0, self.seconds / (60 * self.config.minutes))

    def train_step(self) -> float:
        """One step; returns its loss."""
        started = time.perf_counter()
        blocks = self._sampler.blocks(self.step)
        loss, gradients = self._gradients(self.batch(blocks))
        gradients, _ = optim.clip_grad_norm(gradients, self.config.clip)
        self.optimizer.learning_rate = self.learning_rate()
        self.optimizer.update(self.network, gradients)
        mx.eval(self.network.parameters(), self.optimizer.state, loss)
        self.step += 1
        self.tokens += blocks.tokens.size
        self.seconds += time.perf_counter() - started
        return float(loss)

    def learning_rate(self) -> float:
        """Of the next step."""
        share = share_of_peak(self.step, self.config.warmup, self.progress)
        return self.config.learning_rate * share

    def batch(self, blocks: Blocks) -> Batch:
        """The arrays of `blocks`."""
        config = self.network_config
        labels = self.vocabulary.index[blocks.likely].reshape(-1, blocks.likely.shape[-1])
        weights = decay_weights(blocks.prefixes, blocks.tokens.shape[-1], self.config.tau)
        places = np.flatnonzero(blocks.supervised.reshape(-1) & (labels[:, 0] >= 0))
        labels, shares = labels[places], blocks.shares.reshape(labels.shape)[places]
        return Batch(
            features=self._texts.features(blocks.rows, int(blocks.anchors.max())),
            anchors=mx.array(blocks.anchors),
            x=embed(self._target, config, blocks.inputs(config.mask_token_id)),
            places=mx.array(places),
            labels=mx.array(np.maximum(labels, 0)),
            shares=mx.array(soft_shares(shares, labels >= 0, self.config.soft)),
            decay=mx.array(weights.reshape(-1)[places]),
        )

    def _loss(self, batch: Batch) -> mx.array:
        """Weighted mean of the cross-entropies."""
        config = self.network_config
        hidden = hidden_states(self.network, config, batch.features, batch.anchors, batch.x)
        vocabulary = self.vocabulary
        rows = vocabulary.head_inputs(hidden.flatten(0, 2)[batch.places])
        losses, confidences = cross_entropy(
            rows, vocabulary.head, batch.labels, batch.shares, vocabulary.softcap
        )
        weights = batch.decay if self.config.loss == "decay" else self._dpace(batch, confidences)
        return (weights * losses).sum() / mx.maximum(weights.sum(), 1e-9)  # 0 / 0 without places

    def _dpace(self, batch: Batch, confidences: mx.array) -> mx.array:
        shape = batch.x.shape[:-1]
        count = math.prod(shape)
        dense = mx.zeros(count).at[batch.places].add(confidences).reshape(shape)
        supervised = mx.zeros(count).at[batch.places].add(1.0).reshape(shape)
        weights = dpace_weights(dense, supervised > 0, self.config.alpha)
        return weights.reshape(-1)[batch.places]
