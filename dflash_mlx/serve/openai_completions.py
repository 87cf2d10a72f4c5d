"""POST /v1/completions: texts that go on, without a chat template."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dflash_mlx.engine.logprobs import TokenLogprobs
from dflash_mlx.serve.errors import refusal
from dflash_mlx.serve.fields import decoding, only, with_seeds
from dflash_mlx.serve.openai_chat import check_common, stops_of
from dflash_mlx.serve.openai_format import Header, events, finish_reason, totals
from dflash_mlx.serve.openai_requests import CompletionRequest
from dflash_mlx.serve.prompts import Prompt, check_tokens, encode, spaced
from dflash_mlx.serve.reading import Said, TextReader
from dflash_mlx.serve.replies import End, Replies, Step, respond, unless_gone
from dflash_mlx.serve.service import Service
from dflash_mlx.serve.settings import MOST_ANSWERS

Json = dict[str, Any]


async def complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Go on with one text or several, streamed or whole."""
    prompts, replies = await unless_gone(request, _begin(service, body))
    writer = Writer(service, body, replies, prompts)
    streamed = events(replies, writer.chunks, writer.last_chunks) if body.stream else None
    return await respond(request, replies, streamed, writer.whole)


async def _begin(service: Service, body: CompletionRequest) -> tuple[int, Replies]:
    """How many prompts there are, and their answers."""
    service.check_model(body.model)
    check_common(body)
    only("best_of", body.best_of, 1)
    only("echo", body.echo, False)
    only("suffix", body.suffix)
    config = decoding(service.usual, body, body.max_tokens, stops_of(body), {})
    prompts = await service.prepare(lambda: _prompts(service, body.prompt))
    answers = len(prompts) * (body.n or 1)
    if answers > MOST_ANSWERS:
        what = f"asks for {answers} answers with {len(prompts)} prompts"
        raise refusal("n", what, f"ask for at most {MOST_ANSWERS} at once")
    ticket = await service.ask(prompts, with_seeds(config, body.n or 1), body.logprobs)
    return len(prompts), Replies(
        ticket, [TextReader() for _ in ticket.asked], partial(spaced, service.pair)
    )


def _prompts(service: Service, given: str | list[str] | list[int]) -> list[Prompt]:
    """One for each text; tokens are one prompt."""
    if isinstance(given, str):
        return [encode(service.pair, given)]
    texts = [each for each in given if isinstance(each, str)]
    if texts:
        return [encode(service.pair, text) for text in texts]
    tokens = [each for each in given if isinstance(each, int)]
    check_tokens(service.pair, tokens)
    return [Prompt(tuple(tokens))]


@dataclass
class _Choice:
    """What one answer has said so far."""

    text: str = ""
    at: int = 0  # characters of tokens that log-probabilities were told of
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Writer:
    """Writes the answers of one request down. prompts: how many texts go on."""

    def __init__(
        self, service: Service, body: CompletionRequest, replies: Replies, prompts: int
    ) -> None:
        self._tokenizer = service.pair.tokenizer
        self._header = Header("cmpl", "text_completion", body.model)
        self._replies, self._prompts = replies, prompts
        self._wants_logprobs = body.logprobs is not None
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._choices = [_Choice() for _ in replies.readers]
        self._ends: dict[int, End] = {}

    async def whole(self) -> Json:
        """The response as one object."""
        async for step in self._replies.steps():
            if step is not None:
                self._take(step)
        choices = []
        for index, choice in enumerate(self._choices):
            choices.append(self._choice(index, choice.text, self._ends[index]))
        return {**self._header.of(choices), **totals(self._ends, self._prompts)}

    def chunks(self, step: Step) -> list[Json]:
        """The chunks of a stream that a step makes."""
        text = self._take(step)
        if not text and step.end is None:
            return []
        chunk = self._header.of([self._choice(step.index, text, step.end)])
        if len(self._ends) == len(self._choices):
            chunk["dflash"] = totals(self._ends, self._prompts)["dflash"]
        return [chunk]

    def last_chunks(self) -> list[Json]:
        """The chunk with the usage, where that was asked for."""
        if not self._usage:
            return []
        return [{**self._header.of([]), "usage": totals(self._ends, self._prompts)["usage"]}]

    def _take(self, step: Step) -> str:
        """Keep a step; its text."""
        choice = self._choices[step.index]
        stops = self._tokenizer.eos_token_ids
        choice.logprobs += [each for each in step.logprobs if each.token not in stops]
        text = "".join(part.text for part in step.parts if isinstance(part, Said))
        choice.text += text
        if step.end is not None:
            self._ends[step.index] = step.end
        return text

    def _choice(self, index: int, text: str, end: End | None) -> Json:
        choice = self._choices[index]
        logprobs = self._logprobs(choice) if self._wants_logprobs else None
        reason = finish_reason(end) if end is not None else None
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}

    def _logprobs(self, choice: _Choice) -> Json:
        """Of the tokens since the last ones that were told; offsets count in the answer."""
        logprobs, choice.logprobs = choice.logprobs, []
        tokens = [self._text(each.token) for each in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(choice.at)
            choice.at += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [{self._text(t): p for t, p in each.top} for each in logprobs],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))
