"""Answers in the words of OpenAI's API: what chat completions and completions share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dflash_mlx.engine.delta import TokenLogprobs
from dflash_mlx.serve.errors import ApiError, body_of, encoded
from dflash_mlx.serve.reading import Part
from dflash_mlx.serve.replies import TOOLS, End, Step, merged
from dflash_mlx.serve.service import Service

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"
_PATH = "/v1/chat/completions"
_REASONS = {"stop": "stop", "length": "length", "context": "length", TOOLS: "tool_calls"}


class OpenAIBody(Protocol):
    """What a writer reads of a request."""

    model: str
    stream: bool | None
    stream_options: Any


@dataclass
class Answer:
    """What one answer has said so far."""

    thought: str = ""
    text: str = ""
    calls: list[Json] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # that no chunk has told yet
    told: int = 0  # characters of tokens that log-probabilities were told of
    begun: bool = False


class Writer:
    """Writes answers down as choices, whole or in chunks.

    prefix: of the response's id. kind: its `object`. prompts: how many texts the answers go on.
    """

    ping = b": alive\n\n"

    def __init__(
        self, service: Service, body: OpenAIBody, answers: int, prefix: str, kind: str, prompts: int
    ) -> None:
        self._tokenizer, self._prompts = service.pair.tokenizer, prompts
        self._streamed, options = bool(body.stream), body.stream_options
        self._usage = bool(options and options.include_usage)
        self._answers = [Answer() for _ in range(answers)]
        self._ends: dict[int, End] = {}
        self._header = {
            "id": f"{prefix}-{uuid.uuid4().hex[:24]}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model,
        }

    def take(self, answer: Answer, part: Part) -> Json:
        """Keep a part; it as the delta of a chunk."""
        raise NotImplementedError

    def chunks(self, step: Step, deltas: list[Json]) -> list[Json]:
        """The chunks of a step that adds these deltas."""
        raise NotImplementedError

    def choice(self, index: int, end: End) -> Json:
        """A whole answer."""
        raise NotImplementedError

    def start(self) -> list[bytes]:
        return []

    def step(self, step: Step) -> list[bytes]:
        answer, stops = self._answers[step.index], self._tokenizer.eos_token_ids
        answer.logprobs += [each for each in step.logprobs if each.token not in stops]
        if step.end is not None:
            self._ends[step.index] = step.end
        deltas = [self.take(answer, part) for part in step.parts]
        if not self._streamed:
            return []
        chunks = self.chunks(step, deltas)
        if len(self._ends) == len(self._answers):
            chunks[-1]["dflash"] = self._totals()["dflash"]
        return [event(chunk) for chunk in chunks]

    def end(self) -> list[bytes]:
        """The usage, where that was asked for: without a choice, which many clients expect."""
        usage = {**self.of([]), "usage": self._totals()["usage"]} if self._usage else None
        return [*([event(usage)] if usage is not None else []), DONE]

    def error(self, error: ApiError) -> bytes:
        return event(body_of(error, _PATH))

    def whole(self) -> Json:
        choices = [self.choice(index, self._ends[index]) for index in range(len(self._answers))]
        return {**self.of(choices), **self._totals()}

    def of(self, choices: Sequence[Json]) -> Json:
        """An object with these choices."""
        return {**self._header, "choices": list(choices)}

    def text_of(self, token: int) -> str:
        """What a token alone reads as."""
        return str(self._tokenizer.decode([token]))

    def _totals(self) -> Json:
        """The fields of a whole response that its choices do not have."""
        ends = [self._ends[index] for index in sorted(self._ends)]
        return {"usage": usage(ends, self._prompts), "dflash": merged(ends)}


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


def chat_logprobs(found: Sequence[TokenLogprobs], decode: Callable[[int], str]) -> Json:
    """Log-probabilities of tokens, as chat completions have them."""
    return {"content": [_token(each, decode) for each in found], "refusal": None}


def _token(found: TokenLogprobs, decode: Callable[[int], str]) -> Json:
    top = [_one(token, logprob, decode) for token, logprob in found.top]
    return {**_one(found.token, found.logprob, decode), "top_logprobs": top}


def _one(token: int, logprob: float, decode: Callable[[int], str]) -> Json:
    """bytes: None for a token that is only a part of a character."""
    text = decode(token)
    whole = None if "\ufffd" in text else [*text.encode()]
    return {"token": text, "logprob": logprob, "bytes": whole}


def event(value: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + encoded(value) + b"\n\n"
