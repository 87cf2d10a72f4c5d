"""DFlash: a block of tokens drafted in one pass, conditioned on the target's hidden states.

Its tokens are the likeliest, or drawn from the drafter's distributions, for rejection sampling.
"""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.sampling import DRAFT as DRAFT_STREAM
from dflash_mlx.core.sampling import Sampler, tempered
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.dflash import checkpoint
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.context import FeatureContext
from dflash_mlx.drafters.dflash.selector import Candidates
from dflash_mlx.drafters.method import DRAFT, Method
from dflash_mlx.drafters.one_draft import OneDraft, block_models
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State


class BlockDiffusion(OneDraft):
    """DFlash (arXiv 2602.06036): [anchor, mask, ..., mask] -> gamma - 1 tokens in one pass."""

    name = "dflash"

    def draft_block(self, state: State, context: FeatureContext, rows: int) -> Proposal:
        """The block's most likely tokens as a chain, which may still be on its way."""
        tokens = self.likeliest(context, state.anchor, rows).astype(state.anchor.dtype)
        mx.async_eval(tokens)
        return Proposal(Tree.chain(tokens))

    def likeliest(self, context: FeatureContext, anchor: mx.array, rows: int) -> mx.array:
        """Tokens [rows - 1], each the likeliest at its position."""
        return mx.argmax(self._model.logits(context, anchor, rows), axis=-1)


class SelectedPath(BlockDiffusion):
    """DFlash 2: from every token on the candidate with the best score (see `selector.py`).

    The first drafts of trees take their probabilities from the same scores, see `links.py`.
    """

    def likeliest(self, context: FeatureContext, anchor: mx.array, rows: int) -> mx.array:
        """Tokens [rows - 1] of the path."""
        candidates = self._model.candidates(context, anchor, rows)
        return candidates.at(candidates.walk(lambda t, scores: mx.argmax(scores)))


class DrawnBlock(OneDraft):
    """As `BlockDiffusion`, with every token drawn at the target's own temperature and filters."""

    name = "dflash"

    def __init__(self, model: BlockModel, block_size: int | None, sampling: SamplingConfig) -> None:
        super().__init__(model, block_size)
        self._sampling = sampling
        self.sampler = Sampler(sampling)

    def draft_block(self, state: State, context: FeatureContext, rows: int) -> Proposal:
        """A chain that knows what it was drawn from."""
        if state.last is None:  # every answer is a draw of its own
            self.sampler = Sampler(self._sampling)
        key = self.sampler.key(state.position, DRAFT_STREAM)
        tokens, q = self.drawn(context, state.anchor, rows, key)
        tokens = tokens.astype(state.anchor.dtype)
        mx.async_eval(tokens, q)
        return Proposal(Tree.chain(tokens), q)

    def drawn(
        self, context: FeatureContext, anchor: mx.array, rows: int, key: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Tokens [rows - 1], and q [rows - 1, V] that they were drawn from; key: randomness."""
        logits = tempered(self._model.logits(context, anchor, rows), self.sampler.config)
        return mx.random.categorical(logits, key=key), mx.softmax(logits, axis=-1)


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


def _make(pair: Pair, config: DecodeConfig) -> OneDraft:
    model = block_models(pair)[0]
    is_plain = model.config.selector is None
    if config.draws_drafts:
        drawn = DrawnBlock if is_plain else DrawnPath
        return drawn(model, config.block_size, config.sampling)
    greedy = BlockDiffusion if is_plain else SelectedPath
    return greedy(model, config.block_size)


METHOD = Method(
    "dflash",
    "DFlash",
    _make,
    family=checkpoint.FAMILY,
    files=checkpoint,
    best_with=1,
    draws=True,
    settings=("block_size", "acceptance"),
    sources=(DRAFT,),
    preference=2,
    takes_advised_block=True,
)
