"""P-EAGLE (arXiv 2602.01469): EAGLE-3 with more layers, all of whose rows go through in one pass.

Row 0 is EAGLE-3's: the anchor, and the state h of the last committed token. Every row behind it
pairs the mask token with the h that `fuse` makes of a learned vector in place of features,
`mask_hidden`. Rows see the context and the rows before them, and row i tells the token i + 1 behind
the anchor, whatever is before it. Read from speculators, SpecForge, NVIDIA's Automodel and vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
        super().__init__(model.head, context.words)
        self._block = block
        self._depths: list[int] = []
        self._states: mx.array | None = None  # [K, d] of all depths
        self._said: dict[str, Any] = {}  # of them, by what was asked for

    def states(self, tokens: mx.array, parents: list[int]) -> mx.array:
        whole, depths = self._ask("states", tokens, parents, lambda states, _: states)
        return whole[mx.array(depths)]  # type: ignore[no-any-return]

    def logits(self, tokens: mx.array, parents: list[int]) -> mx.array:
        whole, depths = self._ask("logits", tokens, parents, self._head.whole)
        return whole[mx.array(depths)]  # type: ignore[no-any-return]

    def likeliest(self, tokens: mx.array, parents: list[int]) -> mx.array:
        whole, depths = self._ask("likeliest", tokens, parents, self._head.likeliest)
        return whole[mx.array(depths)]  # type: ignore[no-any-return]

    def ranked(self, tokens: mx.array, parents: list[int], k: int) -> Ranked:
        whole, depths = self._ask("ranked", tokens, parents, partial(self._head.ranked, k=k))
        return Ranked(whole.tokens[depths], whole.logprobs[depths])

    def _ask(
        self, kind: str, tokens: mx.array, parents: list[int], say: Callable[..., Any]
    ) -> tuple[Any, list[int]]:
        """What `say` has to say of all depths, and how deep the next rows are."""
        depths = [self._depths[parent] + 1 if parent >= 0 else 0 for parent in parents]
        self._depths += depths
        if self._states is None:  # the first row, whose token is the anchor
            self._states = self._block(tokens)
        if kind not in self._said:
            self._said[kind] = say(self._states, self._words)
        return self._said[kind], depths
