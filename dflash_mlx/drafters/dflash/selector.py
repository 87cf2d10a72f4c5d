"""DFlash 2's candidate selector: a path through the likeliest tokens of every position.

Position t offers its top-k tokens b by their draft logits. After token a at the position before,
S_t(a -> b) = logit_t(b) + <A[a] * (H h_t), B[b]>, where h_t is the network's final state, after
its last norm, A and B are the codebooks of predecessors and successors, and * is element by
element. The first position's predecessor is the anchor.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.drafters.dflash.paths import Candidates, Rank, predecessors
from dflash_mlx.drafters.growth.links import Linked
from kernels_metal.draft_head import MAX_K


@dataclass(frozen=True)
class SelectorConfig:
    """rank: of the codebooks. top_k: tokens that a position offers."""

    rank: int
    top_k: int


class CandidateSelector(nn.Module):
    """The codebooks [V, rank] and the projection H, d -> rank."""

    def __init__(self, vocabulary: int, d: int, config: SelectorConfig) -> None:
        super().__init__()
        self._top_k = config.top_k
        self.predecessor_codebook = mx.zeros((vocabulary, config.rank))
        self.successor_codebook = mx.zeros((vocabulary, config.rank))
        self.hidden_projection = nn.Linear(d, config.rank, bias=False)

    @property
    def top_k(self) -> int:
        """Tokens that a position offers, as many as can be ranked at once."""
        return min(self._top_k, MAX_K)

    def candidates(
        self, hidden: mx.array, logits: mx.array, anchor: mx.array, ids: mx.array | None = None
    ) -> Candidates:
        """The candidates of n positions; scores are in float32. See `Links`."""
        k = self._top_k
        tokens = mx.argpartition(logits, -k, axis=-1)[:, -k:]
        unary = mx.take_along_axis(logits, tokens, axis=-1).astype(mx.float32)
        tokens = tokens if ids is None else ids[tokens]
        edges = self.edges(hidden, predecessors(tokens, anchor), tokens)
        return Candidates.of_table(tokens, unary[:, None] + edges)

    def linked(
        self, hidden: mx.array, logits: mx.array, anchor: mx.array, ids: mx.array | None, rank: Rank
    ) -> Linked:
        """The candidates, ranked, and the edges between them."""
        ranked = rank(logits)
        tokens = mx.array(ranked.tokens)
        edges = self.edges(hidden, predecessors(tokens, anchor), tokens)
        return Linked(ranked, np.array(edges))

    def edges(self, hidden: mx.array, before: mx.array, tokens: mx.array) -> mx.array:
        """[n, j, k] <A[a] * (H h_t), B[b]> in float32.

        hidden: [n, d] final states. before: [n, j] tokens a. tokens: [n, k] tokens b.
        """
        context = self.predecessor_codebook[before] * self.hidden_projection(hidden)[:, None]
        successors = self.successor_codebook[tokens].swapaxes(-1, -2)
        return context.astype(mx.float32) @ successors
