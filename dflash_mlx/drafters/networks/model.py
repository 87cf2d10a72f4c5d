"""A draft network bound to its target: its tokens, and what it remembers of a sequence.

From final states to tokens leads a head of its own, or its target's. A draft needs no logits of
rare tokens (FR-Spec, arXiv 2502.14856): the target's check keeps the answer exact, and the head is
the largest matrix that a draft reads. Of a target's head it may have rows for the likeliest tokens
only, and for those that the conversation has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar, Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.growth.grow import Array, Ranked, rank
from dflash_mlx.drafters.networks.fields import OTHER_DRAFTER
from dflash_mlx.engine.state import Context, Kind
from dflash_mlx.verifier.block import Saved
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.routing import Kernels
from dflash_mlx.verifier.sequence import SequenceCache

_LAST_NORMS = ("norm", "norm_f", "final_layernorm", "ln_f", "final_norm", "embedding_norm")
_STEP = 32  # tokens that are added at a time, so that matrices seldom change their shape

Ids = npt.NDArray[np.int64]
Head = Callable[[mx.array], mx.array]
MOST_WAITING = 64  # rows
_Context = TypeVar("_Context", bound="DraftContext")


class PartialHead:
    """Rows of a target's head, for the first `size` of all `tokens` [V], the likeliest first."""

    def __init__(self, target: Target, tokens: Ids, size: int) -> None:
        self.rows_of = target.head_of
        self.ids, self.others = tokens[:size], tokens[size:]
        self.head = self.rows_of(mx.array(self.ids))
        target.add_drafter(self.head)


class ActiveVocabulary:
    """Rows of a conversation for its tokens that a partial head does not have.

    Tokens wait until a draft needs them. What was taken back may stay: it only could be drafted.
    """

    def __init__(self, base: PartialHead) -> None:
        self._base = base
        self._waiting: list[mx.array] = []
        self._others = base.others
        self._ids = base.ids
        self._more: Head | None = None

    def fork(self) -> ActiveVocabulary:
        other = copy(self)
        other._waiting = list(self._waiting)
        return other

    def add(self, tokens: mx.array) -> None:
        """Take in committed tokens [n]."""
        self._waiting.append(tokens)

    def complete(self, states: mx.array, logits: mx.array) -> tuple[mx.array, Ids]:
        """[n, v] of final states [n, d], and the tokens [v] that they are for.

        logits: [n, size] of the common rows.
        """
        self._take_in()
        if self._more is not None:
            logits = mx.concatenate([logits, self._more(states)], axis=-1)
        return logits, self._ids

    def _take_in(self) -> None:
        """Give the waiting tokens rows, and some of the next likeliest, to fill up a step."""
        if not self._waiting:
            return
        said = np.unique(np.concatenate([np.array(tokens) for tokens in self._waiting]))
        self._waiting.clear()
        is_new = np.isin(self._others, said)
        if not is_new.any():
            return
        new, rest = self._others[is_new], self._others[~is_new]
        had = len(self._ids) - len(self._base.ids)
        spare = -(had + len(new)) % _STEP
        self._ids, self._others = np.concatenate([self._ids, new, rest[:spare]]), rest[spare:]
        self._more = self._base.rows_of(mx.array(self._ids[len(self._base.ids) :]))


class DraftHead:
    """Logits over the target's vocabulary, and so ranked tokens, whatever a drafter knows of it."""

    def __init__(
        self,
        head: Head,
        vocabulary: int,
        kernels: Kernels | None = None,
        d2t: mx.array | None = None,
        softcap: float | None = None,
        scale: float = 1.0,
    ) -> None:
        self._head = head  # [n, d] -> [n, v], the drafter's own or its target's
        self._vocabulary, self._kernels = vocabulary, kernels  # tokens of the target
        # [v] which token each row of the head is for, None where row i is token i
        self._ids = None if d2t is None else np.array(mx.arange(d2t.size) + d2t)
        self._softcap, self._scale = softcap, scale  # of logits, and of final states
        self.partial: PartialHead | None = None  # of a target's head, where drafts need no more

    def logits(
        self, states: mx.array, words: ActiveVocabulary | None
    ) -> tuple[mx.array, Array | None]:
        """[n, v] from final states [n, d], and the tokens [v] that they are for; None for all."""
        return self.logits_of_all([states], [words])[0]

    def logits_of_all(
        self, states: Sequence[mx.array], words: Sequence[ActiveVocabulary | None]
    ) -> list[tuple[mx.array, Array | None]]:
        """As `logits`, of several conversations; what is common to them is computed at once."""
        scaled = [part * self._scale for part in states]
        head = self._head if self.partial is None or words[0] is None else self.partial.head
        ends = [*accumulate(part.shape[0] for part in states)]
        whole = head(mx.concatenate(scaled) if len(scaled) > 1 else scaled[0])
        common = mx.split(whole, ends[:-1]) if len(scaled) > 1 else [whole]
        found = []
        for part, logits, own in zip(scaled, common, words, strict=True):
            logits, ids = (logits, self._ids) if own is None else own.complete(part, logits)
            found.append((capped(logits, self._softcap), ids))
        return found

    def whole(self, states: mx.array, words: ActiveVocabulary | None) -> mx.array:
        """[n, V] from final states [n, d]: -inf for tokens that it does not know."""
        logits, ids = self.logits(states, words)
        if ids is None:
            return logits
        whole = mx.full((logits.shape[0], self._vocabulary), -mx.inf, dtype=logits.dtype)
        whole[:, mx.array(ids)] = logits
        return whole

    def likeliest(self, states: mx.array, words: ActiveVocabulary | None) -> mx.array:
        """[n] the likeliest token after each state; the pass may still be running."""
        logits, ids = self.logits(states, words)
        best = mx.argmax(logits, axis=-1)
        return best if ids is None else mx.array(ids)[best]

    def ranked(self, states: mx.array, words: ActiveVocabulary | None, k: int) -> Ranked:
        """The k likeliest tokens after each state; waits for the pass."""
        return self.rank(*self.logits(states, words), k)

    def rank(self, logits: mx.array, ids: Array | None, k: int) -> Ranked:
        """The k likeliest tokens of each row of what `logits` gave; waits for the pass."""
        ranked = rank(logits, k, self._kernels)
        return ranked if ids is None else replace(ranked, tokens=ids[ranked.tokens])


def capped(logits: mx.array, cap: float | None) -> mx.array:
    """Logits under a soft cap, cap * tanh(logits / cap); None leaves them as they are."""
    return logits if cap is None else mx.tanh(logits / cap) * cap


def embedding_scale(target: Target) -> float:
    """The factor that a target keeps beside its embedding as `embed_scale`, else 1.

    As z-lab's MLX module does: families that multiply in their forward pass have no such attribute.
    """
    embedding, modules = target.embedding(), target.model.modules()
    beside = [each for each in modules if any(child is embedding for child in each.values())]
    scales = (getattr(holder, "embed_scale", None) for holder in (embedding, *beside))
    return float(next((scale for scale in scales if scale is not None), 1.0))


def last_norm(target: Target) -> Head:
    """The norm behind a target's last layer; DFlashError where it has none that is known."""
    first = target.model.layers[0]
    for module in target.model.modules():
        layers = module.get("layers")
        if isinstance(layers, list) and any(layer is first for layer in layers):
            for name in _LAST_NORMS:
                if isinstance(norm := module.get(name), nn.Module):
                    return lambda states: norm(states)  # as it is then: hooks come and go
    problem = f"{target.name} has no norm after its last layer, whose states the drafter reads"
    raise DFlashError(problem, OTHER_DRAFTER)


class DraftContext:
    """Keys and values of committed tokens, made of the target's features.

    Rows wait until a draft needs them: rounds without one must not pay for its context.
    """

    def __init__(
        self, model: Any, cache: SequenceCache, words: ActiveVocabulary | None = None
    ) -> None:
        self.words = words  # the conversation's, where its drafter has a partial head
        self._model, self._network, self._cache = model, model.module, cache
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


class BoundModel(Generic[_Context]):
    """A network with an embedding and a head: its own, or those of its target.

    Logits are always over the target's vocabulary, and so are ranked tokens. Raises DFlashError for
    a target whose embedding cannot be found.
    """

    family: ClassVar[str]
    scales_embeddings: ClassVar[bool] = True  # as its target does, with the target's embedding
    least_vocabulary = 1  # tokens that its drafts need
    takes_trees, prefers_chains = True, False  # where it goes token by token
    context: Callable[..., _Context]  # of the model, its empty caches, and the active vocabulary

    def __init__(self, network: Any, config: Any, target: Target) -> None:
        self.module, self.config = network, config
        self.target, self.kernels, self._kv_bits = target, target.kernels, target.kv_bits
        self.aux_layers: tuple[int, ...] = config.layers_read(target.num_layers)
        own = config.own_embedding
        self._table: Any = network.embed_tokens if own else target.embedding()
        self._scale = embedding_scale(target) if self.scales_embeddings and not own else 1.0
        self.head = DraftHead(
            self.own_head(network) if config.own_head else target.head(),
            config.vocab_size,
            target.kernels,
            network.d2t if config.draft_vocab_size is not None else None,
            config.final_logit_softcapping,
            config.output_multiplier,
        )
        target.tap(self.aux_layers)
        target.add_drafter(network)

    def embed(self, tokens: mx.array) -> mx.array:
        """Tokens [...] to [..., d]."""
        return self._table(tokens) * self._scale  # type: ignore[no-any-return]

    def own_head(self, network: Any) -> Callable[[mx.array], mx.array]:
        return network.lm_head  # type: ignore[no-any-return]

    @property
    def block_size(self) -> int:
        return self.config.block_size  # type: ignore[no-any-return]

    def new_context(self) -> _Context:
        windows = self.config.layer_windows
        layers = [LayerCache(window, self.kernels, self._kv_bits) for window in windows]
        words = self.head.partial and ActiveVocabulary(self.head.partial)
        return self.context(self, SequenceCache(layers), words)

    def limit_vocabulary(self, target: Target, tokens: Array, size: int) -> None:
        """Draft only the first `size` of all `tokens` [V], and those that a conversation has.

        Not with a head of its own.
        """
        size = max(size, self.least_vocabulary)
        if not self.config.own_head and size < len(tokens):
            self.head.partial = PartialHead(target, tokens, size)

    def try_out(self, context: Context) -> mx.array:
        """Logits of a whole draft; tokens that it does not know or score have 0."""
        logits = self.tried(context)  # type: ignore[arg-type]
        return logits if self.scores_all else mx.where(logits == -mx.inf, 0, logits)

    @property
    def scores_all(self) -> bool:
        """Whether every token has a logit, so that none is -inf unless numbers overflow."""
        return self.config.draft_vocab_size is None

    @abstractmethod
    def tried(self, context: _Context) -> mx.array:
        """Logits of a whole draft behind a context."""


class Draft(ABC):
    """A draft that is made token by token: each row sees the context, what it continues, itself.

    The methods pass the next n rows: their tokens [n], and for each the number of the row that it
    continues. Row 0 is the anchor's and continues none, -1.
    """

    in_one_pass: ClassVar[bool] = False  # whether rows behind the first cost nothing more

    def __init__(self, head: DraftHead, words: ActiveVocabulary | None = None) -> None:
        self._head, self._words = head, words

    @abstractmethod
    def states(self, tokens: mx.array, parents: list[int]) -> mx.array:
        """Final states [n, d] of the next rows."""

    def logits(self, tokens: mx.array, parents: list[int]) -> mx.array:
        """[n, V] for what follows each row."""
        return self._head.whole(self.states(tokens, parents), self._words)

    def likeliest(self, tokens: mx.array, parents: list[int]) -> mx.array:
        """[n] the likeliest token after each row; the pass may still be running."""
        return self._head.likeliest(self.states(tokens, parents), self._words)

    def ranked(self, tokens: mx.array, parents: list[int], k: int) -> Ranked:
        """The k likeliest tokens after each row; waits for the pass."""
        return self._head.ranked(self.states(tokens, parents), self._words, k)
