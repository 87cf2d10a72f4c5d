"""DDTree: a prefix tree grown from one draft pass (arXiv 2604.12989)."""

from __future__ import annotations

from dflash_mlx.drafters.block_diffusion import BlockModel
from dflash_mlx.drafters.checkpoint import check_block_size
from dflash_mlx.drafters.context import DualContext, FeatureContext
from dflash_mlx.drafters.grow import best_first, follow
from dflash_mlx.drafters.rank import rank
from dflash_mlx.state import State
from dflash_mlx.tree import Tree

TOP_K = 8  # tokens that a position can offer


class BestFirst:
    """One DFlash pass; its `nodes` likeliest prefixes by the product of their probabilities.

    block_size: deepest tree, the anchor included. Raises DFlashError for a size that the drafter
    was not trained for.
    """

    name = "ddtree"
    rounds_ahead = 0

    def __init__(self, model: BlockModel, block_size: int | None, nodes: int) -> None:
        check_block_size(block_size, model.config)
        self.block_size = block_size or model.config.block_size
        self.taps = model.config.target_layer_ids
        self._model, self._nodes = model, nodes

    def new_context(self) -> FeatureContext:
        """An empty context for one sequence."""
        return self._model.new_context()

    def propose(self, state: State, room: int) -> Tree:
        """A tree of up to `nodes` nodes, no deeper than `room` allows."""
        rows = min(self.block_size, room)
        if rows == 1:
            return Tree.chain(state.anchor)
        assert isinstance(state.context, FeatureContext | DualContext)
        logits = self._model.logits(state.context.contexts[0], state.anchor, rows)
        ranked = rank(logits, TOP_K, self._model.kernels)
        return best_first(follow(ranked), self._nodes).as_tree(state.anchor)
