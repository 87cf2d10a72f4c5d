"""A drafter in training, over many blocks at once; here is all that knows DFlash's network class.

`Network.__call__` runs one block behind a cache. Here the layers' own attention and MLP run over A
blocks in each of S sequences, and the context's keys and values, computed once per sequence, are
shared by all of its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.dflash.fields import VERSION_1
from dflash_mlx.drafters.dflash.network import ConvolvedLayer, Network, NetworkConfig
from dflash_mlx.drafters.networks.files import parameters_of
from dflash_mlx.drafters.networks.layers import Layer
from dflash_mlx.drafters.networks.model import embedding_scale
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train.attention import BlockCache, TextCache, block_mask
from dflash_mlx.train.blocks import Array, Blocks
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.data import Texts, rank_in_parts
from dflash_mlx.train.trainee import (
    LAYERS,
    START_FROM,
    TAPS,
    Trainee,
    like_target,
    mask_token,
    spread_aux_layers,
    take_layers,
)
from dflash_mlx.verifier.model import Target

_VERSION_2_FIELDS = ("conv_", "selector_", "block_size", "projector_type")


@dataclass(frozen=True)
class DFlashTrainee(Trainee):
    """DFlash, or D2SD's variable-prefix drafter."""

    network: Network
    config: NetworkConfig
    files: ClassVar[Any] = FILES

    @classmethod
    def new(cls, config: TrainConfig, pair: Pair) -> DFlashTrainee:
        """With the widths of the target's layers, in z-lab's format; see `TrainConfig.start`."""
        target, layers = pair.target, config.layers or LAYERS
        raw = {
            **like_target(target, layers, config),
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "dflash_config": {
                "mask_token_id": mask_token(pair.tokenizer),
                "target_layer_ids": list(spread_aux_layers(target, config.taps, TAPS)),
            },
            "layer_types": ["full_attention"] * layers,
            "num_target_layers": target.num_layers,
        }
        trainee = cls.fresh(raw, target, config.seed)
        if config.start == "target":
            take_layers(trainee, range(target.num_layers - layers, target.num_layers))
        return trainee

    @classmethod
    def read(cls, folder: Path, target: Target) -> DFlashTrainee:
        """An existing drafter; of the second version only without convolutions."""
        trainee = super().read(folder, target)
        trainee.network.drop_idle_convolutions(trainee.config)
        if any(isinstance(layer, ConvolvedLayer) for layer in trainee.network.layers):
            raise DFlashError(f"{folder} holds a DFlash 2 drafter with convolutions", START_FROM)
        return trainee

    def prepared(self, mode: str, block_size: int | None = None) -> DFlashTrainee:
        """Without a selector, and with the mode in its config.json."""
        plain = self.without_selector()
        trainee = super(DFlashTrainee, plain).prepared(mode, block_size)
        method = trainee.raw["dflash_config"]
        method.pop("training_mode", None)
        if block_size is not None:
            method.pop("block_size", None)  # which wins over the one beside `dflash_config`
        if mode == "variable-prefix":
            method["training_mode"] = "vp_drafter"
        return trainee

    def without_selector(self) -> DFlashTrainee:
        """This drafter as version 1; a selector fits only the states that it was trained for."""
        if not self.config.selector_rank:
            return self
        method = self.raw["dflash_config"].items()
        plain = {k: v for k, v in method if not k.startswith(_VERSION_2_FIELDS)}
        size = {"block_size": self.config.block_size}
        raw = {**self.raw, "architectures": [VERSION_1], **size, "dflash_config": plain}
        self.network.pop("candidate_selector")
        config = FILES.parse_config(raw, "the drafter", parameters_of(self.network))
        return DFlashTrainee(self.network, config, raw, self.target)

    @property
    def sees_prefixes(self) -> bool:
        """Whether it is D2SD's variable-prefix drafter."""
        return bool(self.raw["dflash_config"].get("training_mode") == "vp_drafter")

    def drafts(self, states: mx.array, before: Array) -> Array:
        # A selector goes by the true token before, as its own path does up to the first wrong
        # draft, behind which nothing counts.
        if not self.config.selector_rank:
            return super().drafts(states, before)
        ranked = rank_in_parts(self.logits, states.flatten(0, 2), self.config.selector_top_k)
        tokens, selector = mx.array(ranked.tokens), self.network.candidate_selector
        edges = selector.edges(states.flatten(0, 2), mx.array(before.reshape(-1, 1)), tokens)
        best = (ranked.logprobs + np.array(edges)[:, 0]).argmax(axis=-1)
        drafts: Array = np.take_along_axis(ranked.tokens, best[:, None], axis=-1)
        return drafts.reshape(before.shape)

    def inputs(self, texts: Texts, blocks: Blocks) -> tuple[mx.array, mx.array, mx.array]:
        """Features [S, T, m*d], anchors [S, A] and embeddings [S, A, B, d] for `states`.

        Of a sequence whose beginning no block's window reaches, that is left out, and its anchors
        count from what is left: rotary embeddings know only distances.
        """
        windows = [window for window in self.config.layer_windows if window is not None]
        everything = len(windows) < len(self.config.layer_windows)
        seen = blocks.anchors.min(axis=1) + 1 - max(windows, default=0)
        starts = np.maximum(0, seen) * (not everything)
        anchors = blocks.anchors - starts[:, None]
        features = texts.features(blocks.rows, starts, int(anchors.max()))
        scale = self.config.input_embedding_scale * embedding_scale(self.target)
        x = self.embed(blocks.inputs(self.config.mask_token_id)) * scale
        return features, mx.array(anchors), x

    def states(self, *inputs: mx.array) -> mx.array:
        features, anchors, x = inputs
        network, shape, rows = self.network, x.shape, x.flatten(0, 1)
        context = network.hidden_norm(network.fc(features))
        kinds = list(zip(self.config.layer_windows, self.config.layer_causal, strict=True))
        masks = {
            kind: block_mask(anchors, shape[2], features.shape[1], *kind) for kind in set(kinds)
        }
        for layer, kind in zip(network.layers, kinds, strict=True):
            at_start: Any = TextCache()
            cache: Any = BlockCache(anchors, layer.self_attn.remember(context, at_start))
            # Convolutions beside a selector that was trained here change nothing
            rows = Layer.__call__(layer, rows, masks[kind], cache)  # type: ignore[arg-type]
        return network.norm(rows).reshape(shape)  # type: ignore[no-any-return]
