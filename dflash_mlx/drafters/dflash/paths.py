"""Paths through a block whose positions know the token before them: DFlash 2's and DSpark's heads.

*DFlash 2's selector.* Position t offers its top-k tokens b by their draft logits. After token a at
the position before, S_t(a -> b) = logit_t(b) + <A[a] * (H h_t), B[b]>, where h_t is the network's
final state, after its last norm, A and B are the codebooks of predecessors and successors, and * is
element by element. The first position's predecessor is the anchor.

*DSpark's heads* (arXiv 2607.05147). After token a, position t adds <A[a], B[b]> to the logit of
every token b. A second head says how likely the position's token is to be accepted after a,
c_t(a) = sigmoid(w [h_t; A[a]] + w_0). It was trained for the mass that the drafter's law and the
target's have in common.

Both have `candidates` for chains, drawn ones too, and `linked` for trees, with `top_k` tokens at
every position, which waits for the pass; so has Domino's head, see `domino`. hidden: [n, d] final
states of consecutive positions. logits: [n, v] of the same, before this head. shown: [1 + l] the
anchor and l drafts that the block shows. ids: [v] the tokens that logits are for, None for all of
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.drafters.growth.grow import Linked, Ranked
from kernels_metal.draft_head import MAX_K


@dataclass(frozen=True)
class Candidates:
    """What a path can go through."""

    tokens: mx.array  # [n, k] of each position
    # The scores [k] at position t behind the candidate of index [] at the position before, at the
    # first position behind what is shown, whatever the index; and what is remembered of the path,
    # as it was after the position before, None at first.
    after: Callable[[int, mx.array, Any], tuple[mx.array, Any]]
    # How likely each position of a path [n] of indices is to be accepted, where a head says so
    confidences: Callable[[mx.array], mx.array] | None = None

    def walk(self, choose: Callable[[int, mx.array], mx.array]) -> tuple[mx.array, mx.array]:
        """A path from the anchor, the indices [n], and the scores [n, k] that it was chosen from.

        choose(t, scores [k]): the index [] that it takes at position t. Nothing is evaluated.
        """
        path, scores, memory = [mx.array(0)], [], None
        for t in range(self.tokens.shape[0]):
            found, memory = self.after(t, path[-1], memory)
            scores.append(found)
            path.append(choose(t, found))
        return mx.stack(path[1:]), mx.stack(scores)

    def changed(self, change: Callable[[mx.array], mx.array]) -> Candidates:
        """These candidates, with `change` applied to the scores [k] of each position."""

        def after(t: int, before: mx.array, memory: Any) -> tuple[mx.array, Any]:
            scores, memory = self.after(t, before, memory)
            return change(scores), memory

        return replace(self, after=after)

    def likeliest(self) -> tuple[mx.array, mx.array]:
        """The walk that takes the best next candidate every time."""
        return self.walk(lambda t, scores: mx.argmax(scores))

    def at(self, path: mx.array) -> mx.array:
        """The tokens [n] at these indices [n]."""
        return mx.take_along_axis(self.tokens, path[:, None], axis=1)[:, 0]


Rank = Callable[[mx.array], Ranked]  # the likeliest tokens of each row of logits [n, v]


def predecessors(tokens: mx.array, anchor: mx.array) -> mx.array:
    """[n, k] what may precede each position: the anchor, then the candidates of the one before."""
    first = mx.repeat(anchor, tokens.shape[1])[None].astype(tokens.dtype)
    return mx.concatenate([first, tokens[:-1]])


def behind(anchor: mx.array, tokens: mx.array) -> mx.array:
    """[n] what precedes each of the tokens [n] of a path."""
    return mx.concatenate([anchor, tokens[:-1].astype(anchor.dtype)])


class CandidateSelector(nn.Module):
    """The codebooks [V, rank] and the projection H, d -> rank.

    top_k: tokens that a position offers. offered: those that it may offer, the first ones, None for
    all.
    """

    def __init__(
        self, vocabulary: int, d: int, rank: int, top_k: int, offered: int | None = None
    ) -> None:
        super().__init__()
        self._top_k, self._offered = top_k, offered
        self.predecessor_codebook = mx.zeros((vocabulary, rank))
        self.successor_codebook = mx.zeros((vocabulary, rank))
        self.hidden_projection = nn.Linear(d, rank, bias=False)

    @property
    def top_k(self) -> int:
        """Tokens that a position offers, as many as can be ranked at once."""
        return min(self._top_k, MAX_K)

    def candidates(
        self, hidden: mx.array, logits: mx.array, shown: mx.array, ids: mx.array | None = None
    ) -> Candidates:
        k, logits = self._top_k, self._offer(logits, ids)
        tokens = mx.argpartition(logits, -k, axis=-1)[:, -k:]
        unary = mx.take_along_axis(logits, tokens, axis=-1).astype(mx.float32)
        tokens = tokens if ids is None else ids[tokens]
        scores = unary[:, None] + self.edges(hidden, predecessors(tokens, shown[-1:]), tokens)
        return Candidates(tokens, lambda t, before, _: (scores[t, before], None))

    def linked(
        self, hidden: mx.array, logits: mx.array, shown: mx.array, ids: mx.array | None, rank: Rank
    ) -> Linked:
        ranked = rank(self._offer(logits, ids))
        tokens = mx.array(ranked.tokens)
        edges = self.edges(hidden, predecessors(tokens, shown[-1:]), tokens)
        return Linked(ranked, np.array(edges))

    def _offer(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        """Logits, -inf for tokens that are padding of the vocabulary."""
        if self._offered is None:
            return logits
        tokens = mx.arange(logits.shape[1]) if ids is None else ids
        return mx.where(tokens < self._offered, logits, -mx.inf)

    def edges(self, hidden: mx.array, before: mx.array, tokens: mx.array) -> mx.array:
        """[n, j, k] <A[a] * (H h_t), B[b]> in float32.

        hidden: [n, d] final states. before: [n, j] tokens a. tokens: [n, k] tokens b.
        """
        context = self.predecessor_codebook[before] * self.hidden_projection(hidden)[:, None]
        successors = self.successor_codebook[tokens].swapaxes(-1, -2)
        return context.astype(mx.float32) @ successors


class MarkovHead(nn.Module):
    """A [V, rank] of the target's vocabulary, and B [v, rank] of what the drafter's head knows."""

    def __init__(self, vocabulary: int, drafted: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)


class ConfidenceHead(nn.Module):
    """The weights w, for [h_t; A[a]] or h_t alone, and w_0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class MarkovLinks:
    """Both heads as `Links`."""

    top_k = MAX_K

    def __init__(
        self, head: MarkovHead, confidence: ConfidenceHead | None, d2t: mx.array | None
    ) -> None:
        self._before, self._after = head.markov_w1, head.markov_w2
        self._confidence = confidence
        self._rows: mx.array | None = None
        if d2t is not None:
            ids = np.arange(d2t.size) + np.array(d2t)
            rows = np.zeros(head.markov_w1.weight.shape[0], np.int32)
            rows[ids] = np.arange(d2t.size)
            self._rows = mx.array(rows)

    def candidates(
        self, hidden: mx.array, logits: mx.array, shown: mx.array, ids: mx.array | None
    ) -> Candidates:
        """All tokens that logits are for; scores are in float32."""
        anchor = shown[-1:]
        tokens = mx.arange(logits.shape[1]) if ids is None else ids
        weight = self._after.weight
        after = weight if ids is None or self._rows is not None else weight[ids]

        def scores(t: int, before: mx.array, _: None) -> tuple[mx.array, None]:
            token = anchor if t == 0 else tokens[before][None]
            bias: mx.array = self._before(token) @ after.T
            return logits[t].astype(mx.float32) + bias[0], None

        def sure(path: mx.array) -> mx.array:
            return self.confidences(hidden, behind(anchor, tokens[path])[:, None])[:, 0]

        whole = mx.broadcast_to(tokens, logits.shape)
        return Candidates(whole, scores, None if self._confidence is None else sure)

    def linked(
        self, hidden: mx.array, logits: mx.array, shown: mx.array, ids: mx.array | None, rank: Rank
    ) -> Linked:
        """The likeliest behind the walk that takes the best token every time.

        So that walk has the very law of this head. After other tokens, what they add instead is
        known for these candidates only; the others keep what the walk left them.
        """
        candidates, anchor = self.candidates(hidden, logits, shown, ids), shown[-1:]
        path, scores = candidates.likeliest()
        ranked = rank(scores)
        tokens = mx.array(ranked.tokens)
        before = predecessors(tokens, anchor)
        walked = behind(anchor, candidates.at(path))[:, None]
        edges = self.edges(before, tokens) - self.edges(walked, tokens)
        sure = None if self._confidence is None else np.array(self.confidences(hidden, before))
        return Linked(ranked, np.array(edges), sure)

    def edges(self, before: mx.array, tokens: mx.array) -> mx.array:
        """[n, j, k] <A[a], B[b]> in float32. before: [n, j] tokens a. tokens: [n, k] tokens b."""
        rows = tokens if self._rows is None else self._rows[tokens]
        known: mx.array = self._before(before).astype(mx.float32)
        return known @ self._after.weight[rows].swapaxes(-1, -2)

    def confidences(self, hidden: mx.array, before: mx.array) -> mx.array:
        """[n, j] how likely position t [n, d] is to be accepted after tokens before [n, j]."""
        assert self._confidence is not None
        given = mx.repeat(hidden[:, None], before.shape[1], axis=1)
        if self._confidence.proj.weight.shape[-1] > hidden.shape[-1]:
            given = mx.concatenate([given, self._before(before).astype(hidden.dtype)], axis=-1)
        return mx.sigmoid(self._confidence.proj(given)[..., 0].astype(mx.float32))
