"""What a drafter is trained for: cross-entropy over a draft vocabulary, weighted by position."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.networks.model import capped
from dflash_mlx.system import cpu_math
from dflash_mlx.train.blocks import Array
from dflash_mlx.train.data import Texts
from dflash_mlx.train.trainee import Trainee

_custom: Any = mx.custom_function  # whose result mypy takes for a plain object


@_custom  # type: ignore[untyped-decorator]
def _losses(logits: mx.array, labels: mx.array, shares: mx.array) -> tuple[mx.array, mx.array]:
    q = cpu_math.softmax(logits)
    picked = mx.take_along_axis(q, labels, axis=-1)
    return -(shares * mx.log(picked + 1e-30)).sum(axis=-1), q


@_losses.vjp  # type: ignore[untyped-decorator]
def _losses_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
    # D loss / d logits = q - shares, without passes over [N, V'] beyond these two.
    (_, labels, shares), (cotangent, _), (_, q) = primals, cotangents, outputs
    weights = cotangent[:, None]
    _, (wanted,) = mx.vjp(partial(mx.take_along_axis, indices=labels, axis=-1), [q], [shares])
    return (q - wanted) * weights, mx.zeros_like(labels), mx.zeros_like(shares)


def cross_entropy(
    logits: mx.array, labels: mx.array, shares: mx.array
) -> tuple[mx.array, mx.array]:
    """-sum over k of share k * log q(label k), per row [N], and q(label 0).

    logits: [N, V'] of the draft vocabulary. labels: [N, K] indices into it. shares: [N, K], what
    the drafter should give them, 1 in all. No gradient flows through q(label 0).
    """
    losses, q = _losses(logits, labels, shares)
    return losses, mx.stop_gradient(mx.take_along_axis(q, labels[:, :1], axis=-1)[:, 0])


def soft_shares(shares: Array, usable: Array, soft: float) -> Array:
    """What a drafter should give tokens [N, K]: `soft` of it as the target, the rest to the first.

    shares: the target's probabilities, [N, K]. usable: [N, K], which tokens are in the draft
    vocabulary; the first of every row must be. The target's part is scaled to be 1 over those.
    """
    kept = np.where(usable, shares, 0.0)
    result: Array = soft * kept / np.maximum(kept.sum(axis=-1, keepdims=True), 1e-30)
    result[:, 0] += 1.0 - soft
    return result.astype(np.float32)


def decay_weights(prefixes: Array, block_size: int, tau: float) -> Array:
    """exp(-(k - l - 1) / tau) at position k > l, 0 before; [..., B] for prefix lengths l [...].

    Source: DFlash (arXiv 2602.06036), equation 4; with l > 0, D2SD (arXiv 2606.04446).
    """
    beyond = np.arange(block_size) - prefixes[..., None] - 1
    return np.where(beyond >= 0, np.exp(-np.maximum(beyond, 0) / tau), 0.0).astype(np.float32)


def dpace_weights(confidences: mx.array, supervised: mx.array, alpha: float) -> mx.array:
    """D-PACE (arXiv 2605.18810, equations 7 and 8): weights by the drafter's own confidence.

    w_j = sum over m >= j of the product over i <= m of (1 - alpha) q_i + alpha, with q_i the
    drafter's probability of the right token. confidences, supervised: [..., B]; positions that
    are not supervised count as certain where they precede the masked ones, and weigh nothing.
    """
    confidence = mx.where(supervised, confidences, 1.0)
    reach = mx.cumprod((1 - alpha) * confidence + alpha, axis=-1) * supervised
    return mx.cumsum(reach, axis=-1, reverse=True) * supervised


class DraftVocabulary:
    """The tokens that training scores, the most frequent of the answers, and a head for them."""

    def __init__(self, trainee: Trainee, texts: Texts, size: int | None) -> None:
        """size: as for `draft_size`."""
        config = trainee.config
        answers = np.concatenate([text.tokens[text.prompt_length :] for text in texts.texts])
        counts = np.bincount(answers, minlength=config.vocab_size)
        by_frequency = np.argsort(-counts, kind="stable")  # of equal ones the lowest first
        self.tokens = by_frequency[: draft_size(size, config.vocab_size)]  # [V']
        self.index = np.full(config.vocab_size, -1)  # [V], where in `tokens` each is, -1 nowhere
        self.index[self.tokens] = np.arange(len(self.tokens))
        head, width = trainee.target.head_of(mx.array(self.tokens)), config.hidden_size
        bias = head(mx.zeros((1, width)))
        weights = head(mx.eye(width)) - bias
        self._head = mx.contiguous(weights.T.astype(mx.float32))  # [V', d]
        self._bias = bias.astype(mx.float32)
        self._softcap, self._multiplier = config.final_logit_softcapping, config.output_multiplier
        self._covered = float((self.index[answers] >= 0).mean())
        mx.eval(self._head, self._bias)

    def describe(self) -> str:
        return f"the draft vocabulary covers {self._covered:.1%} of the answers"

    def logits(self, states: mx.array) -> mx.array:
        """[N, V'] from final states [N, d]."""
        logits = mx.addmm(self._bias, states * self._multiplier, self._head.T)
        return capped(logits, self._softcap)


def draft_size(size: int | None, vocab_size: int) -> int:
    """V': `size` of `vocab_size` tokens; None for a quarter."""
    return min(size or max(1, vocab_size // 4), vocab_size)
