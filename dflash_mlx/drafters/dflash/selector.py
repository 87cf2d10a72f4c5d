"""DFlash 2's candidate selector: a path through the likeliest tokens of every position.

Position t offers its top-k tokens b by their draft logits. After token a at the position before,
S_t(a -> b) = logit_t(b) + <A[a] * (H h_t), B[b]>, where h_t is the network's final state, after
its last norm, A and B are the codebooks of predecessors and successors, and * is element by
element. The first position's predecessor is the anchor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True)
class SelectorConfig:
    """rank: of the codebooks. top_k: tokens that a position offers."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class Candidates:
    """What a path can go through.

    tokens: [n, k] of each position. scores: [n, k, k] S_t(a -> b) for the a-th candidate of the
    position before and the b-th of this one; at the first position all a are the anchor.
    """

    tokens: mx.array
    scores: mx.array

    def walk(self, choose: Callable[[int, mx.array], mx.array]) -> mx.array:
        """The indices [n] of the candidates on a path from the anchor; nothing is evaluated.

        choose(t, scores [k]): the index [] that the path takes at position t.
        """
        taken: list[mx.array] = [mx.array(0)]
        for t in range(self.tokens.shape[0]):
            taken.append(choose(t, self.scores[t, taken[-1]]))
        return mx.stack(taken[1:])

    def at(self, path: mx.array) -> mx.array:
        """The tokens [n] at these indices [n]."""
        return mx.take_along_axis(self.tokens, path[:, None], axis=1)[:, 0]

    def scores_along(self, path: mx.array) -> mx.array:
        """[n, k] what a path at these indices [n] chose from."""
        before = mx.concatenate([mx.array([0]), path[:-1]])
        return self.scores[mx.arange(path.shape[0]), before]


class CandidateSelector(nn.Module):
    """The codebooks [V, rank] and the projection H, d -> rank."""

    def __init__(self, vocabulary: int, d: int, config: SelectorConfig) -> None:
        super().__init__()
        self._top_k = config.top_k
        self.predecessor_codebook = mx.zeros((vocabulary, config.rank))
        self.successor_codebook = mx.zeros((vocabulary, config.rank))
        self.hidden_projection = nn.Linear(d, config.rank, bias=False)

    def __call__(
        self, hidden: mx.array, logits: mx.array, anchor: mx.array, ids: mx.array | None = None
    ) -> Candidates:
        """The candidates of n positions; scores are in float32.

        hidden: [n, d] final states. logits: [n, v] of the same positions. anchor: [1]. ids: [v] the
        tokens that the logits are for, None for all.
        """
        k = self._top_k
        tokens = mx.argpartition(logits, -k, axis=-1)[:, -k:]
        unary = mx.take_along_axis(logits, tokens, axis=-1).astype(mx.float32)
        tokens = tokens if ids is None else ids[tokens]
        edges = self.edges(hidden, predecessors(tokens, anchor), tokens)
        return Candidates(tokens, unary[:, None] + edges)

    def edges(self, hidden: mx.array, before: mx.array, tokens: mx.array) -> mx.array:
        """[n, j, k] <A[a] * (H h_t), B[b]> in float32.

        hidden: [n, d] final states. before: [n, j] tokens a. tokens: [n, k] tokens b.
        """
        context = self.predecessor_codebook[before] * self.hidden_projection(hidden)[:, None]
        successors = self.successor_codebook[tokens].swapaxes(-1, -2)
        return context.astype(mx.float32) @ successors


def predecessors(tokens: mx.array, anchor: mx.array) -> mx.array:
    """[n, k] what may precede each position: the anchor, then the candidates of the one before."""
    first = mx.repeat(anchor, tokens.shape[1])[None].astype(tokens.dtype)
    return mx.concatenate([first, tokens[:-1]])
