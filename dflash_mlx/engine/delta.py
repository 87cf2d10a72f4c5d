"""What clients get of an answer: deltas as they come, and the whole of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.engine.drafter import Proposal

LEAST = -9999.0  # in place of minus infinity, which JSON does not know


@dataclass(frozen=True)
class TokenLogprobs:
    """What the target itself said of a token, before temperature, filters and penalties."""

    token: int
    logprob: float  # natural
    top: tuple[tuple[int, float], ...]  # the likeliest tokens with theirs


@dataclass(frozen=True)
class Delta:
    """What one round added to an answer."""

    text: str  # may be empty while a character or a stop text is incomplete
    tokens: tuple[int, ...]  # a stop token included
    accepted: Accepted  # the round's tree and path
    # None until the last delta, then "stop" (a stop token or text, or the end of the grammar),
    # "length" (max_tokens) or "context" (the model's context is full).
    finish_reason: str | None
    statistics: Statistics  # of the answer so far; one object that goes on counting
    anchor: int  # the token before `tokens`, for which the tree's root stands
    proposal: Proposal  # says why that tree was chosen
    stop_text: str | None = None  # the one that ended the answer
    logprobs: tuple[TokenLogprobs, ...] = ()  # of `tokens`, where a request asked for them


@dataclass(frozen=True)
class Answer:
    """A finished answer."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    statistics: Statistics


def collect(deltas: Iterator[Delta]) -> Answer:
    """Run a stream to its end."""
    texts: list[str] = []
    tokens: list[int] = []
    for delta in deltas:
        texts.append(delta.text)
        tokens.extend(delta.tokens)
    return Answer("".join(texts), tuple(tokens), delta.finish_reason or "", delta.statistics)


def logprobs_of(
    tokens: Sequence[int], logits: mx.array | None, most: int
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of tokens, and the `most` likeliest, from logits [n, V]; () without any."""
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
