"""Drafts token by token, a pass of the draft model for each: as a chain or as EAGLE-2's tree.

Whatever the draft model is: how it passes a row is its own, see `networks.model.Draft`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Protocol, Self, cast

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import Options
from dflash_mlx.core.sampling import tempered
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.formats import FileFormat
from dflash_mlx.drafters.growth.grow import Offers, Path, best_first
from dflash_mlx.drafters.method import (
    DRAFT,
    EARLIER,
    BlockDrafter,
    Drawn,
    Method,
    Plan,
    branches_option,
)
from dflash_mlx.drafters.networks.model import Draft
from dflash_mlx.engine.drafter import Drafter, Proposal
from dflash_mlx.engine.pair import DraftModel
from dflash_mlx.engine.state import State

BRANCHES = 8  # tokens that continue a path, and paths that are continued at a time

# Whether one step more is worth its time: by the chance that the draft is right as far as it goes,
# and the steps made.
Another = Callable[[float, int], bool]


class StepModel(DraftModel, Protocol):
    """A draft model that goes token by token."""

    takes_trees: bool  # whether several rows of a draft may continue the same one
    prefers_chains: bool  # whether that costs so much more that it has to be asked for

    def begin(self, state: State) -> Draft:
        """A draft behind a state whose context is this model's."""


class StepByStep(BlockDrafter[StepModel]):
    """A drafter that can be asked after each step whether it makes one more."""

    another: Another = staticmethod(lambda chance, steps: True)  # as many as a block has rows

    def __init__(self, model: StepModel, block_size: int | None = None) -> None:
        super().__init__(model, block_size)
        self.name = model.family

    def asking(self, another: Another) -> Self:
        """A copy that asks `another` after each step."""
        other = copy(self)
        other.another = another
        return other


class Chain(StepByStep):
    """The likeliest token after the one before, step by step; nobody waits between the steps."""

    def draft_block(self, state: State, rows: int) -> Proposal:
        draft, tokens = self._model.begin(state), [state.anchor]
        for row in range(rows - 1):
            tokens.append(draft.likeliest(tokens[-1], [row - 1]).astype(state.anchor.dtype))
        drafted = mx.concatenate(tokens[1:])
        mx.async_eval(drafted)
        return Proposal(Tree.chain(drafted))


class DrawnChain(Drawn[StepModel], StepByStep):
    """Every token drawn, for rejection sampling.

    All nodes are as sure as the first one, and so many steps are made as that is worth: how sure
    others are depends on what was drawn before them.
    """

    def draft_block(self, state: State, rows: int) -> Proposal:
        draft, tokens, laws = self._model.begin(state), [state.anchor], []
        keys = mx.random.split(self.key(state), rows - 1)
        chances: list[float] = []
        for row in range(rows - 1):
            logits = tempered(draft.logits(tokens[-1], [row - 1]), self.sampling)
            token = mx.random.categorical(logits, key=keys[row])
            tokens.append(token.astype(state.anchor.dtype))
            laws.append(mx.softmax(logits, axis=-1))
            if self._weighed and row + 2 < rows and not draft.in_one_pass:
                sure: Any = laws[0].max().item()
                chances.append(sure ** (row + 1))
                if not self.another(chances[-1], row + 1):
                    break
        q = mx.concatenate(laws)
        proposal = self.proposal(state, mx.concatenate(tokens[1:]), q, q[0].max())
        return replace(proposal, steps=tuple(chances[: len(laws) - 1]))


class GrownTree(StepByStep):
    """EAGLE-2's tree (arXiv 2406.16858): each depth is one pass over the likeliest paths so far.

    branches: tokens that continue a path, and paths that the next pass continues. nodes: of the
    tree, the likeliest of all that were offered, the root included. One branch makes a chain that
    says how sure it is of every token.
    """

    def __init__(self, model: StepModel, block_size: int | None, branches: int, nodes: int) -> None:
        super().__init__(model, block_size)
        self._branches, self._nodes = branches, nodes

    def draft_block(self, state: State, rows: int) -> Proposal:
        draft, chances = self._model.begin(state), []
        offers: dict[Path, Offers] = {}
        paths: list[tuple[float, Path, int]] = [(0.0, (), -1)]  # likelihood, row that it continues
        tokens = state.anchor
        for step in range(1, rows):
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
            if step + 1 < rows and not draft.in_one_pass:
                chance = sum(math.exp(score) for score, _, _ in paths)
                if not self.another(chance, step):
                    break
                chances.append(chance)
        return Proposal(best_first(offers.get, self._nodes), steps=tuple(chances))


@dataclass(frozen=True)
class StepOptions(Options):
    """The options of such methods."""

    branches: int | None = branches_option(
        f"tokens that may follow a path, and paths that a pass continues (default: {BRANCHES})",
        "Branches",
    )


def _make(how: Plan) -> Drafter:
    model, size = cast(StepModel, how.models[0]), how.config.block_size
    if how.drawn:
        return DrawnChain(model, size, how.config.sampling, weighed=size is None)
    if how.chain and how.fixed:
        return Chain(model, size)
    branches = cast(StepOptions, how.config.options).branches
    if (branches or 1) > 1 and not model.takes_trees:
        problem = f"branches is {branches}, but rows of this draft model follow one path"
        raise DFlashError(problem, "leave it out", "branches")
    usual = BRANCHES if model.takes_trees and not model.prefers_chains else 1
    return GrownTree(model, size, 1 if how.chain else branches or usual, how.nodes)


def step_by_step(label: str, files: FileFormat) -> Method:
    """The method that drafts so with the models of a family."""
    return Method(
        files.family,
        label,
        _make,
        StepOptions,
        files=files,
        best_with=1,
        has_budget=True,
        draws=True,
        sources=(DRAFT, *EARLIER),
        preference=1,
    )
