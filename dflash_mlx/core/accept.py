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
    """What near-ties of the target's best two tokens took (see `exact.py`)."""

    checks: int = 0  # nodes that a pass over several rows could not decide
    passes: int = 0  # one-row target passes spent on them
    replays: int = 0  # times that the tokens since the last replay were computed one by one
    changed: int = 0  # decisions that came out otherwise
    seconds: float = 0.0  # in all

    def __add__(self, other: NearTies) -> NearTies:
        return NearTies(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Accepted:
    """The drafted tokens that the target accepts, and its own token after them."""

    tree: Tree
    path: tuple[int, ...]  # accepted nodes, root first
    token: int | mx.array  # the target's, [1] that may be unevaluated
    near_ties: NearTies | None = None  # where they were looked for
    ends: bool = False  # nothing may follow, because the answer's grammar ends here
    logits: mx.array | None = None  # [n, V] of the n new tokens, where they were asked for

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """The new tokens of the round: accepted drafts, then the target's; waits for the device."""
        drafts = (self.tree.drafted[node - 1] for node in self.path[1:])
        return (*drafts, _value(self.token))

    def wait(self) -> Accepted:
        _ = self.tokens
        return self

    @property
    def next_anchor(self) -> mx.array:
        """[1] the target's token."""
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
