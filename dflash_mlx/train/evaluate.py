"""Acceptance length on held-out texts, position by position, before any decoding is done."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.network import Network, NetworkConfig
from dflash_mlx.target import Target
from dflash_mlx.train.blocks import Array, cut_blocks
from dflash_mlx.train.data import Texts
from dflash_mlx.train.packed import hidden_states

ANCHORS = 16  # per text


@dataclass(frozen=True)
class Acceptance:
    """hits: [texts, ANCHORS, B - 1 - prefix], 1 where this and all earlier drafts are right."""

    hits: Array

    @property
    def by_position(self) -> list[float]:
        """Share of blocks whose first k drafts are all right, k = 1, 2, ..."""
        return [float(share) for share in self.hits.mean(axis=(0, 1))]

    @property
    def tokens_per_round(self) -> float:
        """1 + the mean number of leading drafts that are right."""
        return 1 + float(self.hits.sum(axis=-1).mean())


def measure(
    network: Network, config: NetworkConfig, target: Target, texts: Texts, prefix: int = 0
) -> Acceptance:
    """Draft at 16 anchors of every text, with `prefix` true tokens visible after the anchor.

    Teacher-forced and greedy: a draft is right when it is the target's choice. In sampled texts it
    counts as wrong behind the first token that is not, so measure with greedy texts.
    """
    hits = []
    for start in range(0, len(texts.sequences), 8):
        chosen = np.arange(start, min(start + 8, len(texts.sequences)))
        anchors = np.stack([_spread(texts.sequences[i].anchors) for i in chosen])
        prefixes = np.full(anchors.shape, prefix)
        blocks = cut_blocks(texts.sequences, chosen, anchors, config.block_size, prefixes)
        x = embed(target, config, blocks.inputs(config.mask_token_id))
        features = texts.features(chosen, int(anchors.max()))
        hidden = hidden_states(network, config, features, mx.array(anchors), x)
        logits = target.head()(hidden[:, :, prefix + 1 :] * config.output_multiplier)
        drafts = np.array(mx.argmax(logits, axis=-1))
        right = (drafts == blocks.labels[..., prefix + 1 :]) & blocks.supervised[..., prefix + 1 :]
        hits.append(np.cumprod(right, axis=-1))
    return Acceptance(np.concatenate(hits))


def embed(target: Target, config: NetworkConfig, inputs: Array) -> mx.array:
    """Block embeddings [..., d] in float32."""
    rows = target.embedding()(mx.array(inputs)).astype(mx.float32)
    return rows * config.input_embedding_scale  # type: ignore[no-any-return]


def _spread(anchors: Array) -> Array:
    """ANCHORS of them, evenly."""
    chosen: Array = anchors[np.linspace(0, len(anchors) - 1, ANCHORS).round().astype(int)]
    return chosen
