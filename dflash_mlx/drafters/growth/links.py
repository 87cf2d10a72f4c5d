"""Choices for a prefix tree where a head links every position with the one before.

After the token a before it on the path, a token b of position t is as likely as the softmax of
S_t(a -> b) makes it, its logit and the edge from a (see `selector.py` and `markov.py`). Tokens
outside the candidates keep their logits, so the candidates share what is left beside those.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflash_mlx.drafters.growth.grow import LEAST, Array, Choices, Offers, Path, Ranked


@dataclass(frozen=True)
class Linked:
    """Candidates of consecutive positions, and what links each with those of the one before."""

    ranked: Ranked  # k of each of n positions
    # [n, k, k] what the logit of the b-th gains after the a-th before; all alike at the first
    edges: Array
    # [n, k] how likely the best one after the a-th is to be accepted; None goes by `edges` alone
    confidences: Array | None = None

    @cached_property
    def logprobs(self) -> Array:
        law = conditional(self.ranked, self.edges)
        return law if self.confidences is None else confident(law, self.confidences)


def conditional(ranked: Ranked, edges: Array) -> Array:
    """[n, k, k] log-probability of the b-th candidate after the a-th of the position before.

    edges: [n, k, k] as of `Linked`.
    """
    scores = ranked.logprobs[:, None] + edges
    others = np.clip(1 - np.exp(ranked.logprobs).sum(axis=-1), 0.0, None)[:, None, None]
    peak = scores.max(axis=-1, keepdims=True)
    total = np.log(np.exp(scores - peak).sum(axis=-1, keepdims=True)) + peak
    with np.errstate(divide="ignore"):  # others may be 0
        result: Array = scores - np.logaddexp(total, np.log(others))
    return result


def confident(logprobs: Array, confidences: Array) -> Array:
    """Logprobs [..., k] whose best is as likely as `confidences` [...] say.

    The others lose as much as the best does; where it gains, they share what it leaves. So no other
    overtakes it, and all together are no more than 1.
    """
    best = logprobs.argmax(axis=-1)[..., None]
    highest = np.take_along_axis(logprobs, best, axis=-1)
    sure = np.clip(confidences, LEAST, 1 - 1e-7)[..., None]
    with np.errstate(divide="ignore"):  # the best may be certain
        left = np.log1p(-sure) - np.log1p(-np.exp(np.minimum(highest, 0)))
    result: Array = logprobs + np.minimum(np.log(sure) - highest, left)
    np.put_along_axis(result, best, np.log(sure), axis=-1)
    return result


def follow_links(linked: Linked, width: int | None = None) -> Choices:
    """Choices by depth and by the last token of the path.

    Behind one that is no candidate there, as another drafter may have it, nothing is known of the
    links. width: only so many of the best.
    """
    ranked, logprobs = linked.ranked, linked.logprobs
    places = [{token: i for i, token in enumerate(row)} for row in ranked.tokens.tolist()]
    order = np.argsort(-logprobs, axis=-1, kind="stable")[..., :width]
    tokens = np.take_along_axis(ranked.tokens[:, None], order, axis=-1).tolist()
    known = np.take_along_axis(logprobs, order, axis=-1).tolist()

    def choices(path: Path) -> Offers | None:
        depth = len(path)
        if depth >= len(ranked):
            return None
        before = places[depth - 1].get(path[-1]) if path else 0
        if before is None:
            offered, logprobs = ranked.offers[depth]
            return offered[:width], logprobs[:width]
        return tokens[depth][before], known[depth][before]

    return choices
