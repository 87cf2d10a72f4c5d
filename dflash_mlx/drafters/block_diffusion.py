"""DFlash: a block of tokens drafted in one pass, conditioned on the target's hidden states."""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.best_first import BestFirst
from dflash_mlx.drafters.dflash.block_model import FAMILY, BlockModel, FeatureContext
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.drawn import DrawnBlock, DrawnPath
from dflash_mlx.drafters.method import DRAFT, LOOKUP, Method
from dflash_mlx.drafters.one_draft import OneDraft, block_models
from dflash_mlx.drafters.plan import plan
from dflash_mlx.engine.drafter import Drafter, Proposal
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State


class BlockDiffusion(OneDraft):
    """DFlash (arXiv 2602.06036): [anchor, mask, ..., mask] -> gamma - 1 tokens in one pass."""

    name = "dflash"

    def draft_block(self, state: State, context: FeatureContext, rows: int) -> Proposal:
        """The block's most likely tokens as a chain, which may still be on its way."""
        tokens = self.likeliest(context, state.anchor, rows).astype(state.anchor.dtype)
        mx.async_eval(tokens)
        return Proposal(Tree.chain(tokens))

    def likeliest(self, context: FeatureContext, anchor: mx.array, rows: int) -> mx.array:
        """Tokens [rows - 1], each the likeliest at its position."""
        return self._model.likeliest(context, anchor, rows)


class SelectedPath(BlockDiffusion):
    """DFlash 2, DSpark: after every token the one with the best score (see `paths.py`).

    Trees take their probabilities from the same scores, see `growth/links.py`.
    """

    def likeliest(self, context: FeatureContext, anchor: mx.array, rows: int) -> mx.array:
        """Tokens [rows - 1] of the path."""
        candidates = self._model.candidates(context, anchor, rows)
        return candidates.at(candidates.likeliest()[0])


class RankedChain(BestFirst):
    """The same chain, which says how sure it is of every token."""

    name = "dflash"

    def __init__(self, model: BlockModel) -> None:
        super().__init__(model, None, nodes=model.block_size, width=1)


def _make(pair: Pair, config: DecodeConfig) -> Drafter:
    model, size, how = block_models(pair)[0], config.block_size, plan(METHOD, pair, config)
    drafter: OneDraft
    if how.drawn:
        drawn = DrawnPath if model.is_linked else DrawnBlock
        drafter = drawn(model, size, config.sampling, weighed=not how.fixed)
    elif how.fixed:
        drafter = (SelectedPath if model.is_linked else BlockDiffusion)(model, size)
    else:
        drafter = RankedChain(model)
    return how.follow(drafter)


METHOD = Method(
    "dflash",
    "DFlash",
    _make,
    family=FAMILY,
    files=FILES,
    best_with=1,
    draws=True,
    sources=(DRAFT, LOOKUP),
    preference=2,
)
