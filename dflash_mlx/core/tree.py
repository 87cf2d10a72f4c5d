"""The prefix tree: everything a drafter proposes, from nothing (a root) to a chain to branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Tree:
    """N candidate tokens whose shared prefixes are shared nodes (D2SD, arXiv 2606.04446, 3.3).

    Node 0 is the root and carries the anchor: the newest token, chosen by the target, whose keys
    and values are not in the cache yet. Every other node is a drafted token.

    tokens: [N] int, may be unevaluated; nothing here reads the root's value.
    parents: N node ids; `parents[0]` is -1 and `parents[i] < i`.
    logprobs: N, of each token given those before it, as its drafter sees it; () if not known.
    sources: N, which drafter each token came from ("first", "second", "lookup"; "" for the root);
    () where there is only one. mode, reason: how and why this tree was chosen among others; ""
    where nothing chooses.
    """

    tokens: mx.array
    parents: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    sources: tuple[str, ...] = ()
    mode: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        in_order = all(-1 < p < i for i, p in enumerate(self.parents[1:], start=1))
        if self.parents[:1] != (-1,) or not in_order or self.tokens.shape != (len(self.parents),):
            raise ValueError(f"not a tree: tokens {self.tokens.shape}, parents {self.parents}")

    @classmethod
    def chain(cls, tokens: mx.array) -> Tree:
        """The tree with one branch: `tokens` [N], the anchor first."""
        return cls(tokens, tuple(range(-1, tokens.shape[0] - 1)))

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int]) -> Tree:
        """A tree from plain integers."""
        return cls(mx.array(list(tokens)), tuple(parents))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node but the last has exactly one child."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root."""
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
        """The tokens of nodes 1..N-1; waits for the draft pass."""
        return tuple(self.tokens[1:].tolist()) if len(self) > 1 else ()  # type: ignore[arg-type]

    def wait(self) -> None:
        """Return when the drafted tokens are known."""
        _ = self.drafted

    def only(self, nodes: Sequence[int]) -> Tree:
        """The tree of these nodes, increasing, the root and every node's parent among them."""
        place = {node: i for i, node in enumerate(nodes)}
        parents = (-1, *(place[self.parents[node]] for node in nodes[1:]))
        logprobs = tuple(self.logprobs[node] for node in nodes) if self.logprobs else ()
        sources = tuple(self.sources[node] for node in nodes) if self.sources else ()
        tokens = self.tokens[mx.array(list(nodes))]
        return replace(self, tokens=tokens, parents=parents, logprobs=logprobs, sources=sources)

    def graft(self, tokens: Sequence[int], logprobs: Sequence[float], source: str) -> Tree:
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
        new = mx.array(list(tokens[shared:]), dtype=self.tokens.dtype)
        return Tree(
            mx.concatenate([self.tokens, new]), tuple(parents), tuple(known), tuple(sources)
        )

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, if there is one."""
        for i, parent in enumerate(self.parents[1:], start=1):
            if parent == node and self.drafted[i - 1] == token:
                return i
        return None

    def has_children(self, node: int) -> bool:
        """Whether any node hangs below `node`."""
        return node in self.parents

    def path_to(self, node: int) -> tuple[int, ...]:
        """Node ids from the root to `node`, both included."""
        path = [node]
        while (parent := self.parents[path[-1]]) >= 0:
            path.append(parent)
        return tuple(reversed(path))
