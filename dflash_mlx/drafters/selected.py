"""DFlash 2: one pass over a block, then a path through its candidates (see `selector.py`).

The chains of `dflash` follow such paths. The first drafts of trees take their probabilities from
the same scores, see `links.py`.
"""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.core.sampling import tempered
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.dflash.context import FeatureContext
from dflash_mlx.drafters.dflash.selector import Candidates
from dflash_mlx.drafters.drawn import DrawnBlock
from dflash_mlx.drafters.one_draft import OneDraft
from dflash_mlx.engine.state import State


class SelectedPath(OneDraft):
    """From every token on the candidate with the best score."""

    name = "dflash"

    def draft(self, state: State, context: FeatureContext, rows: int) -> Tree:
        """The path as a chain."""
        candidates = self._model.candidates(context, state.anchor, rows)
        path = candidates.walk(lambda t, scores: mx.argmax(scores))
        tokens = candidates.at(path).astype(state.anchor.dtype)
        tree = Tree.chain(mx.concatenate([state.anchor, tokens]))
        mx.async_eval(tree.tokens)
        return tree


class DrawnPath(DrawnBlock):
    """As `DrawnBlock`, with every token drawn from the candidates' scores after the one before."""

    def drawn(
        self, context: FeatureContext, anchor: mx.array, rows: int, key: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Tokens [rows - 1] of a path and q [rows - 1, V], zero outside the candidates."""
        found = self._model.candidates(context, anchor, rows)
        candidates = Candidates(found.tokens, tempered(found.scores, self.sampler.config))
        keys = mx.random.split(key, rows - 1)
        path = candidates.walk(lambda t, scores: mx.random.categorical(scores, key=keys[t]))
        chances = mx.softmax(candidates.scores_along(path), axis=-1)
        nothing = mx.zeros((rows - 1, self._model.config.vocab_size))
        q = mx.put_along_axis(nothing, candidates.tokens, chances, axis=-1)
        return candidates.at(path), q
