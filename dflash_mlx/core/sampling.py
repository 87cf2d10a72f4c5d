"""From the target's logits to its next token: greedy, or sampled with filters and a seed.

A sampled token depends on the logits, the seed and its position, and on nothing else. So the same
seed gives the same answer whatever was drafted, exactly as greedy decoding does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from dflash_mlx.core.config import SamplingConfig

DRAW, KEEP = 1, 2  # streams of randomness beside the target's own


class Sampler:
    """Draws tokens for one answer."""

    def __init__(self, config: SamplingConfig) -> None:
        self.config = config.with_seed()
        # Whether a draw depends on the tokens before it, beyond the logits.
        self.needs_history = config.repetition_penalty != 1.0
        # Whether it is the argmax of the logits, row by row.
        self.is_argmax = config.temperature == 0 and not self.needs_history

    def sample(self, logits: mx.array, position: int, history: Sequence[int]) -> mx.array:
        """Draw the token [1] at `position` from logits [V]; `history`: the tokens before it."""
        logits = self.adjusted(logits, history)
        if self.config.temperature == 0:
            return mx.argmax(logits[None], axis=-1)
        return mx.random.categorical(tempered(logits, self.config)[None], key=self.key(position))

    def law(self, logits: mx.array, history: Sequence[int]) -> mx.array:
        """The distribution [..., V] that `sample` draws from; for temperatures above 0.

        With a `history` that counts, logits are one row [V].
        """
        return mx.softmax(tempered(self.adjusted(logits, history), self.config), axis=-1)

    def adjusted(self, logits: mx.array, history: Sequence[int]) -> mx.array:
        """Logits [V] with recent tokens made less likely (arXiv 1909.05858, equation 2)."""
        if self.config.repetition_penalty == 1.0 or not history:
            return logits
        from mlx_lm.sample_utils import make_repetition_penalty

        context = self.config.repetition_context
        process = make_repetition_penalty(self.config.repetition_penalty, context)
        return process(list(history[-context:]), logits[None])[0]  # type: ignore[no-any-return]

    def known(self, history: Sequence[int], best: Callable[[], int]) -> int | None:
        """The token that `sample` would draw, where that is known without a draw.

        best: the largest of the logits as they are.
        """
        return None

    def key(self, position: int, stream: int = 0) -> mx.array:
        """Randomness for one draw at `position`; the target's own draws are stream 0."""
        assert self.config.seed is not None
        return mx.random.key((self.config.seed << 32) | (stream << 28) | position)


def tempered(logits: mx.array, config: SamplingConfig) -> mx.array:
    """Logits [..., V] of the distribution that is drawn from, after filters and temperature."""
    logprobs = filter_logprobs(logits, config)
    logprobs = logprobs - logprobs.max(axis=-1, keepdims=True)  # the best survives any temperature
    return logprobs / config.temperature


def filter_logprobs(logits: mx.array, config: SamplingConfig) -> mx.array:
    """Log-probabilities [..., V] with the tokens that top-p, min-p and top-k exclude at -inf.

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
