"""DDTree: a prefix tree grown from one draft pass (arXiv 2604.12989)."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.dflash.block_model import FAMILY, Ask, BlockModel, FeatureContext
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.growth.grow import best_first
from dflash_mlx.drafters.growth.rank import TOP_K
from dflash_mlx.drafters.method import DRAFT, LOOKUP, Method
from dflash_mlx.drafters.one_draft import OneDraft, block_models, contexts_of
from dflash_mlx.drafters.plan import plan
from dflash_mlx.engine.drafter import Drafter, Proposal
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State


class BestFirst(OneDraft):
    """One DFlash pass; its `nodes` likeliest prefixes by the product of their probabilities.

    Of a linked drafter (DFlash 2, DSpark) every token's probability is that after the one before.
    block_size: as for any `OneDraft`. width: tokens that a position can offer behind each path.
    """

    name = "ddtree"

    def __init__(
        self, model: BlockModel, block_size: int | None, nodes: int, width: int = TOP_K
    ) -> None:
        super().__init__(model, block_size)
        self._nodes, self._width = nodes, width

    def draft_all(self, states: Sequence[State], rooms: Sequence[int]) -> list[Proposal]:
        """Trees of up to `nodes` nodes, from one pass over all blocks."""
        asks = [
            Ask(contexts_of(state)[0], state.anchor, min(self.block_size, remaining))
            for state, remaining in zip(states, rooms, strict=True)
        ]
        found = iter(self._model.choices([ask for ask in asks if ask.rows > 1], self._width))
        return [
            Proposal(best_first(next(found)[0], self._nodes) if ask.rows > 1 else Tree.chain())
            for ask in asks
        ]

    def draft_block(self, state: State, context: FeatureContext, rows: int) -> Proposal:
        """The same for one of them."""
        return self.draft_all([state], [rows])[0]


def _make(pair: Pair, config: DecodeConfig) -> Drafter:
    how = plan(METHOD, pair, config)
    return how.follow(BestFirst(block_models(pair)[0], config.block_size, how.nodes))


METHOD = Method(
    "ddtree",
    "DFlash tree",
    _make,
    family=FAMILY,
    files=FILES,
    best_with=1,
    needs_trees=True,
    has_budget=True,
    sources=(DRAFT, LOOKUP),
    preference=3,
)
