"""Log-probabilities that the target gave the tokens of an answer, for whoever asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

LEAST = -9999.0  # in place of minus infinity, which JSON does not know


@dataclass(frozen=True)
class TokenLogprobs:
    """A token, the natural logarithm of its probability, and the likeliest tokens with theirs.

    All of the target's own law: before temperature, filters and penalties.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs_of(
    tokens: Sequence[int], logits: mx.array | None, most: int
) -> tuple[TokenLogprobs, ...]:
    """Of tokens with the logits [n, V] that they were chosen from, and the `most` likeliest.

    () without logits, which are there where the answer was asked for with `logprobs`. Waits for
    the device.
    """
    if logits is None:
        return ()
    rows = logits[: len(tokens)].astype(mx.float32)
    logprobs = mx.maximum(rows - mx.logsumexp(rows, axis=-1, keepdims=True), LEAST)
    own = mx.take_along_axis(logprobs, mx.array([*tokens])[:, None], axis=-1)[:, 0]
    most = min(most, logprobs.shape[-1])
    best = mx.argsort(-logprobs, axis=-1)[:, :most] if most else mx.zeros((len(rows), 0), mx.int32)
    theirs = mx.take_along_axis(logprobs, best, axis=-1)
    mx.eval(own, best, theirs)
    told: list[Any] = [own.tolist(), best.tolist(), theirs.tolist()]
    found = zip(tokens, *told, strict=True)
    return tuple(
        TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in found
    )
