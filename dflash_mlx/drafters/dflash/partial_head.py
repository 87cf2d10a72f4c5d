"""A target's output head for the tokens that drafts are likely to have (FR-Spec, arXiv 2502.14856).

A draft needs no logits of rare tokens: the target's check keeps the answer exact, and the head is
the largest matrix that a draft reads. What a conversation has said is always among the tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.target.model import Target

_STEP = 32  # tokens that are added at a time, so that matrices seldom change their shape

Ids = npt.NDArray[np.int64]
Head = Callable[[mx.array], mx.array]


class PartialHead:
    """Rows of a target's head. ids: [v] tokens, the likeliest first; size: so many of them."""

    def __init__(self, target: Target, ids: Ids, size: int) -> None:
        self.target, self.ids = target, ids[:size]
        self.others = ids[size:]
        self.head = target.head_of(mx.array(self.ids))
        self.known = np.zeros(len(ids), np.bool_)
        self.known[self.ids] = True

    def new_words(self) -> Words:
        """Of a conversation that begins."""
        return Words(self)


class Words:
    """The tokens of one conversation that its drafter's partial head does not have, and their rows.

    Tokens wait until a draft needs them. What was taken back may stay: it only could be drafted.
    """

    def __init__(self, base: PartialHead) -> None:
        self._base = base
        self._waiting: list[mx.array] = []
        self._known = base.known.copy()
        self._found: list[int] = []
        self._ids, self._head = base.ids, base.head

    def add(self, tokens: mx.array) -> None:
        """Take in committed tokens [n]."""
        self._waiting.append(tokens)

    def logits(self, states: mx.array) -> tuple[mx.array, Ids]:
        """[n, v] of final states [n, d], and the tokens [v] that they are for."""
        self._take_in()
        parts = [self._base.head(states)]
        if self._found:
            parts.append(self._head(states))
        return mx.concatenate(parts, axis=-1) if self._found else parts[0], self._ids

    def _take_in(self) -> None:
        before = len(self._found)
        for tokens in self._waiting:
            new = np.unique(np.array(tokens, np.int64))
            new = new[~self._known[new]]
            self._known[new] = True
            self._found += new.tolist()
        self._waiting.clear()
        if len(self._found) > before:
            missing = -len(self._found) % _STEP
            spare = self._base.others[~self._known[self._base.others]][:missing].tolist()
            self._known[spare] = True
            self._found += spare
            more = np.array(self._found)
            self._ids = np.concatenate([self._base.ids, more])
            self._head = self._base.target.head_of(mx.array(more))
