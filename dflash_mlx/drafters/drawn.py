"""DFlash drafts that are drawn from the drafter's distributions, for rejection sampling."""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.config import SamplingConfig
from dflash_mlx.drafters.block_model import BlockModel
from dflash_mlx.drafters.context import FeatureContext
from dflash_mlx.drafters.one_draft import OneDraft
from dflash_mlx.reject import DRAFT, DrawnChain
from dflash_mlx.sampling import Sampler, tempered
from dflash_mlx.state import State
from dflash_mlx.tree import Tree


class DrawnBlock(OneDraft):
    """DFlash with every token drawn at the target's own temperature and filters.

    block_size: as for any `OneDraft`.
    """

    name = "dflash"

    def __init__(self, model: BlockModel, block_size: int | None, sampling: SamplingConfig) -> None:
        super().__init__(model, block_size)
        self._sampling = sampling
        self._sampler = Sampler(sampling)

    def draft(self, state: State, context: FeatureContext, rows: int) -> Tree:
        """A chain that knows what it was drawn from."""
        if state.last is None:  # every answer is a draw of its own
            self._sampler = Sampler(self._sampling)
        logits = tempered(self._model.logits(context, state.anchor, rows), self._sampler.config)
        tokens = mx.random.categorical(logits, key=self._sampler.key(state.position, DRAFT))
        chain = mx.concatenate([state.anchor, tokens.astype(state.anchor.dtype)])
        tree = DrawnChain(chain, tuple(range(-1, rows - 1)), q=mx.softmax(logits, axis=-1))
        mx.async_eval(tree.tokens, tree.q)
        return tree
