"""Prompt lookup: what followed the last words when they were written before (arXiv 2404.08698)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.method import LOOKUP, Method
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.state import State

DEFAULT_SIZE = 16
LONGEST = 16  # tokens of a suffix that is looked up
SHORTEST = 2
PER_TOKEN = 2  # tokens drafted for every token that matched
MOST_LOOKED_UP = PER_TOKEN * LONGEST
_DOUBT = 2  # tokens of a match that ends in the wrong place half the time


def lookup(tokens: Sequence[int], most: int) -> tuple[list[int], float]:
    """At most `most` tokens that followed the latest earlier occurrence of the longest suffix.

    As many as the match lets hope, PER_TOKEN for each that matched, and a first guess at each one's
    log-probability: the longer the match, the surer.
    """
    end, best = 0, SHORTEST - 1
    for stop in range(len(tokens) - 1, 0, -1):
        if tokens[stop - 1] != tokens[-1]:
            continue
        length = _match(tokens, stop)
        if length > best:
            end, best = stop, length
        if best >= LONGEST:
            break
    found = tokens[end : end + min(most, PER_TOKEN * best)] if end and most > 0 else ()
    return list(found), math.log(best / (best + _DOUBT))


def _match(tokens: Sequence[int], stop: int) -> int:
    """How many tokens before `stop` equal those at the end, up to LONGEST."""
    length = 0
    while length < min(stop, LONGEST) and tokens[stop - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


class NGram(NoDraft):
    """Drafts by prompt lookup alone, chains of up to `block_size` tokens with the anchor."""

    name = "ngram"
    rounds_ahead = 0

    def __init__(self, block_size: int = DEFAULT_SIZE) -> None:
        self.block_size = block_size

    def draft(self, state: State, remaining: int) -> Proposal:
        most = min(self.block_size, remaining) - 1
        return Proposal(Tree.chain(lookup(state.tokens, most)[0]))


METHOD = Method(
    "ngram",
    "prompt lookup",
    lambda how: NGram(how.config.block_size or DEFAULT_SIZE),
    sources=(LOOKUP,),
    preference=1,
)
