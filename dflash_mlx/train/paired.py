"""EAGLE-3 and heads for multi-token prediction in training: they pair a token with a state.

Every block unrolls the steps of a draft: its first row knows the target's features before the
anchor, every other one what the row before it made of them ("training-time test", EAGLE-3, arXiv
2503.01840, section 3.2). The tokens are those of the text, and its rows before the anchor are what
a context keeps of it, see `networks/paired.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import require
from dflash_mlx.drafters.eagle3 import checkpoint as eagle3
from dflash_mlx.drafters.eagle3.model import USUAL_TAPS, EagleConfig, increase, usual_layers
from dflash_mlx.drafters.mtp import checkpoint as mtp
from dflash_mlx.drafters.mtp.kinds import text_of
from dflash_mlx.drafters.mtp.model import HeadConfig
from dflash_mlx.drafters.networks.fields import Fields
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train.attention import BlockCache, TextCache, block_mask
from dflash_mlx.train.blocks import Blocks
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.data import Texts
from dflash_mlx.train.trainee import (
    BLOCK_SIZE,
    START_FROM,
    Trainee,
    like_target,
    spread_aux_layers,
    take_layers,
)
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target

_TOKENS = 64  # that tell how large a target's states are


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


@dataclass(frozen=True)
class EagleTrainee(PairedTrainee):
    """EAGLE-3's layer and what it makes of three layers' features."""

    config: EagleConfig
    files: ClassVar[Any] = eagle3.FILES

    @classmethod
    def new(cls, config: TrainConfig, pair: Pair) -> EagleTrainee:
        """One layer, the target's last or noise, behind the last tap, and deaf to the token."""
        alone, target = config.layers in (1, None), pair.target
        require(alone, "layers", config.layers, "1, as an EAGLE-3 drafter has one")
        raw = {
            **like_target(target, 1, config),
            "architectures": [eagle3.RAW],
            "model_type": "llama",
            "eagle_config": {eagle3.LAYERS_READ: list(_aux_layers(target, config))},
            "num_target_layers": target.num_layers,
        }
        trainee = cls.fresh(raw, target, config.seed)
        if config.start == "target":
            take_layers(trainee, [target.num_layers - 1], _called)
        return trainee


def _called(_: int, name: str) -> str:
    # The norm before a layer is that of the features here; that of the embeddings is its own.
    return f"midlayer.{name.replace('input_layernorm', 'hidden_norm')}"


def _aux_layers(target: Target, config: TrainConfig) -> tuple[int, ...]:
    if config.taps is None and increase(usual := usual_layers(target.num_layers)):
        return usual
    return spread_aux_layers(target, config.taps, USUAL_TAPS)


@dataclass(frozen=True)
class HeadTrainee(PairedTrainee):
    """A head for multi-token prediction: one layer of the target's own kind."""

    config: HeadConfig
    files: ClassVar[Any] = mtp.FILES

    def __post_init__(self) -> None:
        self.network.bind(self.target)

    @classmethod
    def new(cls, config: TrainConfig, pair: Pair) -> HeadTrainee:
        """The target's last layer or noise, behind its last states, and deaf to the token."""
        for name in ("layers", "taps"):
            given, said = getattr(config, name), "1, as a head for multi-token prediction has one"
            require(given in (1, None), name, given, said)
        target = pair.target
        args: Any = getattr(target.model, "args", None)
        if args is None:
            what = f"{target.name} does not say how its layers are built"
            raise DFlashError(what, "start from a head that fits it, with --init")
        states: Fields = {"hidden_normed": False, "feeds_normed": False}
        raw = mtp.our_config(
            text_of(asdict(args)), block_size=config.block_size or BLOCK_SIZE, **states
        )
        trainee = cls.fresh(raw, target, config.seed)
        if config.start == "target":
            take_layers(trainee, [target.num_layers - 1])
            norm = trainee.network.pre_fc_norm_hidden
            norm.weight = norm.weight * _size_of_states(target)  # those that its layer is used to
        return trainee


def _size_of_states(target: Target) -> mx.array:
    """Root mean square of the last layer's states, of most tokens."""
    last = (target.num_layers - 1,)
    target.tap(last)
    _, states = target.forward(mx.arange(_TOKENS), target.new_cache(), Block(_TOKENS), last)
    assert states is not None
    sizes = mx.sqrt(states.square().mean(axis=-1))
    return mx.sort(sizes)[len(sizes) // 2]  # of some tokens they are far larger than of others
