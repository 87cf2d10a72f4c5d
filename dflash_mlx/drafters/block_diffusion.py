"""DFlash: a block of tokens drafted in one pass, conditioned on the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from dflash_mlx.cache import LayerCache, SequenceCache
from dflash_mlx.drafters.checkpoint import check_block_size
from dflash_mlx.drafters.network import Network, NetworkConfig
from dflash_mlx.state import State
from dflash_mlx.target import Target
from dflash_mlx.tree import Tree


class FeatureContext:
    """The drafter's keys and values of the committed tokens' features, per layer."""

    def __init__(self, network: Network, windows: tuple[int | None, ...]) -> None:
        self._network = network
        self.cache = SequenceCache([LayerCache(window) for window in windows])

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.cache.length

    @property
    def arrays(self) -> list[mx.array]:
        """Keys and values of all layers."""
        return self.cache.arrays

    def append(self, features: mx.array) -> None:
        """Take in the features [n, m*d] of the next n committed tokens."""
        self._network.append(features, self.cache)

    def can_trim(self, length: int) -> bool:
        """Whether every layer can go back to `length`."""
        return self.cache.can_trim(length)

    def trim(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        self.cache.trim(length)


class BlockDiffusion:
    """DFlash (arXiv 2602.06036): [anchor, mask, ..., mask] -> gamma - 1 tokens in one pass.

    block_size: gamma, 2 up to the size the drafter was trained for (its default).
    Raises DFlashError for another size, and for a target whose embedding cannot be found.
    """

    name = "dflash"
    rounds_ahead = 0

    def __init__(
        self, network: Network, config: NetworkConfig, target: Target, block_size: int | None = None
    ) -> None:
        check_block_size(block_size, config)
        self.block_size = block_size or config.block_size
        self.taps = config.target_layer_ids
        self._network = network
        self._config = config
        self._embed: Any = target.embedding()
        self._head: Callable[[mx.array], mx.array] = target.head()
        target.tap(self.taps)

    def new_context(self) -> FeatureContext:
        """An empty context for one sequence."""
        return FeatureContext(self._network, self._config.layer_windows)

    def propose(self, state: State, room: int) -> Tree:
        """The block's most likely tokens as a chain of min(block_size, room) nodes."""
        rows = min(self.block_size, room)
        if rows == 1:
            return Tree.chain(state.anchor)
        tokens = mx.argmax(self.logits(state, rows), axis=-1)
        tree = Tree.chain(mx.concatenate([state.anchor, tokens.astype(state.anchor.dtype)]))
        mx.async_eval(tree.tokens)
        return tree

    def logits(self, state: State, rows: int) -> mx.array:
        """[rows - 1, V] for positions 1 .. rows - 1 of a block of `rows`."""
        assert isinstance(state.context, FeatureContext)
        config = self._config
        masks = mx.full((rows - 1,), config.mask_token_id, dtype=state.anchor.dtype)
        block = self._embed(mx.concatenate([state.anchor, masks])[None])
        hidden = self._network(block * config.input_embedding_scale, state.context.cache)
        logits = self._head(hidden[0, 1:] * config.output_multiplier)
        if (cap := config.final_logit_softcapping) is not None:
            logits = mx.tanh(logits / cap) * cap
        return logits
