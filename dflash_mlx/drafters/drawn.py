"""DFlash drafts that are drawn from the drafter's distributions, for rejection sampling."""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.core.config import SamplingConfig
from dflash_mlx.core.sampling import tempered
from dflash_mlx.drafters.dflash.block_model import BlockModel, FeatureContext
from dflash_mlx.drafters.dflash.paths import Candidates
from dflash_mlx.drafters.drawing import Drawing
from dflash_mlx.drafters.one_draft import OneDraft
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.state import State


class DrawnBlock(OneDraft):
    """DFlash with every token drawn; block_size: as for any `OneDraft`, weighed: see `Drawing`."""

    name = "dflash"

    def __init__(
        self,
        model: BlockModel,
        block_size: int | None,
        sampling: SamplingConfig,
        weighed: bool = False,
    ) -> None:
        super().__init__(model, block_size)
        self._drawing = Drawing(sampling, weighed)

    def draft_block(self, state: State, context: FeatureContext, rows: int) -> Proposal:
        """A chain that knows what it was drawn from."""
        drawn = self.drawn(context, state.anchor, rows, self._drawing.key(state))
        return self._drawing.proposal(state, *drawn)

    def drawn(
        self, context: FeatureContext, anchor: mx.array, rows: int, key: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Tokens [rows - 1], q [rows - 1, V] that they were drawn from, and how sure it was.

        key: randomness. sure: [rows - 1] the largest probabilities, whatever is drawn.
        """
        logits = tempered(self._model.logits(context, anchor, rows), self._drawing.config)
        q = mx.softmax(logits, axis=-1)
        return mx.random.categorical(logits, key=key), q, q.max(axis=-1)


class DrawnPath(DrawnBlock):
    """As `DrawnBlock`, with every token drawn by the scores of candidates after the one before."""

    def drawn(
        self, context: FeatureContext, anchor: mx.array, rows: int, key: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Tokens [rows - 1] of a path and q [rows - 1, V], zero outside the candidates.

        sure: along the likeliest path, by the drafter's confidence head if it has one.
        """
        found, config = self._model.candidates(context, anchor, rows), self._drawing.config
        drawn = Candidates(found.tokens, lambda t, before: tempered(found.after(t, before), config))
        keys = mx.random.split(key, rows - 1)
        path, scores = drawn.walk(lambda t, scores: mx.random.categorical(scores, key=keys[t]))
        nothing = mx.zeros((rows - 1, self._model.config.vocab_size))
        q = mx.put_along_axis(nothing, drawn.tokens, mx.softmax(scores, axis=-1), axis=-1)
        return drawn.at(path), q, self._sure(found, drawn)

    def _sure(self, found: Candidates, drawn: Candidates) -> mx.array:
        """[rows - 1] how sure it is of each position, whatever is drawn."""
        path, scores = drawn.likeliest()
        if found.confidences is not None:
            return found.confidences(path)
        return mx.softmax(scores, axis=-1).max(axis=-1)
