"""What a drafter is trained for: cross-entropy over a draft vocabulary, weighted by position."""

from __future__ import annotations

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
def _cpu_cross_entropy(
    hidden: mx.array, head: mx.array, labels: mx.array, shares: mx.array
) -> tuple[mx.array, mx.array]:
    q = cpu_math.softmax((hidden @ head.T).astype(mx.float32))
    picked = mx.take_along_axis(q, labels, axis=-1)
    return -(shares * mx.log(picked + 1e-30)).sum(axis=-1), q


@_cpu_cross_entropy.vjp  # type: ignore[untyped-decorator]
def _cpu_cross_entropy_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
    # D loss / d logits = q - shares, without passes over [N, V'] beyond these two.
    (_, head, labels, shares), (cotangent, _), (_, q) = primals, cotangents, outputs
    weights = np.asarray(cotangent)[:, None]
    gradient = np.asarray(q) * weights
    rows = np.arange(len(weights))[:, None]
    np.subtract.at(gradient, (rows, np.asarray(labels)), np.asarray(shares) * weights)
    zeros = (mx.zeros_like(a) for a in (head, labels, shares))
    return mx.array(gradient) @ head, *zeros


def cross_entropy(
    hidden: mx.array,
    head: mx.array,
    labels: mx.array,
    shares: mx.array,
    softcap: float | None = None,
) -> tuple[mx.array, mx.array]:
    """-sum over k of share k * log q(label k), per row [N], and q(label 0); the head is frozen.

    hidden: [N, d]. head: [V', d], the output head's rows of the draft vocabulary. labels:
    [N, K] indices into it. shares: [N, K], what the drafter should give them, 1 in all. softcap: of
    the logits. No gradient flows through q(label 0).
    """
    if cpu_math.applies() and softcap is None:
        losses, q = _cpu_cross_entropy(hidden, head, labels, shares)
        return losses, mx.stop_gradient(mx.take_along_axis(q, labels[:, :1], axis=-1)[:, 0])
    logits = capped((hidden @ mx.stop_gradient(head).T).astype(mx.float32), softcap)
    picked = mx.take_along_axis(logits, labels, axis=-1)
    picked = picked - mx.logsumexp(logits, axis=-1, keepdims=True)
    return -(shares * picked).sum(axis=-1), mx.stop_gradient(mx.exp(picked[:, 0]))


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
        parts = [weights, bias] if mx.any(bias != 0).item() else [weights]
        self.head = mx.contiguous(mx.concatenate(parts).T.astype(mx.float32))  # [V', d or d + 1]
        self.softcap, self._multiplier = config.final_logit_softcapping, config.output_multiplier
        self._covered = float((self.index[answers] >= 0).mean())
        mx.eval(self.head)

    def describe(self) -> str:
        return f"the draft vocabulary covers {self._covered:.1%} of the answers"

    def head_inputs(self, states: mx.array) -> mx.array:
        """What `head` takes, [N, d] or [N, d + 1], from final states [N, d]."""
        rows: mx.array = states * self._multiplier
        if self.head.shape[1] == rows.shape[1]:
            return rows
        return mx.concatenate([rows, mx.ones((rows.shape[0], 1))], axis=-1)

    def logits(self, states: mx.array) -> mx.array:
        """[N, V'] from final states [N, d]."""
        return capped(self.head_inputs(states) @ self.head.T, self.softcap)


def draft_size(size: int | None, vocab_size: int) -> int:
    """V': `size` of `vocab_size` tokens; None for a quarter."""
    return min(size or max(1, vocab_size // 4), vocab_size)
