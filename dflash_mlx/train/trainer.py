"""A drafter's own training: the batch of a step, and its loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.core.config import TrainConfig
from dflash_mlx.train.blocks import Blocks
from dflash_mlx.train.data import Texts
from dflash_mlx.train.loss import cross_entropy, decay_weights, dpace_weights, soft_shares
from dflash_mlx.train.steps import Training
from dflash_mlx.train.trainee import Trainee


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


class Trainer(Training[TrainConfig]):
    """Trains a drafter's network."""

    def __init__(self, trainee: Trainee, texts: Texts, config: TrainConfig) -> None:
        prefix_base = config.prefix_base if config.mode == "variable-prefix" else None
        network = trainee.network
        super().__init__(network, trainee, texts, config, prefix_base, config.short_share)

    def batch(self, blocks: Blocks) -> Batch:
        """The arrays of `blocks`."""
        labels = self.vocabulary.index[blocks.likely].reshape(-1, blocks.likely.shape[-1])
        weights = decay_weights(blocks.prefixes, blocks.tokens.shape[-1], self.config.tau)
        places = np.flatnonzero(blocks.supervised.reshape(-1) & (labels[:, 0] >= 0))
        labels, shares = labels[places], blocks.shares.reshape(labels.shape)[places]
        return Batch(
            *self.trainee.inputs(self._texts, blocks),
            places=mx.array(places),
            labels=mx.array(np.maximum(labels, 0)),
            shares=mx.array(soft_shares(shares, labels >= 0, self.config.soft)),
            decay=mx.array(weights.reshape(-1)[places]),
        )

    def _loss(self, batch: Batch) -> mx.array:
        """Weighted mean of the cross-entropies."""
        states = self.trainee.states(batch.features, batch.anchors, batch.x)
        vocabulary = self.vocabulary
        rows = vocabulary.head_inputs(states.flatten(0, 2)[batch.places])
        losses, confidences = cross_entropy(
            rows, vocabulary.head, batch.labels, batch.shares, vocabulary.softcap
        )
        weights = batch.decay
        if self.config.loss == "dpace":
            shape, zeros = batch.x.shape[:-1], mx.zeros(math.prod(batch.x.shape[:-1]))
            dense = zeros.at[batch.places].add(confidences).reshape(shape)
            supervised = zeros.at[batch.places].add(1.0).reshape(shape)
            weights = dpace_weights(dense, supervised > 0, self.config.alpha)
            weights = weights.reshape(-1)[batch.places]
        return (weights * losses).sum() / mx.maximum(weights.sum(), 1e-9)  # 0 / 0 without places
