"""From a draft's logits to its likeliest tokens, and from these to a prefix tree, on the host."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.core.tree import Tree
from dflash_mlx.system import cpu_math
from dflash_mlx.verifier.routing import Kernels
from kernels_metal.draft_head import DRAFT_HEAD, DraftHead, draft_head_reference

Path = tuple[int, ...]  # drafted tokens from the root on
Array = npt.NDArray[Any]
Offers = tuple[list[int], list[float]]  # tokens and their log-probabilities, best first
Choices = Callable[[Path], Offers | None]  # what may follow a path; None where that is not known

FIRST, SECOND = "first", "second"  # draft, of two
LEAST = 1e-300  # a probability whose logarithm is finite
TOP_K = 8  # tokens that a position can offer


@dataclass(frozen=True)
class Ranked:
    """The likeliest tokens of consecutive positions, best first."""

    tokens: Array  # [positions, k]
    logprobs: Array  # [positions, k]

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def offers(self) -> list[Offers]:
        return list(zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True))

    @property
    def best(self) -> Path:
        return tuple(self.tokens[:, 0].tolist())

    @property
    def confidences(self) -> Array:
        return np.exp(self.logprobs[:, 0])


def rank(logits: mx.array, k: int, kernels: Kernels | None = None) -> Ranked:
    """The k likeliest tokens of each row of logits [n, V]; waits for the pass."""
    k = min(k, logits.shape[-1])
    head: DraftHead | None = None if kernels is None else kernels.run(DRAFT_HEAD, logits, k)
    if head is None and cpu_math.applies():
        return _rank_on_host(np.asarray(logits.astype(mx.float32)), k)
    head = head or draft_head_reference(logits, k)
    mx.eval(head.ids, head.logprobs)
    return Ranked(np.array(head.ids).astype(np.int64), np.array(head.logprobs))


def _rank_on_host(logits: Array, k: int) -> Ranked:
    """As above; NumPy selects and exponentiates much faster than MLX's CPU backend."""
    top = np.argpartition(logits, -k, axis=-1)[:, -k:]
    values = np.take_along_axis(logits, top, axis=-1)
    order = np.argsort(-values, axis=-1, kind="stable")
    peak = values.max(axis=-1, keepdims=True)
    shifted = logits - peak
    normal = np.log(np.exp(shifted, out=shifted).sum(axis=-1, keepdims=True)) + peak
    tokens = np.take_along_axis(top, order, axis=-1)
    return Ranked(tokens, np.take_along_axis(values, order, axis=-1) - normal)


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
        score, _, parent, path, place, offers = heapq.heappop(heap)
        token, logprob = offers[0][place], offers[1][place]
        order += 2
        if place + 1 < len(offers[1]):
            beside = score + logprob - offers[1][place + 1]
            heapq.heappush(heap, (beside, order, parent, path, place + 1, offers))
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


@dataclass(frozen=True)
class Linked:
    """Candidates of consecutive positions, and what links each with those of the one before.

    After the token a before it on the path, a token b of position t is as likely as the softmax of
    its logit and the edge from a makes it (see `dflash/paths.py`). Tokens outside the candidates
    keep their logits, so the candidates share what is left beside those.
    """

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
