"""SpecDiff among the methods: chains, trees or samples, whatever was asked for or pays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

from dflash_mlx.core.config import MOST_ROWS, DecodeConfig
from dflash_mlx.core.option import Options, option
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.growth.grow import Ranked, best_first, follow
from dflash_mlx.drafters.growth.rank import TOP_K
from dflash_mlx.drafters.method import DRAFT, LOOKUP, Method, Plan
from dflash_mlx.drafters.specdiff import checkpoint
from dflash_mlx.drafters.specdiff.drafter import Denoising, DrawnSpecDiff, Grow, SpecDiff
from dflash_mlx.drafters.specdiff.model import FAMILY, MaskedModel
from dflash_mlx.engine.drafter import Drafter


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
        usual=("1", "2", "4"),
        type=int,
    )

    @property
    def denoising(self) -> Denoising:
        """Which tokens each pass fixes."""
        return Denoising(self.steps or 1)

    def grow(self, config: DecodeConfig, nodes: int) -> tuple[Grow, int]:
        """What makes a tree of the draft, and from how many tokens of every position."""
        return partial(likeliest, nodes=nodes), TOP_K


def _make(how: Plan) -> Drafter:
    model = cast(MaskedModel, how.pair.of(FAMILY)[0])
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
    family=FAMILY,
    files=checkpoint,
    best_with=1,
    draws=True,
    has_budget=True,
    sources=(DRAFT, LOOKUP),
    preference=1,
)
