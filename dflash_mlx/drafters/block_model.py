"""A drafter network bound to its target: logits of blocks, whatever tree they become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from dflash_mlx.drafters.context import FeatureContext
from dflash_mlx.drafters.network import Network, NetworkConfig
from dflash_mlx.target import Target


class BlockModel:
    """A drafter network with the embedding and the head it borrows from its target.

    Raises DFlashError for a target whose embedding cannot be found.
    """

    def __init__(self, network: Network, config: NetworkConfig, target: Target) -> None:
        self.config = config
        self.kernels = target.kernels
        self._network = network
        self._kv_bits = target.kv_bits
        self._embed: Any = target.embedding()
        self._head: Callable[[mx.array], mx.array] = target.head()
        target.tap(config.target_layer_ids)

    def new_context(self) -> FeatureContext:
        """An empty context for one sequence."""
        windows = self.config.layer_windows
        return FeatureContext(self._network, windows, self.kernels, self._kv_bits)

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
        hidden = self._network(x, context.cache, branches=len(prefixes)).astype(x.dtype)
        hidden = hidden[0, 1:] if len(masked) == x.shape[1] - 1 else hidden[0, mx.array(masked)]
        logits = self._head(hidden * config.output_multiplier)
        if (cap := config.final_logit_softcapping) is not None:
            logits = mx.tanh(logits / cap) * cap
        return logits
