"""Rejection sampling of a drawn chain (arXiv 2211.17192): exact, and it uses the drafter's q.

p target, q draft. A drafted token is kept with probability min(1, p/q); the first one that is not
is replaced by a draw from the normalised positive part of p - q. Every token then follows p. A
draft is kept with probability sum min(p, q), one that is a best guess d and is matched with p(d).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.core.tree import Tree
from dflash_mlx.engine.rules import Match
from dflash_mlx.engine.state import State
from dflash_mlx.engine.verify import Verdict

DRAFT, KEEP = 1, 2  # streams of randomness beside the target's own


@dataclass(frozen=True)
class DrawnChain(Tree):
    """A chain whose tokens 1..N-1 were drawn each from its row of q [N-1, V].

    A row may depend on the tokens drawn before it.
    A part of it is an ordinary tree: cutting by what was drawn changes the law of what is left.
    """

    q: mx.array | None = None

    def only(self, nodes: Sequence[int]) -> Tree:
        """The tree of these nodes, without its q."""
        return Tree(self.tokens, self.parents, self.logprobs).only(nodes)


def keeps(p: mx.array, q: mx.array, token: int, u: mx.array) -> bool:
    """Whether `token`, drawn from q [V], is kept; u: uniform in [0, 1)."""
    return bool((u * q[token] < p[token]).item())


def remainder(p: mx.array, q: mx.array) -> mx.array:
    """The law [V] of the token in place of one that was not kept: max(0, p - q), normalised."""
    rest = mx.maximum(p - q, 0)
    total = rest.sum()
    return mx.where(total > 0, rest / total, p)  # nothing is left only where rounding says so


class Reject:
    """The acceptance rule of drawn chains; other trees are matched."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._match = Match(sampler)

    def accept(self, verdict: Verdict, state: State) -> Accepted:
        """Keep drafts up to the first that is rejected; then one token from p or what is left."""
        tree, sampler = verdict.tree, self._sampler
        if not isinstance(tree, DrawnChain) or tree.q is None:
            return self._match.accept(verdict, state)
        before = state.tokens if sampler.needs_history else []
        position = state.position + 1
        for k, token in enumerate(tree.drafted):
            p = sampler.law(verdict.logits[k], [*before, *tree.drafted[:k]])
            if not keeps(
                p, tree.q[k], token, mx.random.uniform(key=sampler.key(position + k, KEEP))
            ):
                p = remainder(p, tree.q[k])
                return Accepted(tree, tuple(range(k + 1)), self._draw(p, position + k))
        k = len(tree) - 1
        p = sampler.law(verdict.logits[k], [*before, *tree.drafted])
        return Accepted(tree, tuple(range(k + 1)), self._draw(p, position + k))

    def _draw(self, p: mx.array, position: int) -> mx.array:
        return mx.random.categorical(mx.log(p)[None], key=self._sampler.key(position))
