"""Choices for a prefix tree where a candidate selector links every position with the one before.

After the token a before it on the path, a token b of position t is as likely as the softmax of
S_t(a -> b) (see `selector.py`) makes it. Tokens outside the candidates keep their plain logits, so
the candidates share what is left beside those.
"""

from __future__ import annotations

import numpy as np

from dflash_mlx.drafters.growth.grow import Array, Choices, Offers, Path, Ranked


def conditional(ranked: Ranked, edges: Array) -> Array:
    """[n, k, k] log-probability of the b-th candidate after the a-th of the position before.

    edges: [n, k, k] of these candidates, what the selector adds to their logits.
    """
    scores = ranked.logprobs[:, None] + edges
    others = np.clip(1 - np.exp(ranked.logprobs).sum(axis=-1), 0.0, None)[:, None, None]
    peak = scores.max(axis=-1, keepdims=True)
    total = np.log(np.exp(scores - peak).sum(axis=-1, keepdims=True)) + peak
    with np.errstate(divide="ignore"):  # others may be 0
        result: Array = scores - np.logaddexp(total, np.log(others))
    return result


def follow_links(ranked: Ranked, edges: Array, width: int | None = None) -> Choices:
    """Choices by depth and by the last token of the path, which must be a candidate there.

    width: only so many of the best.
    """
    logprobs = conditional(ranked, edges)
    places = [{token: i for i, token in enumerate(row)} for row in ranked.tokens.tolist()]
    order = np.argsort(-logprobs, axis=-1, kind="stable")[..., :width]
    tokens = np.take_along_axis(ranked.tokens[:, None], order, axis=-1).tolist()
    known = np.take_along_axis(logprobs, order, axis=-1).tolist()

    def choices(path: Path) -> Offers | None:
        depth = len(path)
        if depth == len(ranked):
            return None
        before = places[depth - 1][path[-1]] if path else 0
        return tokens[depth][before], known[depth][before]

    return choices


def along_path(ranked: Ranked, edges: Array, k: int) -> Ranked:
    """The k best candidates of every position after the best one of the position before.

    So the path through the best ones is the selector's greedy walk.
    """
    logprobs, before = conditional(ranked, edges), 0
    chosen = np.zeros((len(ranked), min(k, ranked.tokens.shape[1])), int)
    after = np.zeros((len(ranked), ranked.tokens.shape[1]))
    for depth in range(len(ranked)):
        after[depth] = logprobs[depth, before]
        chosen[depth] = np.argsort(-after[depth], kind="stable")[: chosen.shape[1]]
        before = int(chosen[depth, 0])
    tokens = np.take_along_axis(ranked.tokens, chosen, axis=1)
    return Ranked(tokens, np.take_along_axis(after, chosen, axis=1))
