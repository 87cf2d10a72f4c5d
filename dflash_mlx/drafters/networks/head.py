"""From final states of a draft network to tokens: by a head of its own, or by its target's.

A draft needs no logits of rare tokens (FR-Spec, arXiv 2502.14856): the target's check keeps the
answer exact, and the head is the largest matrix that a draft reads. Of a target's head it may have
rows for the likeliest tokens only, and for those that the conversation has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.drafters.growth.grow import Array, Ranked, rank
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.routing import Kernels

_STEP = 32  # tokens that are added at a time, so that matrices seldom change their shape

Ids = npt.NDArray[np.int64]
Head = Callable[[mx.array], mx.array]


class PartialHead:
    """Rows of a target's head, for the first `size` of all `tokens` [V], the likeliest first."""

    def __init__(self, target: Target, tokens: Ids, size: int) -> None:
        self.rows_of = target.head_of
        self.ids, self.others = tokens[:size], tokens[size:]
        self.head = self.rows_of(mx.array(self.ids))


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
        """A copy that goes on by itself."""
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
        self._partial: PartialHead | None = None

    def limit(self, target: Target, tokens: Array, size: int) -> None:
        """Know only the first `size` of all `tokens` [V], and those that a conversation has.

        Only of a target's head.
        """
        if size < len(tokens):
            self._partial = PartialHead(target, tokens, size)

    def new_active(self) -> ActiveVocabulary | None:
        """Of a conversation that begins; None where it makes no difference."""
        return None if self._partial is None else ActiveVocabulary(self._partial)

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
        head = self._head if self._partial is None or words[0] is None else self._partial.head
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
    embedding: Any = target.embedding()
    beside = (
        module
        for module in target.model.modules()
        if any(child is embedding for child in module.values())
    )
    for holder in (embedding, next(beside, embedding)):
        if (scale := getattr(holder, "embed_scale", None)) is not None:
            return float(scale)
    return 1.0
