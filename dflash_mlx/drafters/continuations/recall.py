"""From places where texts read alike to a prefix tree of what followed there."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from heapq import heappop, heappush, nlargest
from operator import itemgetter
from weakref import WeakKeyDictionary

import numpy as np

from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.continuations.suffixes import AHEAD, CODE, LONGEST, Match
from dflash_mlx.engine.state import State

HERE, BEFORE = "lookup", "said"  # sources of tokens: this conversation, and earlier ones
_GROWTH = 2.0  # times as much that a place counts for each token more that matches
_DOUBT = 32.0  # what the chance that none of them is right counts
_HERE = 8.0  # times as much that a place in the same conversation counts
_LEAST = 0.04  # probability of a path that is worth a node
_PLACES = 16  # of a conversation that are compared
MOST_LOOKED_UP = 32  # drafted tokens


def grow(matches: Sequence[Match], most: int, width: int | None = None) -> Tree:
    """The `most` likeliest continuations of places that read alike, behind a root, best first.

    Each place counts _GROWTH to the power of the tokens that match, the drafted ones included, so
    that long matches overrule short ones and several short ones add up; of the places along a path
    a token has p = its count / (count of all + _DOUBT). width: tokens that may follow a path.
    """
    weighed = [(_GROWTH**m.length * (1.0 if m.said else _HERE), m.said, m.ahead) for m in matches]
    weighed.sort(key=itemgetter(0), reverse=True)
    tokens: list[int] = []
    parents, logprobs, sources, said = [-1], [0.0], [""], [0.0]
    # Of nodes to be: probability of the path, which came first, parent, depth, token, p, places.
    heap: list[tuple[float, int, int, int, int, float, list[int]]] = []
    reach, depth, node, along, order = 1.0, 0, 0, [*range(len(weighed))], 0
    while True:
        counts, places, total = dict[int, float](), dict[int, list[int]](), _DOUBT / _GROWTH**depth
        for place in along:
            count, _, ahead = weighed[place]
            if depth < len(ahead):
                token, total = ahead[depth], total + count
                counts[token] = counts.get(token, 0.0) + count
                places.setdefault(token, []).append(place)
        least = _LEAST * total / reach
        likely = nlargest(width, counts.items(), itemgetter(1)) if width else counts.items()
        for token, count in likely:
            if count >= least:
                order, p = order + 1, count / total
                heappush(heap, (-reach * p, order, node, depth + 1, token, p, places[token]))
        if not heap or len(tokens) == most:
            return Tree(tuple(tokens), tuple(parents), tuple(logprobs), tuple(sources), tuple(said))
        reach, _, parent, depth, token, p, along = heappop(heap)
        reach, node = -reach, len(parents)
        tokens.append(token)
        parents.append(parent)
        logprobs.append(math.log(p))
        said.append(weighed[along[0]][1])
        sources.append(BEFORE if said[-1] else HERE)


class Spoken:
    """Where each pair of tokens of one conversation occurred, the latest place first."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}
        self._before = array("q", [0])  # by place: the place before with the same pair; 0 for none

    def find(self, tokens: Sequence[int]) -> list[Match]:
        """Earlier places that match what `tokens` end with; they go on where they ended before."""
        if len(tokens) < len(self._before):  # another conversation, or an earlier part of it
            self._latest, self._before = {}, array("q", [0])
        for end in range(len(self._before), len(tokens)):
            pair = tokens[end - 1], tokens[end]
            self._before.append(self._latest.get(pair, 0))
            self._latest[pair] = end
        found, place = list[Match](), self._before[-1]
        while place and len(found) < _PLACES:
            length, most = 2, min(place + 1, LONGEST)
            while length < most and tokens[place - length] == tokens[-1 - length]:
                length += 1
            found.append(Match(length, tokens[place + 1 : place + 1 + AHEAD], 0.0))
            place = 0 if length == LONGEST else self._before[place]
        return found


class Lookup:
    """Drafts by what was said before: in each conversation, and in the texts that it may use.

    width: tokens that may follow a path; None for as many as are likely.
    """

    def __init__(self, width: int | None = None) -> None:
        self._spoken, self._width = WeakKeyDictionary[State, Spoken](), width

    def draft(self, state: State, most: int) -> Tree:
        """A tree of up to `most` tokens behind a state's anchor; its root alone for none."""
        tokens = state.tokens
        matches = self._spoken.setdefault(state, Spoken()).find(tokens)
        if state.earlier is not None:
            matches += state.earlier.find(np.array(tokens[: -LONGEST - 1 : -1], CODE))
        return grow(matches, most, self._width)


def join(draft: Tree, recalled: Tree) -> Tree:
    """One tree of both: a token that both propose is one node with a better chance.

    Log-odds are added up, with weights that were fitted (docs/lab/2026-11-26-said-before.md); what
    either leaves out behind a path that it continues is unlikely. A node is whose it is likelier.
    """
    if len(draft) == 1 or len(recalled) == 1:
        return draft if len(recalled) == 1 else recalled
    tokens, parents, logprobs = [*draft.drafted], [*draft.parents], [*draft.logprobs]
    sources, said = [*(draft.sources or [""] * len(draft))], [0.0] * len(draft)
    drafts, recalls = {*draft.parents}, {*recalled.parents}  # nodes that each continues
    place, found = {0: 0}, {0: 0}  # the recalled node of one of the draft; and the converse
    for node in range(1, len(draft)):
        if (behind := place.get(parents[node])) not in recalls or behind is None:
            continue
        own, twin = logprobs[node], recalled.child(behind, tokens[node - 1])
        logprobs[node] = _pooled(own, None if twin is None else recalled.logprobs[twin])
        if twin is not None:
            place[node], found[twin] = twin, node
            if recalled.logprobs[twin] > own:
                sources[node], said[node] = recalled.sources[twin], recalled.said[twin]
    for node in range(1, len(recalled)):
        if node not in found:
            behind, found[node] = found[recalled.parents[node]], len(parents)
            tokens.append(recalled.drafted[node - 1])
            parents.append(behind)
            logprobs.append(_pooled(None, recalled.logprobs[node], behind in drafts))
            sources.append(recalled.sources[node])
            said.append(recalled.said[node])
    return Tree(tuple(tokens), tuple(parents), tuple(logprobs), tuple(sources), tuple(said))


def _pooled(draft: float | None, recalled: float | None, drafts: bool = True) -> float:
    """A log-probability; None: the token was left out. drafts: whether the draft has others."""
    q = (-5.0 if drafts else -2.2) if draft is None else _log_odds(draft)
    p = -4.0 if recalled is None else _log_odds(recalled)
    return -math.log1p(math.exp(-(0.8 * q + 0.5 * p + 1.0)))


def _log_odds(logprob: float) -> float:
    logprob = min(logprob, -1e-3)
    return logprob - math.log(-math.expm1(logprob))
