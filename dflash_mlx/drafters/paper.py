"""Knobs that reproduce papers, and controls of comparisons: for the benchmark alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, cast

import mlx.core as mx
import numpy as np

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import Options, option
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters import dual_diffusion
from dflash_mlx.drafters.block_diffusion import BlockDiffusion, contexts_of, dflash_method
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dual_diffusion import (
    BRANCHES,
    Drafts,
    DualDiffusion,
    DualOptions,
    JointGrowth,
)
from dflash_mlx.drafters.growth.grow import (
    FIRST,
    SECOND,
    Array,
    Choices,
    Path,
    Ranked,
    likeliest,
    rejection_boundaries,
    walk,
)
from dflash_mlx.drafters.growth.reliability import Sizes, reach
from dflash_mlx.drafters.method import (
    DRAFT,
    MOST_NODES,
    BlockDrafter,
    FirstDraft,
    Plan,
    branches_option,
    legal,
)
from dflash_mlx.drafters.methods import METHODS
from dflash_mlx.drafters.specdiff import drafter as specdiff
from dflash_mlx.drafters.specdiff.drafter import (
    IN_ORDER,
    SCHEDULES,
    Denoising,
    Grow,
    MaskedOptions,
)
from dflash_mlx.engine.drafter import Drafter, Proposal
from dflash_mlx.engine.state import State

GROWTHS = ("joint", "paper")
SAMPLED_FROM = 64  # likeliest tokens of a position (SpecDiff-2, arXiv 2511.00606)

Chain = tuple[Path, list[float], str]  # tokens, their log-probabilities, whose they are


def merged(chains: Sequence[Chain]) -> Tree:
    """One tree of chains; prefixes that are equal are shared nodes."""
    return reduce(lambda tree, chain: tree.merge(*chain), chains, Tree.chain())


class PaperGrowth(JointGrowth):
    """As published: K continuations of the first draft where it is likely to be rejected.

    branches: K. Nothing is pruned; equal prefixes share their nodes.
    """

    def __init__(self, branches: int) -> None:
        super().__init__(branches, MOST_NODES)

    def prefixes(self, first: Choices, second: Drafts, longest: int) -> dict[Path, float]:
        """Those with the largest rejection-boundary posterior r(i), and the whole first draft.

        Each with its posterior. second: the branches so far, which the third level continues
        likewise. longest: tokens behind which there is still something to draft.
        """
        chains = self._chains(first, second)
        likely: dict[Path, float] = {}
        for chain, logprobs, _ in chains:
            for i, r in enumerate(rejection_boundaries(np.exp(np.array(logprobs)))):
                if i <= longest and chain[:i] not in second:
                    likely[chain[:i]] = max(likely.get(chain[:i], 0.0), float(r))
        chosen = likeliest(likely, self._branches)
        whole, logprobs, _ = chains[0]
        if len(whole) <= longest and whole not in second:
            chosen[whole] = math.exp(sum(logprobs))
        return likeliest(chosen, len(chosen))

    def tree(self, first: Choices, second: Drafts) -> Tree:
        return merged(self._chains(first, second))

    def _chains(self, first: Choices, second: Drafts) -> list[Chain]:
        chains: list[Chain] = [(*walk(first), FIRST)]
        for prefix, choices in second.items():
            if choices is first:  # a drafter that continues itself
                continue
            end = len(prefix)
            known = next(known for chain, known, _ in chains if chain[:end] == prefix)
            path, logprobs = walk(choices)
            chains.append(((*prefix, *path), [*known[:end], *logprobs], SECOND))
        return chains


class AblatedDual(DualDiffusion):
    """D2SD with a further level of second drafts, or without a branch behind the first one's end.

    levels: 3 lets the second drafter continue its own branches, too. extends: whether a longer
    second block continues the whole first draft.
    """

    levels = 2

    def ablated(self, levels: int, extends: bool = True) -> AblatedDual:
        self.levels = levels
        self._longest = self._sizes[1] if extends else min(self._sizes)
        return self

    def behind(
        self, states: Sequence[State], drafts: Sequence[FirstDraft], chosen: Sequence[list[Path]]
    ) -> list[dict[Path, Choices]]:
        known = super().behind(states, drafts, chosen)
        for _ in range(2, self.levels):
            chosen = [
                [*legal(self._prefixes(draft.choices, second, draft.remaining), state)]
                if draft.choices and second
                else []
                for draft, second, state in zip(drafts, known, states, strict=True)
            ]
            further = super().behind(states, drafts, chosen)
            known = [{**one, **more} for one, more in zip(known, further, strict=True)]
        return known


@dataclass(frozen=True)
class AblatedDualOptions(DualOptions):
    """The options of `d2sd` that its paper's ablations need."""

    growth: str = option(
        "joint",
        "best-first over both drafts, or as published and whole",
        choices=GROWTHS,
    )
    extension: bool = option(True, "let a longer second block continue the whole first draft, too")
    levels: int = option(
        2, "3 lets the second drafter continue its own branches, too", least=2, most=3, type=int
    )

    @property
    def cuts(self) -> bool:  # type: ignore[override]
        return self.growth == "joint"

    def check(self, config: DecodeConfig) -> None:
        if not self.cuts and config.budget is not None:
            what = f"growth={self.growth} never cuts its tree, but the budget is {config.budget}"
            raise DFlashError(what, "leave the budget or the growth out", "budget")

    def growth_of(self, how: Plan) -> JointGrowth:
        self.check(how.config)
        if self.cuts:
            return super().growth_of(how)
        return PaperGrowth(self.branches or BRANCHES)

    def drafter(self, *parts: Any) -> DualDiffusion:
        return AblatedDual(*parts).ablated(self.levels, self.extension)


def merge_samples(
    logprobs: Array, samples: int, generator: np.random.Generator, ids: Array | None = None
) -> Tree:
    """The argmax of every position and `samples` independent draws, equal prefixes merged.

    logprobs: [n, k] of the n drafted positions; only their proportions are drawn by. ids: [n, k]
    the tokens that they are for, None for 0 to k - 1.
    """
    positions, chains = np.arange(len(logprobs)), list[Chain]()
    cumulative = np.cumsum(np.exp(logprobs, dtype=np.float64), axis=-1)
    draws = [np.argmax(logprobs, axis=-1)]
    for uniform in generator.random((samples, len(logprobs))):
        below = (cumulative <= (uniform * cumulative[:, -1])[:, None]).sum(axis=-1)
        draws.append(np.minimum(below, logprobs.shape[1] - 1))  # rounding can reach the end
    for drawn in draws:
        tokens = drawn if ids is None else ids[positions, drawn]
        chains.append((tuple(tokens.tolist()), logprobs[positions, drawn].tolist(), FIRST))
    return merged(chains)


def sampled(ranked: Ranked, position: int, samples: int, seed: int, nodes: int) -> Tree:
    """The likeliest block and `samples` draws, merged (SpecDiff-2, arXiv 2511.00606).

    Of more than `nodes`, those that are likeliest to be reached.
    """
    generator = np.random.default_rng((seed, position))
    tree = merge_samples(ranked.logprobs, samples, generator, ranked.tokens)
    chances = np.exp(np.minimum(tree.logprobs, 0.0))  # rounding may leave one above 1
    return tree.prune(sorted(Sizes.of([reach(tree, chances)], nodes).order.tolist()))


@dataclass(frozen=True)
class ScheduledOptions(MaskedOptions):
    """The options of `specdiff`, other schedules and samples that are merged to a tree."""

    schedule: str = option(
        IN_ORDER,
        "with several steps: after each, fix the surest tokens, the first ones, or all that are "
        "90 % sure",
        choices=SCHEDULES,
    )
    branches: int | None = branches_option("samples of the draft, merged to a tree")

    @property
    def denoising(self) -> Denoising:
        return Denoising(self.steps or 1, self.schedule)

    def check(self, config: DecodeConfig) -> None:
        # Where a later token is fixed first, and an earlier one by it, the law of the draft is
        # neither pass's: min(1, p/q) with the passes' own q is wrong.
        if config.acceptance == "reject" and not self.denoising.in_order:
            what = f"acceptance is reject, but the {self.schedule} schedule with {self.steps} steps"
            what += " fixes tokens out of order, so the law that they were drawn from is not known"
            step = f"choose the schedule {IN_ORDER}, one step, or acceptance match"
            raise DFlashError(what, step, "acceptance")

    def grow(self, config: DecodeConfig, nodes: int) -> tuple[Grow, int]:
        self.check(config)
        if self.branches is None:
            return super().grow(config, nodes)
        seed = config.sampling.with_seed().seed or 0
        return partial(sampled, samples=self.branches, seed=seed, nodes=nodes), SAMPLED_FROM


class Resample(BlockDrafter[BlockModel]):
    """One DFlash pass; its likeliest block and `samples` draws of the block, merged to a tree.

    The control that says what D2SD's second drafter is worth. A draw takes a token at every
    position from the drafter's own distribution there (temperature 1), independently. seed:
    together with the position it decides the draws.
    """

    name = "resample"

    def __init__(self, model: BlockModel, block_size: int | None, samples: int, seed: int) -> None:
        super().__init__(model, block_size)
        self._samples, self._seed = samples, seed

    def draft_block(self, state: State, rows: int) -> Proposal:
        logits = self._model.logits(contexts_of(state)[0], state.anchor, rows).astype(mx.float32)
        logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        generator = np.random.default_rng((self._seed, state.position))
        return Proposal(merge_samples(logprobs, self._samples, generator))


@dataclass(frozen=True)
class ResampleOptions(Options):
    """The options of `resample`."""

    branches: int | None = branches_option(f"draws of the block (default: {BRANCHES})")


def _make_resample(how: Plan) -> Drafter:
    samples = cast(ResampleOptions, how.config.options).branches or BRANCHES
    seed = how.config.sampling.with_seed().seed or 0
    return Resample(how.models[0], how.config.block_size, samples, seed)


RESAMPLE = dflash_method(
    "resample",
    "resampled blocks",
    _make_resample,
    ResampleOptions,
    needs_trees=True,
    sources=(DRAFT,),
    is_control=True,
)
FIRST_VERSION = dflash_method(
    "dflash1",
    "DFlash without its selector",
    lambda how: BlockDiffusion(how.models[0], how.config.block_size),
    sources=(DRAFT,),
    is_control=True,
)
CONTROLS = {method.name: method for method in (RESAMPLE, FIRST_VERSION)}
KNOBS: dict[str, type[Options]] = {
    dual_diffusion.METHOD.name: AblatedDualOptions,
    specdiff.METHOD.name: ScheduledOptions,
}


def add_controls() -> None:
    """Put the controls into the table of methods."""
    METHODS.update(CONTROLS)
