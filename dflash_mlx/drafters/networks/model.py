"""A draft network bound to its target, whatever its family."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import mlx.core as mx

from dflash_mlx.drafters.growth.grow import Array
from dflash_mlx.drafters.networks.context import DraftContext
from dflash_mlx.drafters.networks.head import DraftHead, embedding_scale
from dflash_mlx.engine.state import Context
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import SequenceCache

_Context = TypeVar("_Context", bound=DraftContext)


class BoundModel(Generic[_Context]):
    """A network with an embedding and a head: its own, or those of its target.

    Logits are always over the target's vocabulary, and so are ranked tokens. Raises DFlashError for
    a target whose embedding cannot be found.
    """

    family: ClassVar[str]
    scales_embeddings: ClassVar[bool] = True  # as its target does, with the target's embedding
    least_vocabulary = 1  # tokens that its drafts need

    def __init__(self, network: Any, config: Any, target: Target) -> None:
        self.module, self.config = network, config
        self.kernels, self._kv_bits = target.kernels, target.kv_bits
        self.aux_layers: tuple[int, ...] = config.layers_read(target.num_layers)
        own = config.own_embedding
        self._table: Any = network.embed_tokens if own else target.embedding()
        self._scale = embedding_scale(target) if self.scales_embeddings and not own else 1.0
        self._head = DraftHead(
            self.own_head(network) if config.own_head else target.head(),
            config.vocab_size,
            target.kernels,
            network.d2t if config.draft_vocab_size is not None else None,
            config.final_logit_softcapping,
            config.output_multiplier,
        )
        target.tap(self.aux_layers)

    def own_head(self, network: Any) -> Callable[[mx.array], mx.array]:
        return network.lm_head  # type: ignore[no-any-return]

    @property
    def block_size(self) -> int:
        return self.config.block_size  # type: ignore[no-any-return]

    @abstractmethod
    def context(self, *parts: Any) -> _Context:
        """A context of these parts: the network, its empty caches, and the active vocabulary."""

    def new_context(self) -> _Context:
        windows = self.config.layer_windows
        layers = [LayerCache(window, self.kernels, self._kv_bits) for window in windows]
        return self.context(self.module, SequenceCache(layers), self._head.new_active())

    def limit_vocabulary(self, target: Target, tokens: Array, size: int) -> None:
        """Draft only the first `size` of all `tokens` [V], and those that a conversation has.

        Not with a head of its own.
        """
        if not self.config.own_head:
            self._head.limit(target, tokens, max(size, self.least_vocabulary))

    def try_out(self, context: Context) -> mx.array:
        """Logits of a whole draft; tokens outside a draft vocabulary have 0."""
        logits = self.tried(context)  # type: ignore[arg-type]
        unknown = self.config.draft_vocab_size is not None
        return mx.where(logits == -mx.inf, 0, logits) if unknown else logits

    @abstractmethod
    def tried(self, context: _Context) -> mx.array:
        """Logits of a whole draft behind a context."""
