"""A candidate selector in training: its codebooks are linear maps of the target's embedding.

So what is learned from one token holds for its like, and tokens that no text had are not noise.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from dflash_mlx.drafters.dflash.config_file import VERSION_2
from dflash_mlx.drafters.dflash.selector import CandidateSelector, SelectorConfig
from dflash_mlx.train.trainee import Trainee

_ROWS = 4096  # of a codebook that are computed at once
_SAMPLE = 1024  # tokens whose rows give the scale


class EmbeddingRows:
    """A target's embedding in float32, scaled so that its rows are about of length one."""

    def __init__(self, embedding: nn.Module, vocabulary: int) -> None:
        self._embedding, self.vocabulary = embedding, vocabulary
        ids = mx.array(np.linspace(0, vocabulary - 1, _SAMPLE).astype(int))
        rows = embedding(ids).astype(mx.float32)
        self._scale = 1 / mx.linalg.norm(rows, axis=-1).mean()

    def __call__(self, tokens: mx.array) -> mx.array:
        """[..., d]."""
        rows: mx.array = self._embedding(tokens).astype(mx.float32) * self._scale
        return rows


class MappedSelector(nn.Module):
    """A selector whose codebooks are linear maps of the target's embedding."""

    def __init__(self, d: int, rank: int, rows: EmbeddingRows, seed: int) -> None:
        super().__init__()
        keys = mx.random.split(mx.random.key(seed), 3)
        sizes = (2.0, 2.0, 0.3)  # of what the three maps give; their product starts small
        self._rows = rows
        self.predecessor, self.successor, self.hidden = (
            mx.random.normal((d, rank), key=key) * (size * d**-0.5)
            for key, size in zip(keys, sizes, strict=True)
        )

    def __call__(self, hidden: mx.array, before: mx.array, tokens: mx.array) -> mx.array:
        """[N, k] edges from tokens before [N] to candidates [N, k] at states [N, d]."""
        context = (self._rows(before) @ self.predecessor) * (hidden @ self.hidden)
        edges: mx.array = (self._rows(tokens) @ self.successor) @ context[..., None]
        return edges[..., 0]

    def selector(self, config: SelectorConfig) -> CandidateSelector:
        """The same with its codebooks written out."""
        vocabulary = self._rows.vocabulary
        result = CandidateSelector(vocabulary, self.hidden.shape[0], config)
        ids = [mx.arange(i, min(i + _ROWS, vocabulary)) for i in range(0, vocabulary, _ROWS)]
        result.predecessor_codebook = mx.concatenate(
            [self._rows(i) @ self.predecessor for i in ids]
        )
        result.successor_codebook = mx.concatenate([self._rows(i) @ self.successor for i in ids])
        result.hidden_projection.weight = self.hidden.T
        mx.eval(result.parameters())
        return result


def with_selector(trainee: Trainee, maps: MappedSelector, config: SelectorConfig) -> Trainee:
    """The drafter with a selector, as version 2.

    Version 2 has convolutions around its sub-layers too. Here they are the identity, of one tap,
    which whoever loads the folder may leave out, as we do.
    """
    method = {
        **trainee.raw["dflash_config"],
        "block_size": trainee.config.block_size,
        "conv_group_size": trainee.config.hidden_size,
        "conv_kernel_size": 1,
        "selector_rank": config.rank,
        "selector_top_k": config.top_k,
    }
    plain = {name: value for name, value in trainee.raw.items() if name != "block_size"}
    raw = {**plain, "architectures": [VERSION_2], "dflash_config": method}
    result, selector = Trainee.of(raw, trainee.target), maps.selector(config)
    flat: Any = tree_flatten(selector.parameters())
    weights = trainee.weights() | {f"candidate_selector.{name}": array for name, array in flat}
    for name, array in result.weights().items():
        if "_conv." in name:
            made = mx.ones if name.endswith("base_kernel") else mx.zeros
            weights[name] = made(array.shape)
    result.network.load_weights(list(weights.items()))
    mx.eval(result.network.parameters())
    return result
