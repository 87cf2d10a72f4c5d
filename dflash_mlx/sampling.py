"""From the target's logits to its next token: greedy, or sampled with filters and a seed.

A sampled token depends on the logits, the seed and its position, and on nothing else. So the same
seed gives the same answer whatever was drafted, exactly as greedy decoding does.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from dflash_mlx.config import SamplingConfig


class Sampler:
    """Draws tokens for one answer."""

    def __init__(self, config: SamplingConfig) -> None:
        self.config = config.with_seed()

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on the tokens before it, beyond the logits."""
        return self.config.repetition_penalty != 1.0

    @property
    def is_argmax(self) -> bool:
        """Whether the draw is the argmax of the logits, row by row."""
        return self.config.temperature == 0 and not self.needs_history

    def sample(self, logits: mx.array, position: int, history: Sequence[int]) -> mx.array:
        """Draw the token [1] at `position` from logits [V]; `history`: the tokens before it."""
        logits = penalise(logits, history, self.config)
        if self.config.temperature == 0:
            return mx.argmax(logits[None], axis=-1)
        logprobs = filter_logprobs(logits, self.config)
        logprobs = logprobs - logprobs.max()  # so that the best one survives any temperature
        assert self.config.seed is not None
        key = mx.random.key((self.config.seed << 32) | position)
        return mx.random.categorical(logprobs[None] / self.config.temperature, key=key)


def penalise(logits: mx.array, history: Sequence[int], config: SamplingConfig) -> mx.array:
    """Logits [V] with recent tokens made less likely (arXiv 1909.05858, equation 2)."""
    from mlx_lm.sample_utils import make_repetition_penalty

    if config.repetition_penalty == 1.0 or not history:
        return logits
    process = make_repetition_penalty(config.repetition_penalty, config.repetition_context)
    recent = list(history[-config.repetition_context :])
    return process(recent, logits[None])[0]  # type: ignore[no-any-return]


def filter_logprobs(logits: mx.array, config: SamplingConfig) -> mx.array:
    """Log-probabilities [V] with the tokens that top-p, min-p and top-k exclude at -inf.

    Same filters in the same order as `mlx_lm.sample_utils.make_sampler`.
    """
    from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if config.top_p < 1:
        logprobs = apply_top_p(logprobs, config.top_p)
    if config.min_p > 0:
        logprobs = apply_min_p(logprobs, config.min_p)
    if 0 < config.top_k < logprobs.shape[-1]:
        logprobs = apply_top_k(logprobs, config.top_k)
    return logprobs
