"""Drafts by prompt lookup alone; needs no model."""

from __future__ import annotations

from dataclasses import replace

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.budget import within_budget
from dflash_mlx.drafters.lookup import lookup
from dflash_mlx.drafters.method import LOOKUP, Method
from dflash_mlx.drafters.none import NoContext
from dflash_mlx.engine.drafter import Drafter, EachAlone, Proposal
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State

DEFAULT_SIZE = 16


class NGram(EachAlone):
    """Drafts the continuation of the longest suffix that occurred before; needs no model.

    block_size: longest draft, the anchor included.
    """

    name = "ngram"
    aux_layers: tuple[int, ...] = ()
    rounds_ahead = 0

    def __init__(self, block_size: int = DEFAULT_SIZE) -> None:
        self.block_size = block_size

    def new_context(self) -> NoContext:
        """Prompt and answer are in the state already."""
        return NoContext()

    def draft(self, state: State, remaining: int) -> Proposal:
        """A chain of up to min(block_size, room) nodes, the anchor alone where nothing matches."""
        return Proposal(
            Tree.chain(lookup(state.tokens, min(self.block_size, remaining) - 1).tokens)
        )


def _make(pair: Pair, config: DecodeConfig) -> Drafter:
    if config.block_size is not None:
        return NGram(config.block_size)
    return within_budget(NGram(), {}, pair, replace(config, lookup=True), METHOD.sources)


METHOD = Method(
    "ngram",
    "n-gram lookup",
    _make,
    sources=(LOOKUP,),
    preference=1,
)
