"""Drafts that are drawn, for rejection sampling: what their drafters have in common."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np

from dflash_mlx.core.config import SamplingConfig
from dflash_mlx.core.sampling import DRAFT, Sampler
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.growth.grow import FIRST, LEAST
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.state import State


class Drawing:
    """Draws at the target's own temperature and filters; every answer is a draw of its own.

    weighed: whether trees say how sure each position is. They go by what is known before anything
    is drawn: a chain that was cut by its own tokens would no longer follow q.
    """

    def __init__(self, sampling: SamplingConfig, weighed: bool = False) -> None:
        self.config, self._weighed = sampling, weighed
        self._sampler = Sampler(sampling)
        self._opening: mx.array | None = None  # of the answer that is being written

    def key(self, state: State) -> mx.array:
        """Randomness for a draft at this position of this answer."""
        if state.opening is not self._opening:
            self._sampler, self._opening = Sampler(self.config), state.opening
        return self._sampler.key(state.position, DRAFT)

    def proposal(self, state: State, tokens: mx.array, q: mx.array, sure: mx.array) -> Proposal:
        """A chain of tokens [n], drawn from q [n, V]; sure: [n], or one for all positions."""
        tree = Tree.chain(tokens.astype(state.anchor.dtype))
        mx.async_eval(tree.drafts, q)
        if self._weighed:
            known = np.log(np.maximum(np.array(mx.broadcast_to(sure, tokens.shape)), LEAST))
            tree = replace(
                tree, logprobs=(0.0, *known.tolist()), sources=("", *[FIRST] * tokens.size)
            )
        return Proposal(tree, q)
