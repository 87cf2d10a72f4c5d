"""Answers in the words of OpenAI's API: what chat completions and completions share."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.engine.logprobs import TokenLogprobs
from dflash_mlx.serve.errors import ApiError, body_of, encoded
from dflash_mlx.serve.replies import TOOLS, End, Replies, Step, merged

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"
ALIVE = b": alive\n\n"
_PATH = "/v1/chat/completions"
_REASONS = {"stop": "stop", "length": "length", "context": "length", TOOLS: "tool_calls"}


@dataclass(frozen=True)
class Header:
    """What every object of a response begins with. prefix: of the id. kind: its `object`."""

    prefix: str
    kind: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    identity: str = field(default_factory=lambda: uuid.uuid4().hex[:24])

    def of(self, choices: Sequence[Json]) -> Json:
        """An object with these choices."""
        identity = f"{self.prefix}-{self.identity}"
        start = {"id": identity, "object": self.kind, "created": self.created}
        return {**start, "model": self.model, "choices": list(choices)}


def finish_reason(end: End) -> str:
    """Why an answer ended."""
    return _REASONS[end.reason]


def usage(ends: Sequence[End], prompts: int) -> Json:
    """Tokens of all answers; those of each of `prompts` prompts count once."""
    each = [end.statistics for end in ends]
    first = each[:: len(each) // prompts]
    read, said = sum(s.prompt_tokens for s in first), sum(s.generated_tokens for s in each)
    return {
        "prompt_tokens": read,
        "completion_tokens": said,
        "total_tokens": read + said,
        "prompt_tokens_details": {"cached_tokens": sum(s.reused_tokens for s in first)},
    }


def totals(ends: dict[int, End], prompts: int) -> Json:
    """The fields of a whole response that its choices do not have."""
    all_ends = [ends[index] for index in sorted(ends)]
    return {"usage": usage(all_ends, prompts), "dflash": merged(all_ends)}


def chat_logprobs(logprobs: Sequence[TokenLogprobs], decode: Callable[[int], str]) -> Json:
    """Log-probabilities of tokens, as chat completions have them."""
    return {"content": [_token(each, decode) for each in logprobs], "refusal": None}


def _token(each: TokenLogprobs, decode: Callable[[int], str]) -> Json:
    top = [_one(token, logprob, decode) for token, logprob in each.top]
    return {**_one(each.token, each.logprob, decode), "top_logprobs": top}


def _one(token: int, logprob: float, decode: Callable[[int], str]) -> Json:
    """bytes: None for a token that is only a part of a character."""
    text = decode(token)
    whole = None if "\ufffd" in text else [*text.encode()]
    return {"token": text, "logprob": logprob, "bytes": whole}


def event(value: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + encoded(value) + b"\n\n"


async def events(
    replies: Replies,
    of_step: Callable[[Step], Sequence[Json]],
    last: Callable[[], Sequence[Json]],
) -> AsyncIterator[bytes]:
    """The events of a stream: those of each step, then the last ones; or an error."""
    try:
        async for step in replies.steps():
            if step is None:
                yield ALIVE
                continue
            for value in of_step(step):
                yield event(value)
    except ApiError as error:
        yield event(body_of(error, _PATH))
        return
    for value in last():
        yield event(value)
    yield DONE
