"""Prompt lookup: what followed the last words earlier on (arXiv 2404.08698, 2411.04975)."""

from __future__ import annotations

from dflash_mlx.drafters.continuations.recall import Lookup
from dflash_mlx.drafters.method import EARLIER, Method
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.state import State

DEFAULT_SIZE = 16


class NGram(NoDraft):
    """Drafts by prompt lookup alone, chains of up to `block_size` tokens with the anchor."""

    name = "ngram"
    rounds_ahead = 0

    def __init__(self, block_size: int = DEFAULT_SIZE) -> None:
        self.block_size = block_size
        self._lookup = Lookup(width=1)

    def draft(self, state: State, remaining: int) -> Proposal:
        return Proposal(self._lookup.draft(state, min(self.block_size, remaining) - 1))


METHOD = Method(
    "ngram",
    "prompt lookup",
    lambda how: NGram(how.config.block_size or DEFAULT_SIZE),
    sources=EARLIER,
    preference=1,
)
