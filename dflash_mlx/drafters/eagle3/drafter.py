"""EAGLE-3 (arXiv 2503.01840): drafts token by token, as a chain or as EAGLE-2's tree."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from operator import itemgetter
from typing import cast

import mlx.core as mx

from dflash_mlx.core.option import Options
from dflash_mlx.core.sampling import tempered
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.eagle3.checkpoint import FILES
from dflash_mlx.drafters.eagle3.model import FAMILY, Draft, EagleContext, EagleModel
from dflash_mlx.drafters.growth.grow import Offers, Path, best_first
from dflash_mlx.drafters.method import (
    DRAFT,
    LOOKUP,
    BlockDrafter,
    Drawn,
    Method,
    Plan,
    branches_option,
)
from dflash_mlx.engine.drafter import Drafter, Proposal
from dflash_mlx.engine.state import State

BRANCHES = 8  # tokens that continue a path, and paths that are continued at a time


def _begin(model: EagleModel, state: State) -> Draft:
    return model.begin(cast(EagleContext, state.context))


class Chain(BlockDrafter[EagleModel]):
    """The likeliest token after the one before, step by step; nobody waits between the steps."""

    name = FAMILY

    def draft_block(self, state: State, rows: int) -> Proposal:
        draft, tokens = _begin(self._model, state), [state.anchor]
        for row in range(rows - 1):
            tokens.append(draft.likeliest(tokens[-1], [row - 1]).astype(state.anchor.dtype))
        drafted = mx.concatenate(tokens[1:])
        mx.async_eval(drafted)
        return Proposal(Tree.chain(drafted))


class DrawnChain(Drawn[EagleModel]):
    """Every token drawn, for rejection sampling.

    All nodes are as sure as the first one: how sure others are depends on what was drawn before
    them.
    """

    name = FAMILY

    def draft_block(self, state: State, rows: int) -> Proposal:
        draft, tokens, laws = _begin(self._model, state), [state.anchor], []
        keys = mx.random.split(self.key(state), rows - 1)
        for row in range(rows - 1):
            logits = tempered(draft.logits(tokens[-1], [row - 1]), self.sampling)
            token = mx.random.categorical(logits, key=keys[row])
            tokens.append(token.astype(state.anchor.dtype))
            laws.append(mx.softmax(logits, axis=-1))
        q = mx.concatenate(laws)
        return self.proposal(state, mx.concatenate(tokens[1:]), q, q[0].max())


class GrownTree(BlockDrafter[EagleModel]):
    """EAGLE-2's tree (arXiv 2406.16858): each depth is one pass over the likeliest paths so far.

    branches: tokens that continue a path, and paths that the next pass continues. nodes: of the
    tree, the likeliest of all that were offered, the root included. One branch makes a chain that
    says how sure it is of every token.
    """

    name = FAMILY

    def __init__(
        self, model: EagleModel, block_size: int | None, branches: int, nodes: int
    ) -> None:
        super().__init__(model, block_size)
        self._branches, self._nodes = branches, nodes

    def draft_block(self, state: State, rows: int) -> Proposal:
        draft = _begin(self._model, state)
        offers: dict[Path, Offers] = {}
        paths: list[tuple[float, Path, int]] = [(0.0, (), -1)]  # likelihood, row that it continues
        tokens = state.anchor
        for _ in range(rows - 1):
            parents = [row for _, _, row in paths]
            ranked = draft.ranked(tokens, parents, self._branches)
            longer = []
            for row, ((score, path, _), found) in enumerate(
                zip(paths, ranked.offers, strict=True), start=len(offers)
            ):
                offers[path] = found
                longer += [(score + p, (*path, t), row) for t, p in zip(*found, strict=True)]
            paths = heapq.nlargest(self._branches, longer, key=itemgetter(0))
            tokens = mx.array([path[-1] for _, path, _ in paths], state.anchor.dtype)
        return Proposal(best_first(offers.get, self._nodes))


@dataclass(frozen=True)
class EagleOptions(Options):
    """The options of `eagle3`."""

    branches: int | None = branches_option(
        f"tokens behind a path, and paths that a pass continues (default: {BRANCHES})", "Branches"
    )


def _make(how: Plan) -> Drafter:
    model, size = cast(EagleModel, how.pair.of(FAMILY)[0]), how.config.block_size
    if how.drawn:
        return DrawnChain(model, size, how.config.sampling, weighed=size is None)
    if how.chain and how.fixed:
        return Chain(model, size)
    branches = cast(EagleOptions, how.config.options).branches or BRANCHES
    return GrownTree(model, size, 1 if how.chain else branches, how.nodes)


METHOD = Method(
    FAMILY,
    "EAGLE-3",
    _make,
    EagleOptions,
    family=FAMILY,
    files=FILES,
    best_with=1,
    has_budget=True,
    draws=True,
    sources=(DRAFT, LOOKUP),
    preference=1,
)
