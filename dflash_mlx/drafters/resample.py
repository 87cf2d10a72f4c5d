"""K naive resamples of one draft: the control that says what D2SD's second drafter is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.option import Options, option
from dflash_mlx.drafters.dflash.block_model import FAMILY, BlockModel, FeatureContext
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.dual_diffusion import BRANCHES
from dflash_mlx.drafters.growth.samples import log_softmax, merge_samples
from dflash_mlx.drafters.method import DRAFT, MOST_BRANCHES, USUAL_BRANCHES, Method
from dflash_mlx.drafters.one_draft import OneDraft, block_models
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State


class Resample(OneDraft):
    """One DFlash pass; its likeliest block and `samples` draws of the block, merged to a tree.

    A draw takes a token at every position from the drafter's own distribution there (temperature
    1), independently. block_size: as for any `OneDraft`. seed: together with the position it
    decides the draws.
    """

    name = "resample"

    def __init__(self, model: BlockModel, block_size: int | None, samples: int, seed: int) -> None:
        super().__init__(model, block_size)
        self._samples, self._seed = samples, seed

    def draft_block(self, state: State, context: FeatureContext, rows: int) -> Proposal:
        """The merged blocks."""
        logits = self._model.logits(context, state.anchor, rows)
        generator = np.random.default_rng((self._seed, state.position))
        logprobs = log_softmax(np.array(logits.astype(mx.float32)))
        return Proposal(merge_samples(logprobs, self._samples, generator))


@dataclass(frozen=True)
class ResampleOptions(Options):
    """The options of `resample`."""

    branches: int | None = option(
        None,
        f"draws of the block (default: {BRANCHES})",
        least=1,
        most=MOST_BRANCHES,
        usual=USUAL_BRANCHES,
        type=int,
    )


def _make(pair: Pair, config: DecodeConfig) -> Resample:
    options = cast(ResampleOptions, config.options)
    seed, samples = config.sampling.with_seed().seed or 0, options.branches or BRANCHES
    return Resample(block_models(pair)[0], config.block_size, samples, seed)


METHOD = Method(
    "resample",
    "resampled blocks",
    _make,
    ResampleOptions,
    family=FAMILY,
    files=FILES,
    best_with=1,
    needs_trees=True,
    sources=(DRAFT,),
    is_control=True,
)
