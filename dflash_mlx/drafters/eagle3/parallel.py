"""P-EAGLE (arXiv 2602.01469): EAGLE-3 with more layers, all of whose rows go through in one pass.

Row 0 is EAGLE-3's: the anchor, and the state h of the last committed token. Every row behind it
pairs the mask token with the h that `fuse` makes of a learned vector in place of features,
`mask_hidden`. Rows see the context and the rows before them, and row i tells the token i + 1 behind
the anchor, whatever is before it. Read from speculators, SpecForge, NVIDIA's Automodel and vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from dflash_mlx.drafters.growth.grow import Ranked
from dflash_mlx.drafters.networks.model import BoundModel, Draft
from dflash_mlx.drafters.networks.paired import PairedContext

Block = Callable[[mx.array], mx.array]


class StackedContext(PairedContext):
    """Keys and values of later layers are made of what the layers before them saw."""

    def refill_from(self, length: int) -> int:
        return self.cache.nearest(length - 1) + 1 if length else 0


class ParallelDraft(Draft):
    """A draft of which the first row asks for all: what follows a row is known by its depth.

    block: final states [K, d] of all rows behind an anchor [1].
    """

    in_one_pass = True

    def __init__(self, model: BoundModel[Any], context: PairedContext, block: Block) -> None:
        super().__init__(model, context)
        self._block = block
        self._depths: list[int] = []
        self._states: mx.array | None = None  # [K, d] of all depths
        self._logits: mx.array | None = None
        self._tokens: mx.array | None = None
        self._ranked: Ranked | None = None

    def states(self, tokens: mx.array, parents: list[int]) -> mx.array:
        depths = self._deepen(parents)
        return self._all(tokens)[mx.array(depths)]

    def logits(self, tokens: mx.array, parents: list[int]) -> mx.array:
        depths = self._deepen(parents)
        if self._logits is None:
            self._logits = self._head.whole(self._all(tokens), self._words)
        return self._logits[mx.array(depths)]

    def likeliest(self, tokens: mx.array, parents: list[int]) -> mx.array:
        depths = self._deepen(parents)
        if self._tokens is None:
            self._tokens = self._head.likeliest(self._all(tokens), self._words)
        return self._tokens[mx.array(depths)]

    def ranked(self, tokens: mx.array, parents: list[int], k: int) -> Ranked:
        depths = self._deepen(parents)
        if self._ranked is None:
            self._ranked = self._head.ranked(self._all(tokens), self._words, k)
        return Ranked(self._ranked.tokens[depths], self._ranked.logprobs[depths])

    def _all(self, tokens: mx.array) -> mx.array:
        """States of all depths, made at the first row, whose token is the anchor."""
        if self._states is None:
            self._states = self._block(tokens)
        return self._states

    def _deepen(self, parents: list[int]) -> list[int]:
        """How deep the next rows are."""
        depths = [self._depths[parent] + 1 if parent >= 0 else 0 for parent in parents]
        self._depths += depths
        return depths
