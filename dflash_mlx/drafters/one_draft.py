"""What all drafters that run one DFlash network once have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, cast

from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.dflash.block_model import FAMILY, BlockModel, FeatureContext
from dflash_mlx.drafters.method import check_block_size
from dflash_mlx.engine.drafter import EachAlone, Proposal
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State


class _Contexts(Protocol):
    """The context that `new_context` of a block-diffusion drafter makes, or one for two of them."""

    @property
    def contexts(self) -> tuple[FeatureContext, ...]:
        """One per network."""


def contexts_of(state: State) -> tuple[FeatureContext, ...]:
    """The contexts in a state that a block-diffusion drafter drafts for, one per network."""
    return cast(_Contexts, state.context).contexts


def block_models(pair: Pair) -> list[BlockModel]:
    """The pair's DFlash models, at least one; DFlashError where there is none."""
    return [cast(BlockModel, model) for model in pair.of(FAMILY)]


class OneDraft(EachAlone):
    """A drafter that makes its tree from one pass over one block.

    block_size: gamma, 2 up to the size the drafter was trained for (its default).
    Raises DFlashError for another size.
    """

    name: str
    rounds_ahead = 0

    def __init__(self, model: BlockModel, block_size: int | None = None) -> None:
        check_block_size(block_size, model.block_size)
        self.block_size = block_size or model.block_size
        self.aux_layers = model.aux_layers
        self._model = model

    def new_context(self) -> FeatureContext:
        """An empty context for one sequence."""
        return self._model.new_context()

    def draft(self, state: State, remaining: int) -> Proposal:
        """A tree no deeper than the block and `remaining` allow; its root alone where that is 1."""
        rows = min(self.block_size, remaining)
        if rows == 1:
            return Proposal(Tree.chain())
        return self.draft_block(state, contexts_of(state)[0], rows)

    @abstractmethod
    def draft_block(self, state: State, context: FeatureContext, rows: int) -> Proposal:
        """The tree of a block of `rows` >= 2 rows, the anchor included."""
