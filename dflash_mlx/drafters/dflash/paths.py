"""Paths through a block whose positions know the token before them: DFlash 2's and DSpark's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from dflash_mlx.drafters.growth.grow import Ranked
from dflash_mlx.drafters.growth.links import Linked


@dataclass(frozen=True)
class Candidates:
    """What a path can go through.

    tokens: [n, k] of each position. after: the scores [k] at position t behind the candidate of
    index [] at the position before; at the first position that is the anchor, whatever the index.
    confidences: how likely each position of a path [n] of indices is to be accepted, where a head
    of its own says so.
    """

    tokens: mx.array
    after: Callable[[int, mx.array], mx.array]
    confidences: Callable[[mx.array], mx.array] | None = None

    @classmethod
    def of_table(cls, tokens: mx.array, scores: mx.array) -> Candidates:
        """With scores [n, k, k] that are known for every candidate of the position before."""
        return cls(tokens, lambda t, before: scores[t, before])

    def walk(self, choose: Callable[[int, mx.array], mx.array]) -> tuple[mx.array, mx.array]:
        """A path from the anchor, the indices [n], and the scores [n, k] that it was chosen from.

        choose(t, scores [k]): the index [] that it takes at position t. Nothing is evaluated.
        """
        path, scores = [mx.array(0)], []
        for t in range(self.tokens.shape[0]):
            scores.append(self.after(t, path[-1]))
            path.append(choose(t, scores[-1]))
        return mx.stack(path[1:]), mx.stack(scores)

    def likeliest(self) -> tuple[mx.array, mx.array]:
        """The walk that takes the best next candidate every time."""
        return self.walk(lambda t, scores: mx.argmax(scores))

    def at(self, path: mx.array) -> mx.array:
        """The tokens [n] at these indices [n]."""
        return mx.take_along_axis(self.tokens, path[:, None], axis=1)[:, 0]


Rank = Callable[[mx.array], Ranked]  # the likeliest tokens of each row of logits [n, v]


class Links(Protocol):
    """A head that knows the token before each position.

    hidden: [n, d] final states of consecutive positions. logits: [n, v] of the same, before this
    head. anchor: [1] the token before the first. ids: [v] the tokens that logits are for, None for
    all of the vocabulary.
    """

    @property
    def top_k(self) -> int:
        """Tokens that a position of a tree can offer."""

    def candidates(
        self, hidden: mx.array, logits: mx.array, anchor: mx.array, ids: mx.array | None
    ) -> Candidates:
        """What chains go through, drawn ones too."""

    def linked(
        self, hidden: mx.array, logits: mx.array, anchor: mx.array, ids: mx.array | None, rank: Rank
    ) -> Linked:
        """What trees go through, `top_k` at every position; waits for the pass."""


def predecessors(tokens: mx.array, anchor: mx.array) -> mx.array:
    """[n, k] what may precede each position: the anchor, then the candidates of the one before."""
    first = mx.repeat(anchor, tokens.shape[1])[None].astype(tokens.dtype)
    return mx.concatenate([first, tokens[:-1]])
