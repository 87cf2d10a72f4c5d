"""What a drafter is trained for: cross-entropy over a draft vocabulary, weighted by position."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx import cpu_math

_custom: Any = mx.custom_function  # whose result mypy takes for a plain object


@_custom  # type: ignore[untyped-decorator]
def _cpu_cross_entropy(
    hidden: mx.array, head: mx.array, labels: mx.array
) -> tuple[mx.array, mx.array]:
    p = cpu_math.softmax((hidden @ head.T).astype(mx.float32))
    return -mx.log(mx.take_along_axis(p, labels[:, None], axis=-1)[:, 0] + 1e-30), p


@_cpu_cross_entropy.vjp  # type: ignore[untyped-decorator]
def _cpu_cross_entropy_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
    """D loss / d logits = p - onehot(label), without passes over [N, V'] beyond these two."""
    (_, head, labels), (cotangent, _), (_, p) = primals, cotangents, outputs
    weights = np.asarray(cotangent)
    gradient = np.asarray(p) * weights[:, None]
    gradient[np.arange(weights.size), np.asarray(labels)] -= weights
    return mx.array(gradient) @ head, mx.zeros_like(head), mx.zeros_like(labels)


def cross_entropy(
    hidden: mx.array, head: mx.array, labels: mx.array, softcap: float | None = None
) -> mx.array:
    """-log q(label) per row [N]; the head is frozen.

    hidden: [N, d]. head: [V', d], the output head's rows of the draft vocabulary. labels:
    [N] indices into it. softcap: logits become softcap * tanh(logits / softcap).
    """
    if cpu_math.applies() and softcap is None:
        losses: mx.array = _cpu_cross_entropy(hidden, head, labels)[0]
        return losses
    logits = (hidden @ mx.stop_gradient(head).T).astype(mx.float32)
    if softcap is not None:
        logits = mx.tanh(logits / softcap) * softcap
    picked = mx.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return mx.logsumexp(logits, axis=-1) - picked


def decay_weights(prefixes: npt.NDArray[Any], block_size: int, tau: float) -> npt.NDArray[Any]:
    """exp(-(k - l - 1) / tau) at position k > l, 0 before; [..., B] for prefix lengths l [...].

    Source: DFlash (arXiv 2602.06036), equation 4; with l > 0, D2SD (arXiv 2606.04446).
    """
    beyond = np.arange(block_size) - prefixes[..., None] - 1
    return np.where(beyond >= 0, np.exp(-np.maximum(beyond, 0) / tau), 0.0).astype(np.float32)


def dpace_weights(losses: mx.array, supervised: mx.array, alpha: float) -> mx.array:
    """D-PACE (arXiv 2605.18810, equations 7 and 8): weights by the drafter's own confidence.

    w_j = sum over m >= j of the product over i <= m of (1 - alpha) q_i + alpha, with q_i =
    exp(-loss_i). losses, supervised: [..., B]; positions that are not supervised count as certain
    where they precede the masked ones, and weigh nothing. No gradient flows through the weights.
    """
    confidence = mx.where(supervised, mx.exp(-mx.stop_gradient(losses)), 1.0)
    reach = mx.cumprod((1 - alpha) * confidence + alpha, axis=-1) * supervised
    return mx.cumsum(reach, axis=-1, reverse=True) * supervised
