"""From the target's logits to its next token: greedy, or sampled with filters and a seed.

A sampled token depends on the logits, the seed and its position, and on nothing else. So the same
seed gives the same answer whatever was drafted, exactly as greedy decoding does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import mlx.core as mx

from dflash_mlx.core.config import SamplingConfig

DRAW, KEEP = 1, 2  # streams of randomness beside the target's own


class Sampler:
    """Draws tokens for one answer."""

    def __init__(self, config: SamplingConfig, start: int = 0, ends: Collection[int] = ()) -> None:
        """start: tokens of the prompt. ends: tokens, any of which ends the answer."""
        self.config, self.start, self.ends = config.with_seed(), start, ends
        counts = config.presence_penalty or config.frequency_penalty or config.min_tokens
        # Whether a draw depends on the tokens before it, beyond the logits.
        self.needs_history = bool(counts) or config.repetition_penalty != 1.0
        # Whether it is from other logits than the target's.
        self.adjusts = self.needs_history or config.logit_bias != ()
        # Whether it is the argmax of the logits, row by row.
        self.is_argmax = config.temperature == 0 and not self.adjusts

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
        """Logits [V] behind `history`, with bias and penalties; [..., V] for bias alone.

        In this order: the bias; recent tokens less likely, the prompt's too (arXiv 1909.05858,
        equation 2); OpenAI's penalties, presence + frequency * count for each token of the answer;
        and no end before the answer has `min_tokens`, unless no other token is left.
        """
        if not self.adjusts:
            return logits
        config = self.config
        logits = _plus(logits.astype(mx.float32), dict(config.logit_bias))
        recent = history[max(0, len(history) - config.repetition_context) :]
        if config.repetition_penalty != 1.0 and recent:
            from mlx_lm.sample_utils import make_repetition_penalty

            process = make_repetition_penalty(config.repetition_penalty, len(recent))
            logits = process(list(recent), logits[None])[0]
        answer, presence = Counter(history[self.start :]), config.presence_penalty
        if presence or config.frequency_penalty:
            less = {t: -presence - config.frequency_penalty * n for t, n in answer.items()}
            logits = _plus(logits, less)
        if answer.total() < config.min_tokens:
            longer = _plus(logits, dict.fromkeys(self.ends, -math.inf))
            logits = mx.where((longer > -mx.inf).any(), longer, logits)
        return logits

    def known(self, history: Sequence[int], best: Callable[[], int]) -> int | None:
        """The token that `sample` would draw, where that is known without a draw.

        best: the largest of the logits as they are.
        """
        return None

    def key(self, position: int, stream: int = 0) -> mx.array:
        """Randomness for one draw at `position`; the target's own draws are stream 0."""
        assert self.config.seed is not None
        return mx.random.key((self.config.seed << 32) | (stream << 28) | position)


def _plus(logits: mx.array, more: Mapping[int, float]) -> mx.array:
    """Logits [..., V] with so much more for some tokens, as far as there are these."""
    known = {token: value for token, value in more.items() if token < logits.shape[-1]}
    if not known:
        return logits
    return logits.at[..., mx.array([*known])].add(mx.array([*known.values()]))


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
