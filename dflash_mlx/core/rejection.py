"""Rejection sampling of a drawn chain (arXiv 2211.17192): exact, and it uses the drafter's q.

p target, q draft. A drafted token is kept with probability min(1, p/q); the first one that is not
is replaced by a draw from the normalised positive part of p - q. Every token then follows p. A
draft is kept with probability sum min(p, q), one that is a best guess d and is matched with p(d).
"""

from __future__ import annotations

import mlx.core as mx


def kept(p: mx.array, q: mx.array, tokens: mx.array, u: mx.array) -> mx.array:
    """How many drafted tokens are kept: all before the first that is rejected; [] int.

    p, q: [n, V], the laws at each of n drafted positions. tokens: [n], drawn from q. u: [n],
    uniform in [0, 1).
    """
    at = tokens[:, None]
    of_p, of_q = (mx.take_along_axis(law, at, axis=-1)[:, 0] for law in (p, q))
    return mx.cumprod((u * of_q < of_p).astype(mx.int32)).sum()


def remainder(p: mx.array, q: mx.array) -> mx.array:
    """The law [V] of the token in place of one that was not kept: max(0, p - q), normalised."""
    rest = mx.maximum(p - q, 0)
    total = rest.sum()
    return mx.where(total > 0, rest / total, p)  # nothing is left only where rounding says so
