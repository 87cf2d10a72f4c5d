"""A draft network bound to its target, and what it remembers of a sequence, whatever its family."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, ClassVar, Generic, TypeVar

import mlx.core as mx

from dflash_mlx.drafters.growth.grow import Array
from dflash_mlx.drafters.networks.head import ActiveVocabulary, DraftHead, embedding_scale
from dflash_mlx.engine.state import Context, Kind
from dflash_mlx.verifier.block import Saved, join, split
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import SequenceCache

MOST_WAITING = 64  # rows
_Context = TypeVar("_Context", bound="DraftContext")


class DraftContext:
    """Keys and values of committed tokens, made of the target's features.

    Rows wait until a draft needs them: rounds without one must not pay for its context.
    """

    def __init__(
        self, network: Any, cache: SequenceCache, words: ActiveVocabulary | None = None
    ) -> None:
        self.words = words  # the conversation's, where its drafter has a partial head
        self._network, self._cache = network, cache
        self._waiting: list[tuple[mx.array, mx.array]] = []  # tokens [n], features [n, m*d]

    @abstractmethod
    def take_in(self, tokens: mx.array, features: mx.array) -> None:
        """Make keys and values of what waited."""

    @property
    def contexts(self) -> tuple[DraftContext, ...]:
        return (self,)

    @property
    def cache(self) -> SequenceCache:
        """Keys and values, up to date."""
        if self._waiting:
            tokens, features = (mx.concatenate([*p]) for p in zip(*self._waiting, strict=True))
            self._waiting.clear()
            self.take_in(tokens, features)
        return self._cache

    @property
    def length(self) -> int:
        return self._cache.length + self._rows

    @property
    def arrays(self) -> list[mx.array]:
        return self.cache.arrays

    def append(self, tokens: mx.array, features: mx.array | None) -> None:
        if features is None:
            raise ValueError("no features of tokens, though the drafter reads them")
        self._waiting.append((tokens, features))
        self._note(tokens)
        if self._rows >= MOST_WAITING:
            _ = self.cache

    def refill_from(self, length: int) -> int:
        return self.cache.refill_from(length)

    def trim(self, length: int) -> None:
        self.cache.rewind(length)

    @property
    def kind(self) -> Kind:
        return (self._network,), self._cache.kind

    def fork(self: _Context) -> _Context:
        other = copy(self)
        other._cache, other._waiting = self._cache.fork(), list(self._waiting)
        other.words = self.words and self.words.fork()
        return other

    def saved(self) -> Saved:
        return self.cache.saved()

    def restore(self, saved: Saved, tokens: mx.array) -> None:
        self._cache.restore(saved)
        self._note(tokens)

    def _note(self, tokens: mx.array) -> None:
        if self.words is not None:
            self.words.add(tokens)

    @property
    def _rows(self) -> int:
        return sum(len(tokens) for tokens, _ in self._waiting)


class DualContext:
    """The contexts of several networks, fed from one set of features."""

    def __init__(
        self, contexts: tuple[DraftContext, ...], columns: Sequence[Sequence[int]], aux_layers: int
    ) -> None:
        self.contexts = contexts
        self._columns = tuple(map(tuple, columns))  # which of the auxiliary layers each reads
        self._aux_layers = aux_layers

    @property
    def length(self) -> int:
        return self.contexts[0].length

    @property
    def arrays(self) -> list[mx.array]:
        return [array for context in self.contexts for array in context.arrays]

    def append(self, tokens: mx.array, features: mx.array | None) -> None:
        for context, columns in zip(self.contexts, self._columns, strict=True):
            own = features
            if features is not None and columns != tuple(range(self._aux_layers)):
                parts = mx.split(features, self._aux_layers, axis=-1)
                own = mx.concatenate([parts[i] for i in columns], axis=-1)
            context.append(tokens, own)

    def refill_from(self, length: int) -> int:
        return min(context.refill_from(length) for context in self.contexts)

    def trim(self, length: int) -> None:
        for context in self.contexts:
            context.trim(length)

    @property
    def kind(self) -> Kind:
        kinds = [context.kind for context in self.contexts]
        networks = tuple(network for own, _ in kinds for network in own)
        return networks, (self._columns, self._aux_layers, *(settings for _, settings in kinds))

    def fork(self) -> DualContext:
        contexts = tuple(context.fork() for context in self.contexts)
        return DualContext(contexts, self._columns, self._aux_layers)

    def saved(self) -> Saved:
        return join(context.saved() for context in self.contexts)

    def restore(self, saved: Saved, tokens: mx.array) -> None:
        for context, own in zip(self.contexts, split(saved), strict=True):
            context.restore(own, tokens)


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
