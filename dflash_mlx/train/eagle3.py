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
from dflash_mlx.drafters.eagle3.network import (
    USUAL_TAPS,
    EagleConfig,
    Network,
    increase,
    usual_layers,
)
from dflash_mlx.drafters.networks.tensors import parameters_of
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train.attention import BlockCache, TextCache, block_mask
from dflash_mlx.train.blocks import Blocks
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.data import Texts
from dflash_mlx.train.start import BLOCK_SIZE, check_taps, dense, like_target, spread_aux_layers
from dflash_mlx.train.trainee import Trainee
from dflash_mlx.verifier.model import Target

_START_FROM = "choose an EAGLE-3 drafter in full precision, or train a new one"


@dataclass(frozen=True)
class EagleTrainee(Trainee):
    """Drafts with its target's embedding and head."""

    network: Network
    config: EagleConfig
    files: ClassVar[Any] = FILES

    @classmethod
    def new(cls, config: TrainConfig, pair: Pair) -> EagleTrainee:
        """One layer with the widths of the target's own; see `TrainConfig.start`."""
        if config.layers not in (1, None):
            what = f"layers is {config.layers}, but an EAGLE-3 drafter has one"
            raise DFlashError(what, "leave it out", "layers")
        raw = {
            **like_target(pair.target, 1),
            "architectures": [RAW],
            "model_type": "llama",
            "block_size": config.block_size or BLOCK_SIZE,
            "eagle_config": {LAYERS_READ: list(_aux_layers(pair.target, config))},
            "num_target_layers": pair.target.num_layers,
        }
        trainee = cls.fresh(raw, pair.target, config.seed)
        if config.start == "target":
            trainee.take_last_layer()
        return trainee

    @classmethod
    def check_trainable(cls, folder: Path, config: EagleConfig) -> None:
        """Raise DFlashError for a drafter that cannot be trained here."""
        if config.own_head or config.own_embedding or config.quantization:
            what = f"{folder} holds a drafter with an embedding or a head of its own, or packed"
            raise DFlashError(what, _START_FROM)

    @classmethod
    def read(cls, folder: Path, target: Target) -> EagleTrainee:
        """An existing drafter; raises as `Trainee.read` does."""
        found = super().read(folder, target)
        aux_layers = found.config.layers_read(target.num_layers)
        return replace(found, config=replace(found.config, aux_layers=aux_layers))

    def take_last_layer(self) -> None:
        """Begin as the target's last layer behind the last tap, deaf to the token.

        Raises DFlashError for a target whose layers are built otherwise.
        """
        target, network = self.target, self.network
        norm = getattr(getattr(target.model, "model", None), "norm", None)
        given = {} if norm is None else {"norm.weight": norm.weight}
        for name, array in dense(target.model.layers[-1]).items():
            given[f"midlayer.{name.replace('input_layernorm', 'hidden_norm')}"] = array
        taken = [("fc.weight", _ending_with(network.fc.weight, mx.eye(self.config.hidden_size)))]
        for name, own in parameters_of(network).items():
            theirs = given.get(name)
            if theirs is not None and theirs.ndim == own.ndim and len(theirs) == len(own):
                taken.append((name, _ending_with(own, theirs.astype(mx.float32))))
        if not any(name.endswith("down_proj.weight") for name, _ in taken):
            what = f"the layers of {target.name} are not built like a drafter's"
            raise DFlashError(what, "use --start random")
        network.load_weights(taken, strict=False)
        mx.eval(network.parameters())

    def inputs(self, texts: Texts, blocks: Blocks) -> tuple[mx.array, ...]:
        """What `states` takes."""
        length = max(1, int(blocks.anchors.max()))
        features = texts.features(blocks.rows, np.zeros(len(blocks.rows), np.int64), length)
        behind = np.zeros((len(blocks.rows), length), np.int64)
        for i, row in enumerate(blocks.rows):
            tokens = texts.texts[row].tokens[1 : length + 1]
            behind[i, : len(tokens)] = tokens
        own = self._embed(blocks.tokens[..., :-1])
        return features, self._embed(behind), mx.array(blocks.anchors), own

    def _embed(self, tokens: Any) -> mx.array:
        rows: mx.array = self.target.embedding()(mx.array(tokens))
        return rows.astype(mx.float32)

    def states(self, *inputs: mx.array) -> mx.array:
        """Final hidden states [S, A, B, d] of A blocks in each of S sequences.

        inputs: features [S, T, m*D], padded at the end; embeddings [S, T, d] of the tokens behind
        them; anchors [S, A]; embeddings [S, A, B - 1, d] of the blocks' tokens but the last.
        """
        features, behind, anchors, x = inputs
        network, (_, _, steps, d) = self.network, x.shape
        (window,) = self.config.layer_windows
        h, before = network.fuse(features), anchors - 1  # of the first row: the anchor's is its h
        text: Any = TextCache()
        context = network.midlayer.self_attn.remember(network.midlayer.pair(behind, h), text)
        masks = block_mask(before, steps, h.shape[1], window, causal=True)
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
    """For rows of blocks that come one after the other, each behind those before it."""

    def __init__(self, first: mx.array, context: tuple[mx.array, mx.array]) -> None:
        super().__init__(first, context)
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._keys.append(keys)
        self._values.append(values)
        self.offset = self.offset + 1
        return mx.concatenate(self._keys, axis=2), mx.concatenate(self._values, axis=2)


def _ending_with(own: mx.array, given: mx.array) -> mx.array:
    """`own` with `given` in place of its last columns, or of all of it."""
    width = given.shape[-1]
    return mx.concatenate([own[..., : own.shape[-1] - width], given], axis=-1)


def _aux_layers(target: Target, config: TrainConfig) -> tuple[int, ...]:
    """The usual ones, or as many as are asked for, evenly spread.

    Of a small target, where the usual ones are not three layers, as many as it has up to three.
    Raises as `check_taps` does.
    """
    check_taps(target, config)
    if config.taps is not None:
        return spread_aux_layers(target.num_layers, config.taps)
    usual = usual_layers(target.num_layers)
    return usual if increase(usual) else spread_aux_layers(target.num_layers, USUAL_TAPS)
