"""A drafter's own training: the batch of a step, and its loss."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from dflash_mlx.core.config import TrainConfig
from dflash_mlx.train.blocks import Blocks
from dflash_mlx.train.data import Texts
from dflash_mlx.train.loss import cross_entropy, decay_weights, dpace_weights, soft_shares
from dflash_mlx.train.steps import Training
from dflash_mlx.train.trainee import Trainee


class Trainer(Training[TrainConfig]):
    """Trains a drafter's network."""

    def __init__(self, trainee: Trainee, texts: Texts, config: TrainConfig) -> None:
        prefix_base = config.prefix_base if config.mode == "variable-prefix" else None
        network = trainee.network
        super().__init__(network, trainee, texts, config, prefix_base, config.short_share)

    def batch(self, blocks: Blocks) -> tuple[mx.array, ...]:
        """What the loss takes; see there."""
        labels = self.vocabulary.index[blocks.likely].reshape(-1, blocks.likely.shape[-1])
        weights = decay_weights(blocks.prefixes, blocks.tokens.shape[-1], self.config.tau)
        places = np.flatnonzero(blocks.supervised.reshape(-1) & (labels[:, 0] >= 0))
        labels, shares = labels[places], blocks.shares.reshape(labels.shape)[places]
        shares = soft_shares(shares, labels >= 0, self.config.soft)
        arrays = (places, np.maximum(labels, 0), shares, weights.reshape(-1)[places])
        return *self.trainee.inputs(self._texts, blocks), *(mx.array(array) for array in arrays)

    def _loss(self, batch: tuple[mx.array, ...]) -> mx.array:
        """Weighted mean of the cross-entropies.

        batch: features [S, T, m*d]; anchors [S, A]; x [S, A, B, d]; [N] indices into S*A*B of the
        positions that are trained on; labels [N, K] in the draft vocabulary; [N, K] shares, what
        the drafter should give them; [N] weights of the decay loss.
        """
        features, anchors, x, places, labels, shares, weights = batch
        states, vocabulary = self.trainee.states(features, anchors, x), self.vocabulary
        rows = vocabulary.head_inputs(states.flatten(0, 2)[places])
        losses, confidences = cross_entropy(
            rows, vocabulary.head, labels, shares, vocabulary.softcap
        )
        if self.config.loss == "dpace":
            shape, zeros = states.shape[:-1], mx.zeros(math.prod(states.shape[:-1]))
            dense = zeros.at[places].add(confidences).reshape(shape)
            supervised = zeros.at[places].add(1.0).reshape(shape)
            weights = dpace_weights(dense, supervised > 0, self.config.alpha)
            weights = weights.reshape(-1)[places]
        return (weights * losses).sum() / mx.maximum(weights.sum(), 1e-9)  # 0 / 0 without places
