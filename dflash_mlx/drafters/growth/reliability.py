"""Chance by node: how likely drafted tokens are, going by what became of others; which to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_mlx.core.tree import Accepted, Tree
from dflash_mlx.verifier.pass_times import ROWS

_BINS = 10  # of confidence
_DEPTHS = 8  # told apart; deeper nodes count as the last
_PRIOR = 6.0  # nodes that a drafter's own confidence weighs as much as
_CREDIT = 2.0  # promised tokens until a drafter's confidence is doubted as a whole
_MEMORY = 300  # nodes that a cell remembers: texts differ

Seconds = Callable[[Any], npt.NDArray[Any]]  # of something, by the number of rows


class Reliability:
    """How often drafted tokens were right, by source, depth and confidence.

    A cell starts at the confidence itself, as if it had been seen to hold for a few tokens, and at
    less or more of it where the source has kept less or more than it promised in other cells.
    """

    def __init__(self, sources: Sequence[str] = ()) -> None:
        self._rows = {name: row for row, name in enumerate(("", *sources))}
        self.tried = np.zeros((len(self._rows), _DEPTHS, _BINS))
        self.right = np.zeros_like(self.tried)
        self.promised = np.zeros_like(self.tried)  # sums of confidences

    def chances(self, tree: Tree) -> npt.NDArray[Any]:
        """[N] estimated probability that each node is accepted, given that its parent is."""
        confidence = np.exp(np.array(tree.logprobs or (0.0,)))  # a lone root may have none
        cells = self._cells(tree, range(len(tree)), confidence)
        tried, right = self.tried[cells], self.right[cells]
        believed = np.minimum(confidence * self._trust()[cells[0]], 1.0)
        chances: npt.NDArray[Any] = (right + _PRIOR * believed) / (tried + _PRIOR)
        chances[0] = 1.0
        likely: npt.NDArray[Any] = np.minimum(chances, 1.0)
        return likely

    def learn(self, accepted: Accepted) -> None:
        tree, path = accepted.tree, set(accepted.path)
        known = set(accepted.path[:-1]) if accepted.ends else path  # nodes with known successors
        tested = [i for i in range(1, len(tree)) if tree.parents[i] in known]
        confidence = np.exp(np.array([tree.logprobs[i] for i in tested]))
        cells = self._cells(tree, tested, confidence)
        for counts in (self.tried, self.right, self.promised):
            counts[cells] *= 1 - 1 / _MEMORY
        np.add.at(self.tried, cells, 1)
        np.add.at(self.right, cells, [i in path for i in tested])
        np.add.at(self.promised, cells, confidence)

    def _cells(
        self, tree: Tree, nodes: Sequence[int], confidence: npt.NDArray[Any]
    ) -> tuple[list[int], Any, Any]:
        sources = [self._rows.get(tree.sources[i], 0) if tree.sources else 0 for i in nodes]
        depths = np.clip(np.array([tree.depths[i] for i in nodes], dtype=int), 1, _DEPTHS) - 1
        return sources, depths, np.clip((confidence * _BINS).astype(int), 0, _BINS - 1)

    def _trust(self) -> npt.NDArray[Any]:
        """[sources] what each has kept of what it promised."""
        kept, promised = (counts.sum(axis=(1, 2)) for counts in (self.right, self.promised))
        trust: npt.NDArray[Any] = (kept + _CREDIT) / (promised + _CREDIT)
        return trust


def reach(tree: Tree, chances: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[N] probability that a node and all before it are accepted."""
    result = np.ones(len(tree))
    for node in range(1, len(tree)):
        result[node] = result[tree.parents[node]] * chances[node]
    return result


@dataclass(frozen=True)
class Sizes:
    """The best part of one or several trees for every number of nodes."""

    expected: npt.NDArray[Any]  # [M] tokens that the best n + 1 nodes bring, the target's own too
    order: npt.NDArray[Any]  # [M] the nodes, best first, those of all trees counted through
    extra: npt.NDArray[Any]  # [M] seconds that branches add to a pass, or that drafts take besides
    least: int = 1  # nodes: the root of every tree

    @classmethod
    def of(
        cls, reached: Sequence[npt.NDArray[Any]], most: int, branching: Seconds | None = None
    ) -> Sizes:
        """Of any nodes, after all roots: the likeliest are closed under parents."""
        chances = np.concatenate(reached)
        first = chances.copy()
        first[np.cumsum([0, *map(len, reached[:-1])])] = 2.0  # roots, before what may be certain
        order = np.argsort(-first, kind="stable")[:most]
        extra = np.zeros(len(order))
        if branching is not None:
            extra = branching(np.arange(1, len(order) + 1))
        return cls(np.cumsum(chances[order]), order, extra, len(reached))

    @cached_property
    def counts(self) -> npt.NDArray[Any]:
        """Numbers of nodes to choose from: more are free up to a size that passes come in."""
        every = range(self.least, len(self.expected) + 1)
        return np.array([n for n in every if n in ROWS or n in (self.least, every[-1])])

    def best(self, seconds: Seconds, fixed: float) -> tuple[int, float]:
        """The number of nodes at the highest rate, expected tokens / (fixed + pass), and that."""
        passes = seconds(self.counts) + self.extra[self.counts - 1]
        rates = self.expected[self.counts - 1] / (fixed + passes)
        best = int(np.argmax(rates))
        return int(self.counts[best]), float(rates[best])

    def dearer(self, seconds: float) -> Sizes:
        return replace(self, extra=self.extra + seconds)

    def cost(self, seconds: Seconds, count: int) -> float:
        return float(seconds(count) + self.extra[count - 1])


def worth_keeping(
    trees: Sequence[Tree],
    reached: Sequence[npt.NDArray[Any]],
    seconds: Seconds,
    fixed: float,
    most: int,
    branching: Seconds | None = None,
) -> tuple[list[list[int]], int, Sizes]:
    """The nodes of each tree that together promise most tokens per second, all roots among them.

    Besides how many these are, and what other numbers promise. reached: [N] each, as `reach` gives
    it. seconds: of a target pass over n rows. fixed: seconds of the round beside it. most: nodes.
    branching: what branches add to a pass, see `never`; None for nothing.
    """
    sizes = Sizes.of(reached, most, branching)
    count, rate = sizes.best(seconds, fixed)
    if branching is not None:
        bare = [
            np.where(_likeliest_chain(tree, chances, most), chances, 0.0)
            for tree, chances in zip(trees, reached, strict=True)
        ]
        chains = Sizes.of(bare, min(most, sum(map(np.count_nonzero, bare))))
        longest, without = chains.best(seconds, fixed)
        if without > rate:
            sizes, count = chains, longest
    kept = np.sort(sizes.order[:count])
    borders = pairwise(np.cumsum([0, *map(len, reached)]))
    return [(kept[(kept >= a) & (kept < b)] - a).tolist() for a, b in borders], count, sizes


def _likeliest_chain(tree: Tree, reached: npt.NDArray[Any], most: int) -> npt.NDArray[np.bool_]:
    """[N] whether a node is on the path of up to `most` nodes with most expected tokens."""
    sums = reached.copy()
    for node in range(1, len(tree)):
        sums[node] += sums[tree.parents[node]]
    short = np.array(tree.depths) < most
    path: npt.NDArray[np.bool_] = tree.ancestors[int(np.argmax(np.where(short, sums, 0.0)))]
    return path


def never(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What branches add to passes of a target that verifies chains only."""
    return np.full(len(rows), np.inf)
