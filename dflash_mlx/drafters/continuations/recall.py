"""From places where texts read alike to a prefix tree of what followed there."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.continuations.suffixes import (
    AHEAD,
    CODE,
    LONGEST,
    SHORTEST,
    Match,
)
from dflash_mlx.drafters.growth.grow import LEAST, Offers, Path, best_first
from dflash_mlx.engine.state import State

HERE, BEFORE = "lookup", "said"  # sources of tokens: this conversation, and earlier ones
_GROWTH = 2.0  # times as much that a place counts for each token more that matches
_DOUBT = 16.0  # what the chance that none of them is right counts
_LEAST = 0.02  # probability of a path that is worth a node
_PLACES = 16  # of a conversation that are compared
MOST_LOOKED_UP = 32  # drafted tokens


class Continuations:
    """What may follow, by what followed in places that read alike.

    Each counts _GROWTH to the power of the tokens that match, the drafted ones included, so that
    long matches overrule short ones and several short ones add up: p = w / (sum of w + _DOUBT).
    """

    def __init__(self, matches: Sequence[Match], width: int | None = None) -> None:
        self._matches, self._width = matches, width
        self._weights = [_GROWTH**match.length for match in matches]
        self._along: dict[Path, Sequence[int]] = {(): range(len(matches))}  # places of each path
        self._reach: dict[Path, float] = {(): 1.0}

    def choices(self, path: Path) -> Offers | None:
        """What followed behind a path in these places; None where nothing likely did."""
        depth, by_token = len(path), dict[int, list[int]]()
        for i in self._along[path]:
            ahead = self._matches[i].ahead
            if depth < len(ahead):
                by_token.setdefault(ahead[depth], []).append(i)
        weights = {t: sum(self._weights[i] for i in along) for t, along in by_token.items()}
        total = sum(weights.values()) + _DOUBT / _GROWTH**depth
        least, reach = _LEAST / self._reach[path], self._reach[path]
        likely = sorted(
            ((w / total, token) for token, w in weights.items() if w / total >= least), reverse=True
        )
        if not likely:
            return None
        offered = likely[: self._width]
        for chance, token in offered:
            self._along[(*path, token)] = by_token[token]
            self._reach[(*path, token)] = reach * chance
        return [token for _, token in offered], [math.log(chance) for chance, _ in offered]

    def tree(self, nodes: int) -> Tree:
        """The likeliest continuations, and of each token whose it is, and when it was said."""
        tree = best_first(self.choices, nodes)
        paths: list[Path] = [()]
        sources, said = [""], [0.0]
        for token, parent in zip(tree.drafted, tree.parents[1:], strict=True):
            paths.append((*paths[parent], token))
            best = max(self._along[paths[-1]], key=self._order)
            said.append(self._matches[best].said)
            sources.append(BEFORE if said[-1] else HERE)
        return Tree(tree.drafts, tree.parents, tree.logprobs, tuple(sources), tuple(said))

    def _order(self, i: int) -> tuple[float, bool, float]:
        return self._weights[i], not self._matches[i].said, self._matches[i].said


class Spoken:
    """Where each pair of tokens of one conversation occurred, the latest place first."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}
        self._before = array("q", [0])  # by place: the place before with the same pair; 0 for none

    def find(self, tokens: Sequence[int]) -> list[Match]:
        """Earlier places that match what `tokens` end with; they go on where they ended before."""
        known = self._before
        if len(tokens) < len(known):  # another conversation, or an earlier part of it
            self.__init__()  # type: ignore[misc]
            known = self._before
        for end in range(len(known), len(tokens)):
            pair = tokens[end - 1], tokens[end]
            place = self._latest.get(pair, 0)
            known.append(place)
            self._latest[pair] = end
        found, place = list[Match](), known[-1]
        while place and len(found) < _PLACES:
            length = SHORTEST
            while (
                length < min(place + 1, LONGEST) and tokens[place - length] == tokens[-1 - length]
            ):
                length += 1
            found.append(Match(length, tokens[place + 1 : place + 1 + AHEAD], 0.0))
            if length == LONGEST:
                break
            place = known[place]
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
        if not matches or most < 1:
            return Tree.chain()
        return Continuations(matches, self._width).tree(most + 1)


def join(draft: Tree, recalled: Tree) -> Tree:
    """One tree of both, in which what was said before speaks first.

    What it leaves of a path's probability goes to the draft's tokens, so that one that both propose
    is likelier, p + (1 - sum of p) q, and one that only the draft does is less so. A node is whose
    share is larger.
    """
    if len(draft) == 1 or len(recalled) == 1:
        return draft if len(recalled) == 1 else recalled
    chances, left = np.exp(recalled.logprobs).tolist(), [1.0] * len(recalled)
    for chance, parent in zip(chances[1:], recalled.parents[1:], strict=True):
        left[parent] -= chance
    tokens, parents = [*draft.drafted], [*draft.parents]
    logprobs, sources = [*draft.logprobs], [*(draft.sources or [""] * len(draft))]
    said, place, found = [0.0] * len(draft), {0: 0}, {0: 0}  # recalled node of a draft's; converse
    for node in range(1, len(draft)):
        if (behind := place.get(parents[node])) is None:
            continue
        q, p = math.exp(logprobs[node]) * max(left[behind], LEAST), 0.0
        if (twin := recalled.child(behind, tokens[node - 1])) is not None:
            place[node], found[twin], p = twin, node, chances[twin]
            if p > q:
                sources[node], said[node] = recalled.sources[twin], recalled.said[twin]
        logprobs[node] = math.log(min(p + q, 1.0))
    for node in range(1, len(recalled)):
        if node not in found:
            found[node] = len(parents)
            tokens.append(recalled.drafted[node - 1])
            parents.append(found[recalled.parents[node]])
            logprobs.append(recalled.logprobs[node])
            sources.append(recalled.sources[node])
            said.append(recalled.said[node])
    return Tree(tuple(tokens), tuple(parents), tuple(logprobs), tuple(sources), tuple(said))
