"""Which drafted tokens to keep: follow the target's own choices through the tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cached_property

import mlx.core as mx

from dflash_mlx.core.tree import Tree

Choose = Callable[[tuple[int, ...]], "int | mx.array"]


@dataclass(frozen=True)
class NearTies:
    """What near-ties of the target's best two tokens took (see `exact.py`).

    checks: nodes that a pass over several rows could not decide. passes: one-row target passes
    spent on them. replays: how often the tokens since the last replay were computed again one by
    one, which takes a pass for each. changed: decisions that came out otherwise. seconds: in all.
    """

    checks: int = 0
    passes: int = 0
    replays: int = 0
    changed: int = 0
    seconds: float = 0.0

    def __add__(self, other: NearTies) -> NearTies:
        return NearTies(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Accepted:
    """The nodes of `tree` on the accepted path, root first, and the target's token after them.

    token: an integer, or [1] that may be unevaluated. near_ties: where they were looked for. ends:
    whether nothing may follow, because the answer's grammar ends here. logits: [n, V] that the n
    new tokens were chosen from, where they were asked for.
    """

    tree: Tree
    path: tuple[int, ...]
    token: int | mx.array
    near_ties: NearTies | None = None
    ends: bool = False
    logits: mx.array | None = None

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """The new tokens of the round: accepted drafts, then the target's; waits for the device."""
        drafts = (self.tree.drafted[node - 1] for node in self.path[1:])
        return (*drafts, _value(self.token))

    def wait(self) -> Accepted:
        """Return when the tokens are known."""
        _ = self.tokens
        return self

    @property
    def next_anchor(self) -> mx.array:
        """[1] the target's token, as the root of the next tree."""
        return mx.array([self.token]) if isinstance(self.token, int) else self.token


def accept(tree: Tree, choose: Choose) -> Accepted:
    """Take the target's token at a node, follow the child that carries it, else stop.

    choose(path) is the target's token after the nodes in `path` (an integer or [1]), drawn from
    its own law given that prefix. Every emitted token is such a draw, so the output follows the
    target's law whatever was drafted and however the tree was built (greedy: argmax; sampled: any
    sampler). A node without children is not compared, so its token may stay unevaluated.
    """
    path: tuple[int, ...] = (0,)
    token = choose(path)
    while tree.has_children(path[-1]):
        child = tree.child(path[-1], _value(token))
        if child is None:
            break
        path = (*path, child)
        token = choose(path)
    return Accepted(tree, path, token)


def _value(token: int | mx.array) -> int:
    return token if isinstance(token, int) else int(token.item())  # type: ignore[arg-type]
