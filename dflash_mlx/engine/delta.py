"""What clients get of an answer: deltas as they come, and the whole of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.logprobs import TokenLogprobs


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
