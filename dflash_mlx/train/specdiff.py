"""A masked diffusion drafter in training: texts run causally beside the blocks that continue them.

At inference the text's keys and values are cached. Here both streams run side by side, layer by
layer, and the gradient goes through both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.networks.model import embedding_scale
from dflash_mlx.drafters.specdiff.checkpoint import FILES, OURS
from dflash_mlx.drafters.specdiff.model import Network, NetworkConfig
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train.attention import BlockCache, TextCache, block_mask, text_mask
from dflash_mlx.train.blocks import Blocks
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.data import Texts
from dflash_mlx.train.trainee import LAYERS, Trainee, like_target, mask_token, take_layers


@dataclass(frozen=True)
class SpecDiffTrainee(Trainee):
    """Reads tokens alone; a block sees the text before its anchor, and all of itself."""

    network: Network
    config: NetworkConfig
    files: ClassVar[Any] = FILES

    @classmethod
    def new(cls, config: TrainConfig, pair: Pair) -> SpecDiffTrainee:
        """With the widths of the target's own layers; it starts as some of these, evenly spread."""
        if config.taps is not None:
            what = f"taps is {config.taps}, but a SpecDiff drafter reads no layers"
            raise DFlashError(what, "leave it out", "taps")
        target, count = pair.target, config.layers or LAYERS
        names = {name.partition("self_attn.")[2] for name, _ in target.parameters()}
        raw = {
            **like_target(target, count, config),
            "architectures": [OURS],
            "mask_token_id": mask_token(pair.tokenizer),
            "head_norms": "q_norm.weight" in names,
            "attention_bias": "q_proj.bias" in names,
        }
        trainee = cls.fresh(raw, target, config.seed)
        if config.start == "target":
            spread = np.linspace(0, target.num_layers - 1, count).round().astype(int)
            take_layers(trainee, spread.tolist())
        return trainee

    def inputs(self, texts: Texts, blocks: Blocks) -> tuple[mx.array, ...]:
        """Embeddings of texts [S, T, d], anchors [S, A] and embeddings of blocks [S, A, B, d]."""
        text = texts.tokens(blocks.rows, 0, int(blocks.anchors.max()))
        shown, scale = blocks.inputs(self.config.mask_token_id), embedding_scale(self.target)
        return self.embed(text) * scale, mx.array(blocks.anchors), self.embed(shown) * scale

    def states(self, *inputs: mx.array) -> mx.array:
        text, anchors, x = inputs
        network, shape, rows = self.network, x.shape, x.flatten(0, 1)
        windows = set(self.config.layer_windows)
        sizes = shape[2], text.shape[1]
        masks = {w: block_mask(anchors, *sizes, w, causal=False) for w in windows}
        before = {w: text_mask(sizes[1], w) for w in windows}
        last = network.layers[-1]
        for layer, window in zip(network.layers, self.config.layer_windows, strict=True):
            cache: Any = TextCache()
            if layer is last:  # whose keys and values are all that blocks read of it
                layer.self_attn.remember(layer.input_layernorm(text), cache)
            else:
                text = layer(text, before[window], cache)
            own: Any = BlockCache(anchors, cache.context)
            rows = layer(rows, masks[window], own)
        return network.norm(rows).reshape(shape)  # type: ignore[no-any-return]
