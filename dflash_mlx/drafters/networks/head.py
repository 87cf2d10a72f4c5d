"""From final states of a draft network to tokens: by a head of its own, or by its target's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.growth.grow import Array, Ranked
from dflash_mlx.drafters.growth.rank import rank
from dflash_mlx.drafters.networks.active_vocabulary import ActiveVocabulary, PartialHead
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.routing import Kernels


class DraftHead:
    """Logits over the target's vocabulary, and so ranked tokens, whatever a drafter knows of it.

    head: [n, d] -> [n, v], the drafter's own or its target's. d2t: [v] what to add to a draft id
    for the target's, None where the two are the same. vocabulary: tokens of the target. softcap:
    of the logits, None for none. words: the conversation's, see `active_vocabulary.py`.
    """

    def __init__(
        self,
        head: Callable[[mx.array], mx.array],
        vocabulary: int,
        kernels: Kernels | None = None,
        d2t: mx.array | None = None,
        softcap: float | None = None,
        scale: float = 1.0,
    ) -> None:
        self._head, self._vocabulary, self._kernels, self._scale = head, vocabulary, kernels, scale
        self._ids = None if d2t is None else np.array(mx.arange(d2t.size) + d2t)
        self._softcap = softcap
        self._partial: PartialHead | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it knows all tokens."""
        return self._ids is None

    def limit(self, target: Target, tokens: Array, size: int) -> None:
        """Know only the first `size` of all `tokens` [V], and those that a conversation has.

        Only of a target's head.
        """
        if size < len(tokens):
            self._partial = PartialHead(target, tokens, size)

    def new_active(self) -> ActiveVocabulary | None:
        """Of a conversation that begins; None where it makes no difference."""
        return None if self._partial is None else self._partial.new_active()

    def logits(
        self, states: mx.array, words: ActiveVocabulary | None
    ) -> tuple[mx.array, Array | None]:
        """[n, v] from final states [n, d], and the tokens [v] that they are for; None for all."""
        states, ids = states * self._scale, self._ids
        logits, ids = (self._head(states), ids) if words is None else words.logits(states)
        return capped(logits, self._softcap), ids

    def logits_of_all(
        self, states: Sequence[mx.array], words: Sequence[ActiveVocabulary | None]
    ) -> list[tuple[mx.array, Array | None]]:
        """As `logits`, of several conversations; what is common to them is computed at once."""
        if len(states) == 1:
            return [self.logits(states[0], words[0])]
        scaled = [part * self._scale for part in states]
        head = self._head if self._partial is None else self._partial.head
        ends = [*accumulate(part.shape[0] for part in states)]
        common = mx.split(head(mx.concatenate(scaled)), ends[:-1])
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
