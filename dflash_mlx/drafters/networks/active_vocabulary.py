"""A target's output head for the tokens that drafts are likely to have (FR-Spec, arXiv 2502.14856).

A draft needs no logits of rare tokens: the target's check keeps the answer exact, and the head is
the largest matrix that a draft reads. What a conversation has said is always among the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.verifier.model import Target

_STEP = 32  # tokens that are added at a time, so that matrices seldom change their shape

Ids = npt.NDArray[np.int64]
Head = Callable[[mx.array], mx.array]


class PartialHead:
    """Rows of a target's head.

    tokens: [V] all tokens, the likeliest first. size: so many of them have rows.
    """

    def __init__(self, target: Target, tokens: Ids, size: int) -> None:
        self.rows_of = target.head_of
        self.ids, self.others = tokens[:size], tokens[size:]
        self.head = self.rows_of(mx.array(self.ids))

    def new_active(self) -> ActiveVocabulary:
        """Of a conversation that begins."""
        return ActiveVocabulary(self)


class ActiveVocabulary:
    """The tokens of one conversation that its drafter's partial head does not have, and their rows.

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

    def logits(self, states: mx.array) -> tuple[mx.array, Ids]:
        """[n, v] of final states [n, d], and the tokens [v] that they are for."""
        return self.complete(states, self._base.head(states))

    def complete(self, states: mx.array, logits: mx.array) -> tuple[mx.array, Ids]:
        """As `logits`, given those [n, size] of the common rows."""
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
