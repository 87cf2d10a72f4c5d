"""DFlash: a block of tokens drafted in one pass, conditioned on the target's hidden states."""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.dflash.context import FeatureContext
from dflash_mlx.drafters.one_draft import OneDraft
from dflash_mlx.engine.state import State


class BlockDiffusion(OneDraft):
    """DFlash (arXiv 2602.06036): [anchor, mask, ..., mask] -> gamma - 1 tokens in one pass."""

    name = "dflash"

    def draft(self, state: State, context: FeatureContext, rows: int) -> Tree:
        """The block's most likely tokens as a chain."""
        logits = self._model.logits(context, state.anchor, rows)
        tokens = mx.argmax(logits, axis=-1).astype(state.anchor.dtype)
        tree = Tree.chain(mx.concatenate([state.anchor, tokens]))
        mx.async_eval(tree.tokens)
        return tree
