"""The prefix tree, everything a drafter proposes, and which of its tokens to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import count
from operator import lt

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Choose = Callable[[tuple[int, ...]], "int | mx.array"]


@dataclass(frozen=True)
class Tree:
    """N candidate tokens whose shared prefixes are shared nodes (D2SD, arXiv 2606.04446, 3.3).

    Node 0 is the root: the anchor, the newest token, chosen by the target, whose keys and values
    are not in the cache yet. Node i > 0 is the drafted token `drafted[i - 1]`. A tree lives on the
    host; its ids go to the device once, in `verify`.
    """

    # N - 1 token ids; an array [N - 1] while the pass that drafts them may still be running.
    drafts: tuple[int, ...] | mx.array
    parents: tuple[int, ...]  # N node ids; -1 of the root, else smaller than the node's own
    logprobs: tuple[float, ...] = ()  # N, given the tokens before, as drafters see it; or unknown
    sources: tuple[str, ...] = ()  # N, whose each token is, "" of the root; or of one drafter
    said: tuple[float, ...] = ()  # N, Unix seconds of the earlier texts that tokens are from, or 0

    def __post_init__(self) -> None:
        size = self.drafts.size if isinstance(self.drafts, mx.array) else len(self.drafts)
        in_order = all(map(lt, self.parents, count())) and min(self.parents[1:], default=0) >= 0
        if self.parents[:1] != (-1,) or not in_order or size + 1 != len(self.parents):
            raise ValueError(f"not a tree: {size} drafted tokens, parents {self.parents}")

    @classmethod
    def chain(cls, drafts: Sequence[int] | mx.array = ()) -> Tree:
        """The tree with one branch; the root alone without drafts."""
        drafts = drafts if isinstance(drafts, mx.array) else tuple(drafts)
        return cls(drafts, tuple(range(-1, len(drafts))))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def ancestors(self) -> npt.NDArray[np.bool_]:
        """[N, N]: `ancestors[i, j]` when j is i or lies on the path from the root to i."""
        matrix = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents[1:], start=1):
            matrix[node] |= matrix[parent]
        return matrix

    @cached_property
    def drafted(self) -> tuple[int, ...]:
        """The tokens of nodes 1..N-1; waits for a draft pass that is still running."""
        if isinstance(self.drafts, mx.array):
            return tuple(self.drafts.tolist())  # type: ignore[arg-type]
        return self.drafts

    @property
    def is_known(self) -> bool:
        return not isinstance(self.drafts, mx.array) or "drafted" in vars(self)

    def wait(self) -> None:
        _ = self.drafted

    def ids(self, anchor: mx.array) -> mx.array:
        """[N] the tokens of a pass over all nodes, behind the anchor [1]."""
        if len(self) == 1:
            return anchor
        return mx.concatenate([anchor, mx.array(self.drafts, dtype=anchor.dtype)])

    def prune(self, nodes: Sequence[int]) -> Tree:
        """The tree of these nodes, increasing, the root and every node's parent among them."""
        if len(nodes) == len(self):
            return self
        place = {node: i for i, node in enumerate(nodes)}
        return Tree(
            tuple(self.drafted[node - 1] for node in nodes[1:]),
            (-1, *(place[self.parents[node]] for node in nodes[1:])),
            tuple(self.logprobs[node] for node in nodes) if self.logprobs else (),
            tuple(self.sources[node] for node in nodes) if self.sources else (),
            tuple(self.said[node] for node in nodes) if self.said else (),
        )

    def merge(self, tokens: Sequence[int], logprobs: Sequence[float], source: str) -> Tree:
        """This tree and the chain `tokens` from its root on; shared prefixes stay shared.

        Every node must have its log-probability; a node that both have is whose it is likelier.
        """
        known, sources = list(self.logprobs or (0.0,)), list(self.sources or [""] * len(self))
        parents, node, shared = list(self.parents), 0, 0
        while shared < len(tokens) and (child := self.child(node, tokens[shared])) is not None:
            if logprobs[shared] > known[child]:
                known[child], sources[child] = logprobs[shared], source
            node, shared = child, shared + 1
        for logprob in logprobs[shared:]:
            parents.append(node)
            known.append(logprob)
            sources.append(source)
            node = len(parents) - 1
        drafted = (*self.drafted, *tokens[shared:])
        return Tree(drafted, tuple(parents), tuple(known), tuple(sources))

    def child(self, node: int, token: int) -> int | None:
        return self._children.get((node, token))

    def has_children(self, node: int) -> bool:
        return node in self.parents

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        edges = zip(self.parents[1:], self.drafted, strict=True)
        return {edge: node for node, edge in reversed(list(enumerate(edges, start=1)))}


def rows_on(path: Sequence[int]) -> slice | mx.array:
    """An index for the rows on `path`, which increases; a leading run is a slice."""
    leading = not path or path[-1] == len(path) - 1
    return slice(len(path)) if leading else mx.array(list(path))


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
