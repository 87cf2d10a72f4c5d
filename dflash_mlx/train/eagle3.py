"""EAGLE-3 in training: step after step on its own outputs ("training-time test").

Every block unrolls the steps of a draft: its first row knows the target's features before the
anchor, every other one what the row before it made of them (arXiv 2503.01840, section 3.2). The
tokens are those of the text, and its rows before the anchor are what a context keeps of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.eagle3.checkpoint import FILES, LAYERS_READ, RAW
from dflash_mlx.drafters.eagle3.model import (
    USUAL_TAPS,
    EagleConfig,
    Network,
    increase,
    usual_layers,
)
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train.attention import BlockCache, TextCache, block_mask
from dflash_mlx.train.blocks import Blocks
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.data import Texts
from dflash_mlx.train.trainee import (
    Trainee,
    like_target,
    spread_aux_layers,
    take_layers,
)
from dflash_mlx.verifier.model import Target


@dataclass(frozen=True)
class EagleTrainee(Trainee):
    """Drafts with its target's embedding and head."""

    network: Network
    config: EagleConfig
    files: ClassVar[Any] = FILES

    @classmethod
    def new(cls, config: TrainConfig, pair: Pair) -> EagleTrainee:
        """One layer, the target's last or noise, behind the last tap, and deaf to the token."""
        if config.layers not in (1, None):
            what = f"layers is {config.layers}, but an EAGLE-3 drafter has one"
            raise DFlashError(what, "leave it out", "layers")
        target = pair.target
        raw = {
            **like_target(target, 1, config),
            "architectures": [RAW],
            "model_type": "llama",
            "eagle_config": {LAYERS_READ: list(_aux_layers(target, config))},
            "num_target_layers": target.num_layers,
        }
        trainee = cls.fresh(raw, target, config.seed)
        if config.start == "target":
            take_layers(trainee, [target.num_layers - 1], _called)
        return trainee

    @classmethod
    def read(cls, folder: Path, target: Target) -> EagleTrainee:
        found = super().read(folder, target)
        aux_layers = found.config.layers_read(target.num_layers)
        return replace(found, config=replace(found.config, aux_layers=aux_layers))

    def inputs(self, texts: Texts, blocks: Blocks) -> tuple[mx.array, ...]:
        """What `states` takes.

        Features [S, T, m*D], embeddings [S, T, d] of the tokens behind them, anchors [S, A], and
        embeddings [S, A, B - 1, d] of the blocks' tokens but the last.
        """
        length, starts = max(1, int(blocks.anchors.max())), np.zeros(len(blocks.rows), np.int64)
        features = texts.features(blocks.rows, starts, length)
        behind = self.embed(texts.tokens(blocks.rows, 1, length))
        return features, behind, mx.array(blocks.anchors), self.embed(blocks.tokens[..., :-1])

    def states(self, *inputs: mx.array) -> mx.array:
        features, behind, anchors, x = inputs
        network, (_, _, steps, d) = self.network, x.shape
        h, before = network.fuse(features), anchors - 1  # of the first row: the anchor's is its h
        text: Any = TextCache()
        context = network.midlayer.self_attn.remember(network.midlayer.pair(behind, h), text)
        masks = block_mask(before, steps, h.shape[1], self.config.layer_windows[0], causal=True)
        cache: Any = _StepCache(before, context)
        rows, seen = x.reshape(-1, steps, d), masks.shape[-1] - steps
        last = mx.take_along_axis(h, mx.maximum(before, 0)[..., None], axis=1).reshape(-1, 1, d)
        found = [mx.zeros_like(last)]
        for step in range(steps):
            mask = masks[..., step : step + 1, : seen + step + 1]
            final, last = network(rows[:, step : step + 1], last, mask, cache)
            found.append(final)
        return mx.concatenate(found, axis=1).reshape(*anchors.shape, steps + 1, d)


class _StepCache(BlockCache):
    def __init__(self, first: mx.array, context: tuple[mx.array, mx.array]) -> None:
        super().__init__(first, context)
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._keys.append(keys)
        self._values.append(values)
        self.offset = self.offset + 1
        return mx.concatenate(self._keys, axis=2), mx.concatenate(self._values, axis=2)


def _called(_: int, name: str) -> str:
    # The norm before a layer is that of the features here; that of the embeddings is its own.
    return f"midlayer.{name.replace('input_layernorm', 'hidden_norm')}"


def _aux_layers(target: Target, config: TrainConfig) -> tuple[int, ...]:
    if config.taps is None and increase(usual := usual_layers(target.num_layers)):
        return usual
    return spread_aux_layers(target, config.taps, USUAL_TAPS)
