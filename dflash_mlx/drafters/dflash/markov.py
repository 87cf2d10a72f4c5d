"""DSpark's heads (arXiv 2607.05147): what the token before says of a position, and how sure it is.

After token a, position t adds <A[a], B[b]> to the logit of every token b; the first position's
predecessor is the anchor. A second head says how likely the position's token is to be accepted
after a, c_t(a) = sigmoid(w [h_t; A[a]] + w_0), where h_t is the network's final state. It was
trained for the mass that the drafter's law and the target's have in common.
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
class MarkovConfig:
    """rank: of A and B. confidence: whether there is a second head. reads_token: whether it has a.

    Names in files: markov_rank, enable_confidence_head, confidence_head_with_markov.
    """

    rank: int
    confidence: bool = True
    reads_token: bool = True


class MarkovHead(nn.Module):
    """A [V, rank] of the target's vocabulary, and B [v, rank] of what the drafter's head knows."""

    def __init__(self, vocabulary: int, drafted: int, config: MarkovConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, config.rank)
        self.markov_w2 = nn.Linear(config.rank, drafted, bias=False)


class ConfidenceHead(nn.Module):
    """The weights w and w_0."""

    def __init__(self, d: int, config: MarkovConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(d + config.rank * config.reads_token, 1)


class MarkovLinks:
    """Both heads as `Links`.

    confidence: None where there is no such head. d2t: [v] what to add to a row of B for its token,
    None where row b is token b.
    """

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
        self, hidden: mx.array, logits: mx.array, anchor: mx.array, ids: mx.array | None
    ) -> Candidates:
        """All tokens that logits are for; scores are in float32."""
        tokens = mx.arange(logits.shape[1]) if ids is None else ids
        weight = self._after.weight
        after = weight if ids is None or self._rows is not None else weight[ids]

        def scores(t: int, before: mx.array) -> mx.array:
            token = anchor if t == 0 else tokens[before][None]
            bias: mx.array = self._before(token) @ after.T
            return logits[t].astype(mx.float32) + bias[0]

        def sure(path: mx.array) -> mx.array:
            return self.confidences(hidden, _behind(anchor, tokens[path])[:, None])[:, 0]

        whole = mx.broadcast_to(tokens, logits.shape)
        return Candidates(whole, scores, None if self._confidence is None else sure)

    def linked(
        self, hidden: mx.array, logits: mx.array, anchor: mx.array, ids: mx.array | None, rank: Rank
    ) -> Linked:
        """The likeliest behind the walk that takes the best token every time.

        So that walk has the very law of this head. After other tokens, what they add instead is
        known for these candidates only; the others keep what the walk left them.
        """
        candidates = self.candidates(hidden, logits, anchor, ids)
        path, scores = candidates.likeliest()
        ranked = rank(scores)
        tokens = mx.array(ranked.tokens)
        before = predecessors(tokens, anchor)
        walked = _behind(anchor, candidates.at(path))[:, None]
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


def _behind(anchor: mx.array, tokens: mx.array) -> mx.array:
    """[n] what precedes each of the tokens [n] of a path."""
    return mx.concatenate([anchor, tokens[:-1].astype(anchor.dtype)])
