"""Drafters that pair a token with a state: step after step on their own outputs, in training.

Every block unrolls the steps of a draft: its first row knows the target's features before the
anchor, every other one what the row before it made of them ("training-time test", EAGLE-3, arXiv
2503.01840, section 3.2). The tokens are those of the text, and its rows before the anchor are what
a context keeps of it, see `networks/paired.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.train.attention import BlockCache, TextCache, block_mask
from dflash_mlx.train.blocks import Blocks
from dflash_mlx.train.data import Texts
from dflash_mlx.train.trainee import START_FROM, Trainee


@dataclass(frozen=True)
class PairedTrainee(Trainee):
    """Drafts with its target's embedding and head; its network has one layer."""

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
        network, (*_, steps, d) = self.network, x.shape
        h, before = network.fuse(features), anchors - 1  # of the first row: the anchor's is its h
        text: Any = _Rows()
        network.remember(behind, h, text)
        masks = block_mask(before, steps, h.shape[1], self.config.layer_windows[0], causal=True)
        cache = _StepCache(before, text.context)
        rows, seen = x.reshape(-1, steps, d), masks.shape[-1] - steps
        last = mx.take_along_axis(h, mx.maximum(before, 0)[..., None], axis=1).reshape(-1, 1, d)
        found = [mx.zeros_like(last)]
        for step in range(steps):
            mask = masks[..., step : step + 1, : seen + step + 1]
            final, last = network(rows[:, step : step + 1], last, mask, cache)
            found.append(final)
        return mx.concatenate(found, axis=1).reshape(*anchors.shape, steps + 1, d)


class _Rows(TextCache):
    """Keys and values of a text; what its rows attend to nobody asks for."""

    attends = True  # itself, whichever module asks: ours or mlx-lm's

    def make_mask(self, rows: int, **_: Any) -> None:
        return None

    def attend(self, q: mx.array, *_: mx.array, sinks: Any = None, **__: Any) -> mx.array:
        if sinks is not None:
            raise DFlashError("layers with attention sinks are not trained here", START_FROM)
        return q


class _StepCache(BlockCache):
    attends = True

    def __init__(self, first: mx.array, context: tuple[mx.array, mx.array]) -> None:
        super().__init__(first, context)
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._keys.append(keys)
        self._values.append(values)
        self.offset = self.offset + 1
        return mx.concatenate(self._keys, axis=2), mx.concatenate(self._values, axis=2)

    def attend(self, *parts: mx.array, sinks: Any = None, **how: Any) -> mx.array:
        return super().attend(*parts, **how)
