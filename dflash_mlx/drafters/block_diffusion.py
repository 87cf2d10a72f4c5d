"""DFlash: a block of tokens drafted in one pass, conditioned on the target's hidden states.

A chain (arXiv 2602.06036), drawn or not, or DDTree's prefix tree (arXiv 2604.12989).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import Any, cast

import mlx.core as mx

from dflash_mlx.core.sampling import tempered
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.dflash.block_model import Ask, BlockModel, FeatureContext
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.growth.grow import TOP_K, Choices, best_first
from dflash_mlx.drafters.method import DRAFT, EARLIER, BlockDrafter, Drawn, Method, Plan
from dflash_mlx.engine.drafter import Drafter, Proposal
from dflash_mlx.engine.state import State


def contexts_of(state: State) -> tuple[FeatureContext, ...]:
    """The contexts in a state that a block-diffusion drafter drafts for, one per network."""
    return cast(tuple[FeatureContext, ...], cast(Any, state.context).contexts)


def choices(model: BlockModel, asks: Sequence[Ask], width: int = TOP_K) -> list[list[Choices]]:
    """What can follow each prefix of each block, [] for a block that leaves nothing to draft."""
    drafts = [ask.rows > 1 and len(ask.prefixes) > 0 for ask in asks]
    found = iter(model.choices([*compress(asks, drafts)], width))
    return [next(found) if drafted else [] for drafted in drafts]


class BlockDiffusion(BlockDrafter[BlockModel]):
    """[anchor, mask, ..., mask] -> gamma - 1 tokens in one pass."""

    name = "dflash"

    def draft_block(self, state: State, rows: int) -> Proposal:
        """The block's most likely tokens as a chain, which may still be on its way."""
        context = contexts_of(state)[0]
        tokens = self.likeliest(context, state.anchor, rows).astype(state.anchor.dtype)
        mx.async_eval(tokens)
        return Proposal(Tree.chain(tokens))

    def likeliest(self, context: FeatureContext, anchor: mx.array, rows: int) -> mx.array:
        return self._model.likeliest(context, anchor, rows)


class SelectedPath(BlockDiffusion):
    """DFlash 2, DSpark, Domino: after every token the best one, see `dflash/paths.py`."""

    def likeliest(self, context: FeatureContext, anchor: mx.array, rows: int) -> mx.array:
        candidates = self._model.candidates(context, anchor, rows)
        return candidates.at(candidates.likeliest()[0])


class BestFirst(BlockDrafter[BlockModel]):
    """One DFlash pass; its `nodes` likeliest prefixes by the product of their probabilities.

    Of a linked drafter (DFlash 2, DSpark, Domino) every token's probability is that after the one
    before. width: tokens that a position can offer behind each path.
    """

    name = "ddtree"

    def __init__(
        self, model: BlockModel, block_size: int | None, nodes: int, width: int = TOP_K
    ) -> None:
        super().__init__(model, block_size)
        self._nodes, self._width = nodes, width

    def draft_all(self, states: Sequence[State], rooms: Sequence[int]) -> list[Proposal]:
        asks = [
            Ask(contexts_of(state)[0], state.anchor, min(self.block_size, remaining))
            for state, remaining in zip(states, rooms, strict=True)
        ]
        return [
            Proposal(best_first(found[0], self._nodes) if found else Tree.chain())
            for found in choices(self._model, asks, self._width)
        ]

    def draft_block(self, state: State, rows: int) -> Proposal:
        return self.draft_all([state], [rows])[0]


class RankedChain(BestFirst):
    """DFlash's chain, which says how sure it is of every token."""

    name = "dflash"

    def __init__(self, model: BlockModel) -> None:
        super().__init__(model, None, nodes=model.block_size, width=1)


class DrawnBlock(Drawn[BlockModel]):
    """Every token drawn from the drafter's distribution, for rejection sampling."""

    name = "dflash"

    def draft_block(self, state: State, rows: int) -> Proposal:
        drawn = self.drawn(contexts_of(state)[0], state.anchor, rows, self.key(state))
        return self.proposal(state, *drawn)

    def drawn(
        self, context: FeatureContext, anchor: mx.array, rows: int, key: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Tokens [rows - 1], q [rows - 1, V] that they were drawn from, and how sure it was.

        key: randomness. sure: [rows - 1] the largest probabilities, whatever is drawn.
        """
        logits = tempered(self._model.logits(context, anchor, rows), self.sampling)
        q = mx.softmax(logits, axis=-1)
        return mx.random.categorical(logits, key=key), q, q.max(axis=-1)


class DrawnPath(DrawnBlock):
    """Every token drawn by the scores of candidates after the one before."""

    def drawn(
        self, context: FeatureContext, anchor: mx.array, rows: int, key: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Tokens [rows - 1] of a path and q [rows - 1, V], zero outside the candidates.

        sure: along the likeliest path, by the drafter's confidence head if it has one.
        """
        found, config = self._model.candidates(context, anchor, rows), self.sampling
        drawn = found.changed(lambda scores: tempered(scores, config))
        keys = mx.random.split(key, rows - 1)
        path, scores = drawn.walk(lambda t, scores: mx.random.categorical(scores, key=keys[t]))
        nothing = mx.zeros((rows - 1, self._model.config.vocab_size))
        q = mx.put_along_axis(nothing, drawn.tokens, mx.softmax(scores, axis=-1), axis=-1)
        best, chances = drawn.likeliest()
        if found.confidences is not None:
            return drawn.at(path), q, found.confidences(best)
        return drawn.at(path), q, mx.softmax(chances, axis=-1).max(axis=-1)


def _make_chain(how: Plan) -> Drafter:
    model, size = cast(BlockModel, how.models[0]), how.config.block_size
    if how.drawn:
        drawn = DrawnBlock if model.links is None else DrawnPath
        return drawn(model, size, how.config.sampling, weighed=not how.fixed)
    if how.fixed:
        return (BlockDiffusion if model.links is None else SelectedPath)(model, size)
    return RankedChain(model)


dflash_method = partial(Method, files=FILES, best_with=1)
DFLASH = dflash_method(
    "dflash",
    "DFlash",
    _make_chain,
    draws=True,
    sources=(DRAFT, *EARLIER),
    preference=2,
)
DDTREE = dflash_method(
    "ddtree",
    "DFlash tree",
    lambda how: BestFirst(how.models[0], how.config.block_size, how.nodes),
    needs_trees=True,
    has_budget=True,
    sources=(DRAFT, *EARLIER),
    preference=3,
)
