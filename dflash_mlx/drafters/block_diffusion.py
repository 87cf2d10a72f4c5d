"""DFlash: a block of tokens drafted in one pass, conditioned on the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from dflash_mlx.drafters.checkpoint import check_block_size
from dflash_mlx.drafters.context import FeatureContext
from dflash_mlx.drafters.network import Network, NetworkConfig
from dflash_mlx.state import State
from dflash_mlx.target import Target
from dflash_mlx.tree import Tree


class BlockModel:
    """A drafter network with the embedding and the head it borrows from its target.

    Raises DFlashError for a target whose embedding cannot be found.
    """

    def __init__(self, network: Network, config: NetworkConfig, target: Target) -> None:
        self.config = config
        self.kernels = target.kernels
        self._network = network
        self._embed: Any = target.embedding()
        self._head: Callable[[mx.array], mx.array] = target.head()
        target.tap(config.target_layer_ids)

    def new_context(self) -> FeatureContext:
        """An empty context for one sequence."""
        return FeatureContext(self._network, self.config.layer_windows, self.kernels)

    def logits(
        self,
        context: FeatureContext,
        anchor: mx.array,
        rows: int,
        prefixes: Sequence[Sequence[int]] = ((),),
    ) -> mx.array:
        """[n, V] for what follows each prefix in a block of `rows`, one prefix after the other.

        anchor: [1]. prefixes: drafted tokens that the block shows unmasked (D2SD's second draft,
        arXiv 2606.04446, 3.3); a prefix of l tokens has rows - 1 - l masks. All blocks go through
        the network in one pass over the one context.
        """
        config = self.config
        blocks: list[mx.array] = []
        masked: list[int] = []
        for i, prefix in enumerate(prefixes):
            masks = [config.mask_token_id] * (rows - 1 - len(prefix))
            hidden = mx.array([*prefix, *masks], dtype=anchor.dtype)
            blocks += [anchor, hidden]
            masked += range(i * rows + 1 + len(prefix), (i + 1) * rows)
        x = self._embed(mx.concatenate(blocks)[None]) * config.input_embedding_scale
        hidden = self._network(x, context.cache, branches=len(prefixes))
        hidden = hidden[0, 1:] if len(masked) == x.shape[1] - 1 else hidden[0, mx.array(masked)]
        logits = self._head(hidden * config.output_multiplier)
        if (cap := config.final_logit_softcapping) is not None:
            logits = mx.tanh(logits / cap) * cap
        return logits


class BlockDiffusion:
    """DFlash (arXiv 2602.06036): [anchor, mask, ..., mask] -> gamma - 1 tokens in one pass.

    block_size: gamma, 2 up to the size the drafter was trained for (its default).
    Raises DFlashError for another size.
    """

    name = "dflash"
    rounds_ahead = 0

    def __init__(self, model: BlockModel, block_size: int | None = None) -> None:
        check_block_size(block_size, model.config)
        self.block_size = block_size or model.config.block_size
        self.taps = model.config.target_layer_ids
        self._model = model

    def new_context(self) -> FeatureContext:
        """An empty context for one sequence."""
        return self._model.new_context()

    def propose(self, state: State, room: int) -> Tree:
        """The block's most likely tokens as a chain of min(block_size, room) nodes."""
        rows = min(self.block_size, room)
        if rows == 1:
            return Tree.chain(state.anchor)
        assert isinstance(state.context, FeatureContext)
        logits = self._model.logits(state.context, state.anchor, rows)
        tokens = mx.argmax(logits, axis=-1).astype(state.anchor.dtype)
        tree = Tree.chain(mx.concatenate([state.anchor, tokens]))
        mx.async_eval(tree.tokens)
        return tree
