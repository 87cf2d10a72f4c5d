"""Drafts that are drawn, for rejection sampling: what their drafters have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from dflash_mlx.core.config import SamplingConfig
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.growth.grow import FIRST, LEAST
from dflash_mlx.engine.state import State


class Drawing:
    """The sampler of the answer that is being written: every answer is a draw of its own."""

    def __init__(self, sampling: SamplingConfig) -> None:
        self._sampling, self._sampler = sampling, Sampler(sampling)
        self._opening: mx.array | None = None  # of that answer

    @property
    def config(self) -> SamplingConfig:
        """At what temperature, with which filters."""
        return self._sampling

    def sampler(self, state: State) -> Sampler:
        """A new one where another answer has begun."""
        if state.opening is not self._opening:
            self._sampler, self._opening = Sampler(self._sampling), state.opening
        return self._sampler


def with_confidences(chain: Tree, sure: Sequence[float] | mx.array) -> Tree:
    """A chain that says how sure its drafter is of each position, [N - 1] probabilities."""
    logprobs = np.log(np.maximum(np.array(sure), LEAST)).tolist()
    sources = ("", *[FIRST] * len(logprobs))
    return replace(chain, logprobs=(0.0, *logprobs), sources=sources)
