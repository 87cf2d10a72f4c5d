"""A drafter in training. Here and in `packed.py` is all that knows DFlash's network class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.block_model import capped, embedding_scale
from dflash_mlx.drafters.dflash.checkpoint import (
    check_fit,
    load_network,
    parse_config,
    read_config,
    read_drafter,
    save_drafter,
)
from dflash_mlx.drafters.dflash.config_file import VERSION_1
from dflash_mlx.drafters.dflash.network import ConvolvedLayer, Network, NetworkConfig
from dflash_mlx.target.model import Target
from dflash_mlx.train.blocks import Blocks
from dflash_mlx.train.data import Texts
from dflash_mlx.train.features import hidden_width, vocabulary_size
from dflash_mlx.train.packed import hidden_states

_VERSION_2_FIELDS = ("conv_", "selector_", "block_size")
_START_FROM = "choose a DFlash drafter of the first version, in full precision"
_NOISE = 0.02  # standard deviation of fresh weights


@dataclass(frozen=True)
class Trainee:
    """A network in float32 with its configuration, and the target that it is to draft for.

    It borrows the target's embedding and head. raw: its config.json in z-lab's format.
    """

    network: Network
    config: NetworkConfig
    raw: dict[str, Any]
    target: Target

    @classmethod
    def of(cls, raw: dict[str, Any], target: Target) -> Trainee:
        """What a config.json describes, with weights that mean nothing yet."""
        config = parse_config(raw, "the drafter")
        return cls(Network(config), config, raw, target)

    @classmethod
    def fresh(cls, raw: dict[str, Any], target: Target, seed: int) -> Trainee:
        """What a config.json describes, with norms at one and small noise everywhere else."""
        new, noise, weights = cls.of(raw, target), mx.random.key(seed), []
        for name, array in new.weights().items():
            noise, key = mx.random.split(noise)
            weight = mx.random.normal(array.shape, key=key) * _NOISE
            weights.append((name, mx.ones(array.shape) if array.ndim == 1 else weight))
        new.network.load_weights(weights)
        mx.eval(new.network.parameters())
        return new

    @classmethod
    def read(cls, folder: Path, target: Target) -> Trainee:
        """An existing drafter.

        Raises DFlashError for one that does not fit the target, or cannot be trained here.
        """
        config = read_config(folder)
        sizes = {"hidden_size": hidden_width(target), "vocab_size": vocabulary_size(target)}
        check_fit(config, {**sizes, "num_hidden_layers": target.num_layers}, target.name)
        if config.own_head or config.own_embedding or config.quantization:
            raise DFlashError(
                f"{folder} holds a drafter with its own vocabulary, or a quantised one", _START_FROM
            )
        network = load_network(folder, config, mx.float32)
        if any(isinstance(layer, ConvolvedLayer) for layer in network.layers):
            raise DFlashError(f"{folder} holds a DFlash 2 drafter with convolutions", _START_FROM)
        return cls(network, config, read_drafter(folder).raw, target)

    def save(self, folder: Path) -> None:
        """Write a drafter folder; OSError where the disk is full."""
        save_drafter(folder, self.network, self.raw)

    def without_selector(self) -> Trainee:
        """The same drafter as version 1: a selector was trained for the states that it had."""
        if self.config.selector is None:
            return self
        method = self.raw["dflash_config"].items()
        plain = {k: v for k, v in method if not k.startswith(_VERSION_2_FIELDS)}
        size = {"block_size": self.config.block_size}
        raw = {**self.raw, "architectures": [VERSION_1], **size, "dflash_config": plain}
        self.network.pop("candidate_selector")
        config = replace(self.config, convolution=None, selector=None)
        return Trainee(self.network, config, raw, self.target)

    def weights(self) -> dict[str, mx.array]:
        """The network's arrays by the names that they have in a folder."""
        return dict(tree_flatten(self.network.parameters()))

    def inputs(self, texts: Texts, blocks: Blocks) -> tuple[mx.array, mx.array, mx.array]:
        """Features [S, T, m*d], anchors [S, A] and embeddings [S, A, B, d] for `states`."""
        features = texts.features(blocks.rows, int(blocks.anchors.max()))
        shown = mx.array(blocks.inputs(self.config.mask_token_id))
        rows = self.target.embedding()(shown).astype(mx.float32)
        x = rows * (self.config.input_embedding_scale * embedding_scale(self.target))
        return features, mx.array(blocks.anchors), x

    def states(self, features: mx.array, anchors: mx.array, x: mx.array) -> mx.array:
        """Final hidden states [S, A, B, d], see `hidden_states`."""
        return hidden_states(self.network, self.config, features, anchors, x)

    def logits(self, states: mx.array) -> mx.array:
        """[..., V] from final states [..., d]."""
        logits = self.target.head()(states * self.config.output_multiplier)
        return capped(logits, self.config.final_logit_softcapping)
