"""POST /v1/completions: texts that go on, without a chat template."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dflash_mlx.serve.errors import refusal
from dflash_mlx.serve.fields import decoding, only, with_seeds
from dflash_mlx.serve.openai_chat import check_common, stops_of
from dflash_mlx.serve.openai_format import Answer, Writer, finish_reason
from dflash_mlx.serve.openai_requests import CompletionRequest
from dflash_mlx.serve.prompts import Prompt, check_tokens, encode, spaced
from dflash_mlx.serve.reading import Part, Said, TextReader
from dflash_mlx.serve.replies import End, Replies, Step, unless_gone, write
from dflash_mlx.serve.service import Service
from dflash_mlx.serve.settings import MOST_ANSWERS

Json = dict[str, Any]


async def complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Go on with one text or several, streamed or whole."""
    prompts, replies = await unless_gone(request, _begin(service, body))
    writer = TextWriter(service, body, len(replies.readers), prompts)
    return await write(request, replies, writer, body.stream)


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


class TextWriter(Writer):
    """Writes answers down as the texts that they are."""

    def __init__(
        self, service: Service, body: CompletionRequest, answers: int, prompts: int
    ) -> None:
        super().__init__(service, body, answers, "cmpl", "text_completion", prompts)
        self._wants_logprobs = body.logprobs is not None

    def take(self, answer: Answer, part: Part) -> Json:
        text = part.text if isinstance(part, Said) else ""
        answer.text += text
        return {"text": text}

    def chunks(self, step: Step, deltas: list[Json]) -> list[Json]:
        text = "".join(delta["text"] for delta in deltas)
        if not text and step.end is None:
            return []
        return [self.of([self._choice(step.index, text, step.end)])]

    def choice(self, index: int, end: End) -> Json:
        return self._choice(index, self._answers[index].text, end)

    def _choice(self, index: int, text: str, end: End | None) -> Json:
        told = self._logprobs(self._answers[index]) if self._wants_logprobs else None
        reason = finish_reason(end) if end is not None else None
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": told}

    def _logprobs(self, answer: Answer) -> Json:
        """Of the tokens since the last ones that were told; offsets count in the answer."""
        found, answer.logprobs = answer.logprobs, []
        tokens = [self.text_of(each.token) for each in found]
        offsets = []
        for token in tokens:
            offsets.append(answer.told)
            answer.told += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [{self.text_of(t): p for t, p in each.top} for each in found],
            "text_offset": offsets,
        }
