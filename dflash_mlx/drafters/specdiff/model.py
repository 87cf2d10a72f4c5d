"""A masked diffusion network bound to its target: what it thinks is behind the masks of a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from dflash_mlx.drafters.growth.grow import Array, Ranked
from dflash_mlx.drafters.networks.head import DraftHead, embedding_scale
from dflash_mlx.drafters.specdiff.context import TokenContext
from dflash_mlx.drafters.specdiff.network import Network, NetworkConfig
from dflash_mlx.engine.state import Context
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.model import Target

FAMILY = "specdiff"


class MaskedModel:
    """A masked diffusion network with an embedding and a head: its own, or those of its target.

    Blocks [b] begin with the anchor; places are positions in them, from 1 on. Raises DFlashError
    for a target whose embedding cannot be found, where it is needed.
    """

    family = FAMILY
    aux_layers: tuple[int, ...] = ()

    def __init__(self, network: Network, config: NetworkConfig, target: Target) -> None:
        self.config = config
        self._network, self._target = network, target
        self._kernels, self._kv_bits = target.kernels, target.kv_bits
        self._table: Any = network.embed_tokens if config.own_embedding else target.embedding()
        self._scale = 1.0 if config.own_embedding else embedding_scale(target)
        if config.tied:
            head = network.embed_tokens.as_linear
        else:
            head = network.lm_head if config.own_head else target.head()
        cap = config.final_logit_softcapping
        self._head = DraftHead(head, config.vocab_size, target.kernels, softcap=cap)

    @property
    def block_size(self) -> int:
        """Rows that it was trained for, the anchor included."""
        return self.config.block_size

    @property
    def module(self) -> Network:
        """The network."""
        return self._network

    @property
    def mask(self) -> int:
        """The token that stands for one that is not known yet."""
        return self.config.mask_token_id

    def new_context(self) -> TokenContext:
        """An empty context for one sequence."""
        windows, words = self.config.layer_windows, self._head.new_active()
        layers = [LayerCache(window, self._kernels, self._kv_bits) for window in windows]
        return TokenContext(self._network, self._embed, layers, words)

    def limit_vocabulary(self, target: Target, tokens: Array, size: int) -> None:
        """Draft only the first `size` of `tokens` [V], and those that a conversation has.

        Not with a head of its own.
        """
        if not self.config.own_head:
            self._head.limit(target, tokens, size)

    def try_out(self, context: Context) -> mx.array:
        """Logits of a whole block of masks; all tokens have some."""
        assert isinstance(context, TokenContext)
        masks = mx.full(self.block_size, self.mask, mx.int32)
        return self.logits(context, masks, range(1, self.block_size))

    def logits(self, context: TokenContext, block: mx.array, places: Sequence[int]) -> mx.array:
        """[n, V] of n places in a block [b]; -inf for tokens that are never drafted."""
        return self._head.whole(self._states(context, block, places), context.words)

    def ranked(
        self, context: TokenContext, block: mx.array, places: Sequence[int], k: int
    ) -> Ranked:
        """The k likeliest tokens of n places in a block [b]; waits for the pass."""
        return self._head.ranked(self._states(context, block, places), context.words, k)

    def _states(self, context: TokenContext, block: mx.array, places: Sequence[int]) -> mx.array:
        """[n, d] what logits of these places are computed from."""
        rows = [place - self.config.logits_shifted for place in places]
        states = context.run(block)[mx.array(rows)]
        if self.config.own_head:
            return states
        return states.astype(self._target.dtype)  # the head's, where the network has another

    def _embed(self, tokens: mx.array) -> mx.array:
        """Tokens [n] to [1, n, d]."""
        return self._table(tokens[None]) * self._scale  # type: ignore[no-any-return]
