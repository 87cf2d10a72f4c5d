"""K naive resamples of one draft: the control that says what D2SD's second drafter is worth."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.block_diffusion import BlockModel
from dflash_mlx.drafters.checkpoint import check_block_size
from dflash_mlx.drafters.context import FeatureContext
from dflash_mlx.drafters.grow import Array, Prefixes
from dflash_mlx.state import State
from dflash_mlx.tree import Tree


class Resample:
    """One DFlash pass; its likeliest block and `samples` draws of the block, merged to a tree.

    A draw takes a token at every position from the drafter's own distribution there (temperature
    1), independently. block_size: as for DFlash. seed: together with the position it decides the
    draws. Raises DFlashError for a block size that the drafter was not trained for.
    """

    name = "resample"
    rounds_ahead = 0

    def __init__(self, model: BlockModel, block_size: int | None, samples: int, seed: int) -> None:
        check_block_size(block_size, model.config)
        self.block_size = block_size or model.config.block_size
        self.taps = model.config.target_layer_ids
        self._model, self._samples, self._seed = model, samples, seed

    def new_context(self) -> FeatureContext:
        """An empty context for one sequence."""
        return self._model.new_context()

    def propose(self, state: State, room: int) -> Tree:
        """The merged blocks, no deeper than `room` allows."""
        rows = min(self.block_size, room)
        if rows == 1:
            return Tree.chain(state.anchor)
        assert isinstance(state.context, FeatureContext)
        logits = self._model.logits(state.context, state.anchor, rows)
        generator = np.random.default_rng((self._seed, state.position))
        logprobs = log_softmax(np.array(logits.astype(mx.float32)))
        return merge_samples(logprobs, self._samples, generator).as_tree(state.anchor)


def log_softmax(logits: Array) -> Array:
    """[n, V] log-probabilities of each row."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    normal = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    result: Array = shifted - normal
    return result


def merge_samples(logprobs: Array, samples: int, generator: np.random.Generator) -> Prefixes:
    """The argmax of every position and `samples` independent draws, equal prefixes merged.

    logprobs: [n, V] of the n drafted positions.
    """
    tree, positions = Prefixes(), np.arange(len(logprobs))
    cumulative = np.cumsum(np.exp(logprobs, dtype=np.float64), axis=-1)
    for uniform in (None, *generator.random((samples, len(logprobs)))):
        tokens = np.argmax(logprobs, axis=-1) if uniform is None else _draw(cumulative, uniform)
        tree.add_path(tokens.tolist(), logprobs[positions, tokens].tolist())
    return tree


def _draw(cumulative: Array, uniform: Array) -> Array:
    """[n] a token per row by the inverse of its cumulative distribution [n, V]; uniform: [n]."""
    at = uniform * cumulative[:, -1]
    rows = zip(cumulative, at, strict=True)
    tokens = np.array([np.searchsorted(row, value, side="right") for row, value in rows])
    result: Array = np.minimum(tokens, cumulative.shape[1] - 1)  # rounding can reach the end
    return result
