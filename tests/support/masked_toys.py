"""Stands for a masked diffusion model whose every word can be looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.growth.grow import Ranked, rank
from dflash_mlx.drafters.specdiff.model import TokenContext
from support.law import VOCABULARY, ToyContext


class ToyMaskedContext(ToyContext, TokenContext):
    """Remembers nothing."""


class ToyMasked:
    """Logits at a place depend on the anchor and on every token of the block that is not masked.

    On later ones too, and strongly, as in a network that looks both ways. calls: how many passes.
    """

    family, mask, aux_layers = "specdiff", VOCABULARY, ()

    def __init__(self, seed: int, block_size: int = 4, strength: float = 1.5) -> None:
        rng, size = np.random.default_rng(seed), block_size
        self.block_size, self.calls = block_size, 0
        self.base = rng.normal(size=(VOCABULARY, size, VOCABULARY)) * 1.5
        self.links = rng.normal(size=(size, size, VOCABULARY, VOCABULARY)) * strength

    def new_context(self) -> ToyMaskedContext:
        return ToyMaskedContext()

    def logits(self, context: Any, block: mx.array, places: Sequence[int]) -> mx.array:
        self.calls += 1
        anchor, *hidden = block.tolist()
        rows = []
        for place in places:
            row = self.base[anchor, place].copy()
            for other, token in enumerate(hidden, start=1):
                if token != self.mask and other != place:
                    row += self.links[other, place, token]
            rows.append(row)
        return mx.array(np.stack(rows).astype(np.float32))

    def ranked(self, context: Any, block: mx.array, places: Sequence[int], k: int) -> Ranked:
        return rank(self.logits(context, block, places), k)
