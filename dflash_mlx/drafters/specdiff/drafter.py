"""Blocks that are denoised in one pass or in several, and what they become (arXiv 2408.05636)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import mlx.core as mx
import numpy as np

from dflash_mlx.core.config import MOST_ROWS, DecodeConfig, SamplingConfig
from dflash_mlx.core.option import Options, option
from dflash_mlx.core.sampling import tempered
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.growth.grow import TOP_K, Array, Ranked, best_first, follow
from dflash_mlx.drafters.method import DRAFT, EARLIER, BlockDrafter, Drawn, Method, Plan
from dflash_mlx.drafters.specdiff.checkpoint import FILES
from dflash_mlx.drafters.specdiff.model import MaskedModel, TextContext
from dflash_mlx.engine.drafter import Drafter, Proposal
from dflash_mlx.engine.state import State

Known = dict[int, int]  # tokens of a block that are fixed, by their places
Look = Callable[[Known, list[int]], Ranked]  # what a pass says of the places that are masked
Grow = Callable[[Ranked, int], Tree]  # a tree of what is drafted behind so many tokens

IN_ORDER, THRESHOLD = "left-to-right", "threshold"
SCHEDULES = ("confidence", IN_ORDER, THRESHOLD)
SURE = 0.9  # probability from which on the threshold schedule fixes a token


@dataclass(frozen=True)
class Denoising:
    """A block in passes, each of which fixes the first tokens, the surest, or all that are sure."""

    steps: int = 1  # passes over a block, at most
    schedule: str = IN_ORDER

    @property
    def in_order(self) -> bool:
        """Whether no token is fixed before one that precedes it."""
        return self.steps == 1 or self.schedule == IN_ORDER

    def fixed(self, confidences: Array, left: int) -> list[int]:
        """Which of the masked positions are fixed, in order, where `left` passes are to come.

        confidences: [n] probability of the likeliest token at each.
        """
        count = share(len(confidences), left)
        if self.in_order:
            return list(range(count))
        if self.schedule == THRESHOLD:
            count = max(1, int((confidences >= SURE).sum()))
        surest = np.argsort(-confidences, kind="stable")
        return sorted(surest[:count].tolist())


def share(masked: int, left: int) -> int:
    """How many of the masked positions a pass fixes, where `left` passes follow it."""
    return -(-masked // (left + 1))


def denoise(look: Look, places: Sequence[int], how: Denoising) -> Ranked:
    """What every place may hold: what the last pass in which it was masked says of it."""
    known: Known = {}
    said: dict[int, tuple[Array, Array]] = {}
    masked = list(places)
    for left in range(how.steps - 1, -1, -1):
        ranked = look(known, masked)
        said |= dict(zip(masked, zip(ranked.tokens, ranked.logprobs, strict=True), strict=True))
        fixed = how.fixed(ranked.confidences, left)
        if left == 0 or len(fixed) == len(masked):
            break
        known |= {masked[i]: ranked.best[i] for i in fixed}
        masked = [place for place in masked if place not in known]
    tokens, logprobs = zip(*(said[place] for place in places), strict=True)
    return Ranked(np.stack(tokens), np.stack(logprobs))


class SpecDiff(BlockDrafter[MaskedModel]):
    """SpecDiff (arXiv 2408.05636): a block of masks behind the anchor, denoised by itself.

    grow: makes a tree of what is drafted, from the `width` likeliest tokens of every position.
    """

    name = "specdiff"

    def __init__(
        self, model: MaskedModel, block_size: int | None, how: Denoising, grow: Grow, width: int
    ) -> None:
        super().__init__(model, block_size)
        self._how, self._grow, self._width = how, grow, width

    def draft_block(self, state: State, rows: int) -> Proposal:
        context, model = cast(TextContext, state.context), self._model

        def look(known: Known, masked: list[int]) -> Ranked:
            hidden = [known.get(place, model.mask) for place in range(1, rows)]
            return model.ranked(context, _block(state, mx.array(hidden)), masked, self._width)

        return Proposal(self._grow(denoise(look, range(1, rows), self._how), state.position))


class DrawnSpecDiff(Drawn[MaskedModel]):
    """With every token drawn, left to right.

    Of every pass the next tokens are drawn, each from what that pass says; it knows the ones before
    them and no later one.
    """

    name = "specdiff"

    def __init__(
        self,
        model: MaskedModel,
        block_size: int | None,
        how: Denoising,
        sampling: SamplingConfig,
        weighed: bool,
    ) -> None:
        assert how.in_order
        super().__init__(model, block_size, sampling, weighed)
        self._how = how

    def draft_block(self, state: State, rows: int) -> Proposal:
        return self.proposal(state, *self.drawn(state, rows))

    def drawn(self, state: State, rows: int) -> tuple[mx.array, mx.array, mx.array]:
        """Tokens [rows - 1], q [rows - 1, V] that they were drawn from, and how sure it was.

        sure: [rows - 1] the largest probabilities in the first pass.
        """
        context, steps = cast(TextContext, state.context), self._how.steps
        keys = mx.random.split(self.key(state), steps)
        tokens, q = mx.array([], state.anchor.dtype), []
        sure: mx.array | None = None
        for left in range(steps - 1, -1, -1):
            if (masked := rows - 1 - tokens.size) == 0:
                break
            masks = mx.full(masked, self._model.mask, tokens.dtype)
            block = _block(state, mx.concatenate([tokens, masks]))
            logits = self._model.logits(context, block, range(1 + tokens.size, rows))
            logits = tempered(logits, self.sampling)
            laws, count = mx.softmax(logits, axis=-1), share(masked, left)
            sure = laws.max(axis=-1) if sure is None else sure
            found = mx.random.categorical(logits[:count], key=keys[left])
            tokens = mx.concatenate([tokens, found.astype(tokens.dtype)])
            q.append(laws[:count])
        assert sure is not None
        return tokens, mx.concatenate(q), sure


def _block(state: State, hidden: mx.array) -> mx.array:
    """[b] the anchor and what is behind it."""
    return mx.concatenate([state.anchor, hidden.astype(state.anchor.dtype)])


def likeliest(ranked: Ranked, position: int, nodes: int) -> Tree:
    """The `nodes` likeliest prefixes; position: unused, see `Grow`."""
    return best_first(follow(ranked), nodes)


@dataclass(frozen=True)
class MaskedOptions(Options):
    """The options of `specdiff`."""

    steps: int | None = option(
        None,
        "passes that denoise a block, each fixes the first of its tokens (default: 1)",
        label="Passes that denoise a draft",
        least=1,
        most=MOST_ROWS,
        type=int,
    )

    @property
    def denoising(self) -> Denoising:
        return Denoising(self.steps or 1)

    def grow(self, config: DecodeConfig, nodes: int) -> tuple[Grow, int]:
        """What makes a tree of the draft, and from how many tokens of every position."""
        return partial(likeliest, nodes=nodes), TOP_K


def _make(how: Plan) -> Drafter:
    model = cast(MaskedModel, how.models[0])
    options, size = cast(MaskedOptions, how.config.options), how.config.block_size
    denoising = options.denoising
    if how.drawn and denoising.in_order:
        return DrawnSpecDiff(model, size, denoising, how.config.sampling, weighed=size is None)
    grow: tuple[Grow, int] = partial(likeliest, nodes=model.block_size), 1
    if not how.chain:
        grow = options.grow(how.config, how.nodes)
    return SpecDiff(model, size, denoising, *grow)


METHOD = Method(
    "specdiff",
    "SpecDiff",
    _make,
    MaskedOptions,
    files=FILES,
    best_with=1,
    draws=True,
    has_budget=True,
    sources=(DRAFT, *EARLIER),
    preference=1,
)
