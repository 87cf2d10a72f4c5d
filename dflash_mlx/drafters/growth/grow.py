"""How draft distributions become prefix trees: pure functions of tokens and probabilities."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_mlx.core.tree import Tree

Path = tuple[int, ...]  # drafted tokens from the root on
Array = npt.NDArray[Any]
Offers = tuple[list[int], list[float]]  # tokens and their log-probabilities, best first
Choices = Callable[[Path], Offers | None]  # what may follow a path; None where that is not known

FIRST, SECOND = "first", "second"  # draft, of two
LEAST = 1e-300  # a probability whose logarithm is finite


@dataclass(frozen=True)
class Ranked:
    """The likeliest tokens of consecutive positions, best first."""

    tokens: Array  # [positions, k]
    logprobs: Array  # [positions, k]

    def __len__(self) -> int:
        return len(self.tokens)

    def after(self, positions: int) -> Ranked:
        return Ranked(self.tokens[positions:], self.logprobs[positions:])

    @cached_property
    def offers(self) -> list[Offers]:
        return list(zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True))

    @property
    def best(self) -> Path:
        return tuple(self.tokens[:, 0].tolist())

    @property
    def confidences(self) -> Array:
        return np.exp(self.logprobs[:, 0])


def rejection_boundaries(confidences: Array) -> Array:
    """r(i) for i = 0 .. gamma - 2: probability that exactly i drafts are accepted.

    r(i) = c_1 ... c_i (1 - c_{i+1}); confidences: [gamma - 1] c_1, c_2, ... (D2SD, arXiv
    2606.04446, section 3.2).
    """
    reach = np.concatenate([[1.0], np.cumprod(confidences)[:-1]])
    result: Array = reach * (1 - confidences)
    return result


def likely_boundaries(
    choices: Choices, branches: int, longest: int, known: Collection[Path] = ()
) -> dict[Path, float]:
    """The paths with the largest posterior of being accepted exactly as far as they go, and it.

    r(path) = q(path) (1 - c), with c the confidence in what follows it; for paths through the best
    tokens alone this is `rejection_boundaries`. A path that nothing follows ends where it is
    accepted at all. At most `branches` paths of up to `longest` tokens, likeliest first, none of
    which is `known`.
    """
    tree = best_first(choices, 4 * branches)
    paths: list[Path] = [()]
    reach = [0.0]
    nodes = zip(tree.drafted, tree.parents[1:], tree.logprobs[1:], strict=True)
    for token, parent, logprob in nodes:
        paths.append((*paths[parent], token))
        reach.append(reach[parent] + logprob)
    posterior = {}
    for path, reached in zip(paths, reach, strict=True):
        if len(path) <= longest and path not in known:
            behind = choices(path)
            missed = 1.0 if behind is None else 1 - math.exp(behind[1][0])
            posterior[path] = math.exp(reached) * missed
    return likeliest(posterior, branches)


def likeliest(chances: Mapping[Path, float], count: int) -> dict[Path, float]:
    """The `count` likeliest, in that order."""
    return dict(sorted(chances.items(), key=lambda item: -item[1])[:count])


def best_first(choices: Choices, nodes: int, second: Collection[Path] = ()) -> Tree:
    """The `nodes` likeliest prefixes, the root included (DDTree, arXiv 2604.12989).

    A prefix is as likely as the product of its tokens; what is impossible has -inf. Each node taken
    offers its next sibling and its first child, so parents come before children and likelier
    siblings before others. No two siblings carry one token. second: prefixes, () apart, behind
    which nodes are the second drafter's.
    """
    tokens: list[int] = []
    parents, logprobs, sources = [-1], [0.0], [""]
    order = 0  # of two that are as likely the older goes first
    first = choices(())
    heap: list[tuple[float, int, int, Path, int, Offers]] = []
    if first is not None:
        heap = [(-first[1][0], 0, 0, (), 0, first)]
    while heap and len(parents) < nodes and heap[0][0] < math.inf:
        score, _, parent, path, rank, offers = heapq.heappop(heap)
        token, logprob = offers[0][rank], offers[1][rank]
        order += 2
        if rank + 1 < len(offers[1]):
            beside = score + logprob - offers[1][rank + 1]
            heapq.heappush(heap, (beside, order, parent, path, rank + 1, offers))
        continued = second and parent and (sources[parent] == SECOND or path in second)
        path = (*path, token)
        if (below := choices(path)) is not None:
            child = (score - below[1][0], order + 1, len(parents), path, 0, below)
            heapq.heappush(heap, child)
        tokens.append(token)
        parents.append(parent)
        logprobs.append(logprob)
        sources.append(SECOND if continued else FIRST)
    return Tree(tuple(tokens), tuple(parents), tuple(logprobs), tuple(sources))


def follow(ranked: Ranked) -> Choices:
    """Choices by depth alone: what one draft pass knows."""
    offers = ranked.offers
    return lambda path: offers[len(path)] if len(path) < len(offers) else None


def walk(choices: Choices) -> tuple[Path, list[float]]:
    """The likeliest token after each other, and their log-probabilities."""
    path: Path = ()
    logprobs: list[float] = []
    while (offers := choices(path)) is not None:
        path = (*path, offers[0][0])
        logprobs.append(offers[1][0])
    return path, logprobs


def mix(offers: Offers, others: Offers, share: float) -> Offers:
    """(1 - share) offers + share others, over the tokens that either ranks; as many as `offers`."""
    mass: dict[int, float] = {}
    for (tokens, logprobs), weight in ((offers, 1 - share), (others, share)):
        for token, logprob in zip(tokens, logprobs, strict=True):
            mass[token] = mass.get(token, 0.0) + weight * math.exp(logprob)
    best = sorted(mass, key=lambda token: (-mass[token], token))[: len(offers[0])]
    return best, [math.log(max(mass[token], LEAST)) for token in best]
