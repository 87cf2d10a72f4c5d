"""What block-diffusion drafters remember of a sequence: keys and values of its features."""

from __future__ import annotations

from copy import copy

import mlx.core as mx

from dflash_mlx.drafters.dflash.network import Network
from dflash_mlx.drafters.networks.active_vocabulary import ActiveVocabulary
from dflash_mlx.engine.state import Kind
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.routing import Kernels
from dflash_mlx.verifier.saved import Saved, join, split
from dflash_mlx.verifier.sequence import SequenceCache

_MOST_WAITING = 64  # rows of features


class FeatureContext:
    """The drafter's keys and values of the committed tokens' features, per layer.

    Features wait until a draft needs them: rounds without one must not pay for its context.
    words: the conversation's, where its drafter has a partial head.
    """

    def __init__(
        self,
        network: Network,
        windows: tuple[int | None, ...],
        kernels: Kernels | None = None,
        kv_bits: int | None = None,
        words: ActiveVocabulary | None = None,
    ) -> None:
        self.words = words
        self._network = network
        self._cache = SequenceCache([LayerCache(window, kernels, kv_bits) for window in windows])
        self._waiting: list[mx.array] = []

    @property
    def contexts(self) -> tuple[FeatureContext, ...]:
        """One per drafter."""
        return (self,)

    @property
    def cache(self) -> SequenceCache:
        """Keys and values, up to date."""
        if self._waiting:
            self._network.append(mx.concatenate(self._waiting), self._cache)
            self._waiting.clear()
        return self._cache

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._cache.length + self._rows

    @property
    def arrays(self) -> list[mx.array]:
        """Keys and values of all layers."""
        return self.cache.arrays

    def append(self, tokens: mx.array, features: mx.array | None) -> None:
        """Take in the features [n, m*d] of the next n committed tokens [n]."""
        if features is None:
            raise ValueError("no features of tokens, though the drafter reads them")
        self._waiting.append(features)
        if self.words is not None:
            self.words.add(tokens)
        if self._rows >= _MOST_WAITING:
            _ = self.cache

    def refill_from(self, length: int) -> int:
        """From where on features have to be appended again for drafts at `length`."""
        return self.cache.refill_from(length)

    def trim(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        self.cache.rewind(length)

    @property
    def kind(self) -> Kind:
        """The network, and what is kept of its keys and values."""
        return (self._network,), self._cache.kind

    def fork(self) -> FeatureContext:
        """A copy that goes on by itself."""
        other = copy(self)
        other._cache, other._waiting = self._cache.fork(), list(self._waiting)
        other.words = self.words and self.words.fork()
        return other

    def saved(self) -> Saved:
        """Keys and values."""
        return self.cache.saved()

    def restore(self, saved: Saved, tokens: mx.array) -> None:
        """Hold what another has saved of `tokens` [n]."""
        self._cache.restore(saved)
        if self.words is not None:
            self.words.add(tokens)

    @property
    def _rows(self) -> int:
        return sum(features.shape[0] for features in self._waiting)


class DualContext:
    """The contexts of both drafters, fed from one set of features.

    columns: which of the m auxiliary layers, of width d each, either drafter reads.
    """

    def __init__(
        self,
        contexts: tuple[FeatureContext, ...],
        columns: tuple[tuple[int, ...], ...],
        aux_layers: int,
    ) -> None:
        self.contexts = contexts
        self._columns, self._aux_layers = columns, aux_layers

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.contexts[0].length

    @property
    def arrays(self) -> list[mx.array]:
        """Keys and values of all layers of both."""
        return [array for context in self.contexts for array in context.arrays]

    def append(self, tokens: mx.array, features: mx.array | None) -> None:
        """Take in the features [n, m*d] of the next n committed tokens [n]."""
        for context, columns in zip(self.contexts, self._columns, strict=True):
            if features is None or columns == tuple(range(self._aux_layers)):
                context.append(tokens, features)
            else:
                parts = mx.split(features, self._aux_layers, axis=-1)
                context.append(tokens, mx.concatenate([parts[i] for i in columns], axis=-1))

    def refill_from(self, length: int) -> int:
        """From where on either needs features appended again for drafts at `length`."""
        return min(context.refill_from(length) for context in self.contexts)

    def trim(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        for context in self.contexts:
            context.trim(length)

    @property
    def kind(self) -> Kind:
        """Both networks, what they read, and what is kept of them."""
        kinds = [context.kind for context in self.contexts]
        networks = tuple(network for own, _ in kinds for network in own)
        return networks, (self._columns, self._aux_layers, *(settings for _, settings in kinds))

    def fork(self) -> DualContext:
        """A copy that goes on by itself."""
        contexts = tuple(context.fork() for context in self.contexts)
        return DualContext(contexts, self._columns, self._aux_layers)

    def saved(self) -> Saved:
        """Keys and values of both."""
        return join(context.saved() for context in self.contexts)

    def restore(self, saved: Saved, tokens: mx.array) -> None:
        """Hold what another has saved of `tokens` [n]."""
        for context, own in zip(self.contexts, split(saved), strict=True):
            context.restore(own, tokens)
