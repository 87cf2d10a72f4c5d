"""DDTree: a prefix tree grown from one draft pass (arXiv 2604.12989)."""

from __future__ import annotations

from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.context import FeatureContext
from dflash_mlx.drafters.growth.grow import best_first, follow
from dflash_mlx.drafters.growth.links import follow_links
from dflash_mlx.drafters.growth.rank import rank
from dflash_mlx.drafters.one_draft import OneDraft
from dflash_mlx.engine.state import State

TOP_K = 8  # tokens that a position can offer


class BestFirst(OneDraft):
    """One DFlash pass; its `nodes` likeliest prefixes by the product of their probabilities.

    With DFlash 2's candidate selector, every token's probability is that after the one before.
    block_size: as for any `OneDraft`.
    """

    name = "ddtree"

    def __init__(self, model: BlockModel, block_size: int | None, nodes: int) -> None:
        super().__init__(model, block_size)
        self._nodes = nodes

    def draft(self, state: State, context: FeatureContext, rows: int) -> Tree:
        """A tree of up to `nodes` nodes."""
        model = self._model
        if model.config.selector is not None:
            choices = follow_links(*model.linked(context, state.anchor, rows))
        else:
            choices = follow(rank(model.logits(context, state.anchor, rows), TOP_K, model.kernels))
        return best_first(choices, self._nodes).as_tree(state.anchor)
