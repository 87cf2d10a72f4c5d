"""One training step, and the state that a run stops and goes on with."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from dflash_mlx.config import TrainConfig
from dflash_mlx.drafters.network import Network, NetworkConfig
from dflash_mlx.target import Target
from dflash_mlx.train.blocks import Array, Blocks, BlockSampler, RoundStartSampler
from dflash_mlx.train.data import Texts
from dflash_mlx.train.evaluate import embed
from dflash_mlx.train.loss import cross_entropy, decay_weights, dpace_weights, soft_shares
from dflash_mlx.train.packed import hidden_states
from dflash_mlx.train.schedule import share_of_peak


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
        sampler = RoundStartSampler if config.anchor_law == "starts" else BlockSampler
        self._sampler = sampler(
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
        self._vocabulary, self._index = self._draft_vocabulary()
        self._head = _head_rows(target, network_config.hidden_size, self._vocabulary)
        mx.eval(self._head, self.optimizer.state)
        self._gradients = nn.value_and_grad(network, self._loss)

    @property
    def progress(self) -> float:
        """From 0 to 1, by steps or by minutes, whichever the run is measured in."""
        if self.config.steps is not None:
            return min(1.0, self.step / self.config.steps)
        assert self.config.minutes is not None
        return min(1.0, self.seconds / (60 * self.config.minutes))

    @property
    def covered(self) -> float:
        """Share of the answers' tokens that are in the draft vocabulary."""
        answers = np.concatenate([s.tokens[s.prompt_length :] for s in self._texts.sequences])
        return float((self._index[answers] >= 0).mean())

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
        labels = self._index[blocks.likely].reshape(-1, blocks.likely.shape[-1])
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
        rows = hidden.flatten(0, 2)[batch.places] * config.output_multiplier
        if self._head.shape[1] > rows.shape[1]:  # the head has a bias
            rows = mx.concatenate([rows, mx.ones((rows.shape[0], 1))], axis=-1)
        losses, confidences = cross_entropy(
            rows, self._head, batch.labels, batch.shares, config.final_logit_softcapping
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

    def _draft_vocabulary(self) -> tuple[Any, Any]:
        """Token ids, most frequent in the answers first, and the index of every id, -1 if none."""
        size = self.config.draft_vocabulary or max(1, self.network_config.vocab_size // 4)
        counts: Counter[int] = Counter()
        for sequence in self._texts.sequences:
            counts.update(sequence.tokens[sequence.prompt_length :].tolist())
        chosen = sorted(counts, key=lambda token: (-counts[token], token))[:size]
        chosen += [t for t in range(self.network_config.vocab_size) if t not in counts][
            : max(0, size - len(chosen))
        ]
        index = np.full(self.network_config.vocab_size, -1)
        index[chosen] = np.arange(len(chosen))
        return np.array(chosen), index


def _head_rows(target: Target, width: int, vocabulary: Array) -> mx.array:
    """[V', d] weights of the target's head for these tokens; [V', d + 1] where it has a bias."""
    head = target.head()
    bias = head(mx.zeros((1, width)))
    weights = head(mx.eye(width)) - bias
    parts = [weights, bias] if mx.any(bias != 0).item() else [weights]
    rows = mx.concatenate(parts).T[mx.array(vocabulary)]
    return mx.contiguous(rows.astype(mx.float32))
