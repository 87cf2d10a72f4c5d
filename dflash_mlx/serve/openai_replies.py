"""OpenAI's chat completions and completions: their paths, and answers in their words."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response

from dflash_mlx.engine.delta import TokenLogprobs
from dflash_mlx.engine.pair import Pair
from dflash_mlx.serve.calls import CALL, THOUGHT, WORDS, Part
from dflash_mlx.serve.chat import Json, check_tokens, text_prompt
from dflash_mlx.serve.errors import ApiError, body_of, encoded, refusal
from dflash_mlx.serve.ollama_requests import GenerateRequest
from dflash_mlx.serve.openai_requests import ChatRequest, Completed, CompletionRequest
from dflash_mlx.serve.request_queue import TOOLS, Reply, ResponseStream
from dflash_mlx.serve.service import Service, answer, converse, figures
from dflash_mlx.serve.settings import MOST_ANSWERS

_REASONS = {"stop": "stop", "length": "length", "context": "length", TOOLS: "tool_calls"}
_KEYS = {THOUGHT: "reasoning_content", WORDS: "content"}


async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    return await converse(request, body, ChatWriter)


async def completions(body: CompletionRequest, request: Request) -> Response:
    """Go on with one text or several, streamed or whole."""
    return await answer(request, body, begin(request.app.state.service, body), TextWriter)


async def begin(service: Service, body: CompletionRequest | GenerateRequest) -> ResponseStream:
    """Ask for answers that go on with texts."""
    body.check()
    async with service.using(body) as pair:
        prompts = await service.prepare(lambda: _prompts(pair, body.prompt))
        if (answers := len(prompts) * body.answers) > MOST_ANSWERS:
            what = f"asks for {answers} answers with {len(prompts)} prompts"
            raise refusal("n", what, f"ask for at most {MOST_ANSWERS} at once")
        return await service.ask(pair, body, prompts, goes_on=True)


def _prompts(pair: Pair, given: str | list[str] | list[int]) -> list[tuple[int, ...]]:
    """One for each text; tokens are one prompt."""
    texts = [given] if isinstance(given, str) else [each for each in given if isinstance(each, str)]
    if texts:
        return [text_prompt(pair, text) for text in texts]
    tokens = tuple(each for each in given if isinstance(each, int))
    check_tokens(pair, tokens)
    return [tokens]


class ChatWriter:
    """Writes answers down as choices, each a message, whole or in chunks."""

    ping = b": alive\n\n"
    # Of ids; `object` of a whole response, and of a chunk.
    prefix, kind, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    first: ClassVar[Json] = {"delta": {"role": "assistant", "content": ""}}

    def __init__(self, service: Service, body: Completed, replies: Sequence[Reply]) -> None:
        self._tokenizer, self._body, self._replies = replies[0].tokenizer, body, replies
        self._header = {
            "id": f"{self.prefix}-{uuid.uuid4().hex[:24]}",
            "object": self.chunk if body.stream else self.kind,
            "created": int(time.time()),
            "model": body.model,
        }
        self._calls: dict[Reply, list[str]] = {}  # that chunks have begun
        self._told: Counter[Reply] = Counter()  # characters of tokens that logprobs were told of

    def start(self) -> bytes:
        return b""

    def part(self, reply: Reply, part: Part) -> bytes:
        begin = self._begin(reply) if part is reply.parts[0] else b""
        return begin + _event(self.of(self.choice(reply, self.added(reply, part))))

    def end(self, reply: Reply) -> bytes:
        begin = self._begin(reply) if not reply.parts else b""
        last = self.of(self.choice(reply, self.added(reply, None), _REASONS[reply.reason]))
        if not all(each.reason for each in self._replies):
            return begin + _event(last)
        done = begin + _event({**last, "dflash": figures(self._replies)})
        options = self._body.stream_options
        if options is not None and options.include_usage:  # without a choice, as clients expect
            done += _event({**self.of(), "usage": self._usage()})
        return done + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return _event(body_of(error, ""))

    def _begin(self, reply: Reply) -> bytes:
        """The first chunk of an answer; its tokens are told by the next."""
        none = {"finish_reason": None, "logprobs": None}
        return _event(self.of({"index": reply.index, **self.first, **none})) if self.first else b""

    def whole(self) -> Json:
        every = [self.choice(r, self.complete(r), _REASONS[r.reason]) for r in self._replies]
        return {**self.of(*every), "usage": self._usage(), "dflash": figures(self._replies)}

    def added(self, reply: Reply, part: Part | None) -> Json:
        """What a chunk says of a part; of None, when an answer is over."""
        if part is None:
            return {"delta": {}}
        if part.kind != CALL:
            return {"delta": {_KEYS[part.kind]: part.text}}
        calls = self._calls.setdefault(reply, [])
        if part.identity in calls:
            more: Json = {"function": {"arguments": part.text}}
        else:
            calls.append(part.identity)
            more = _call(part)
        return {"delta": {"tool_calls": [{"index": calls.index(part.identity), **more}]}}

    def complete(self, reply: Reply) -> Json:
        """What a whole response says of an answer."""
        thought = "".join(part.text for part in reply.parts if part.kind == THOUGHT)
        text = "".join(part.text for part in reply.parts if part.kind == WORDS)
        calls = [_call(part) for part in reply.parts if part.kind == CALL]
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        message |= {"reasoning_content": thought} if thought else {}
        message |= {"tool_calls": calls, "content": text or None} if calls else {}
        return {"message": message}

    def logprobs(self, reply: Reply, found: Sequence[TokenLogprobs]) -> Json:
        """Log-probabilities of tokens of an answer."""
        told = [
            {**self._one(p.token, p.logprob), "top_logprobs": [self._one(*top) for top in p.top]}
            for p in found
        ]
        return {"content": told, "refusal": None}

    def _one(self, token: int, logprob: float) -> Json:
        """A token; one that is only a part of a character has no bytes of its own."""
        text = self.text_of(token)
        whole = None if "\ufffd" in text else [*text.encode()]
        return {"token": text, "logprob": logprob, "bytes": whole}

    def of(self, *choices: Json) -> Json:
        """An object with these choices."""
        return {**self._header, "choices": choices}

    def choice(self, reply: Reply, said: Json, reason: str | None = None) -> Json:
        """One of them, with the log-probabilities that no other has told."""
        found = [p for p in reply.logprobs if p.token not in self._tokenizer.eos_token_ids]
        reply.logprobs.clear()
        tells = self._body.tops is not None and (found or not self._body.stream)
        told = self.logprobs(reply, found) if tells else None
        return {"index": reply.index, **said, "finish_reason": reason, "logprobs": told}

    def text_of(self, token: int) -> str:
        """What a token alone reads as."""
        return str(self._tokenizer.decode([token]))

    def _usage(self) -> Json:
        """Tokens of all answers; those of a prompt count once."""
        each = [reply.statistics for reply in self._replies]
        first = [reply.statistics for reply in self._replies if reply.behind is None]
        thought = sum(reply.reader.thoughts.tokens for reply in self._replies)
        read, said = sum(s.prompt_tokens for s in first), sum(s.generated_tokens for s in each)
        return {
            "prompt_tokens": read,
            "completion_tokens": said,
            "total_tokens": read + said,
            "completion_tokens_details": {"reasoning_tokens": thought},
            "prompt_tokens_details": {"cached_tokens": sum(s.reused_tokens for s in first)},
        }


class TextWriter(ChatWriter):
    """Writes answers down as choices, each a text."""

    prefix, kind, chunk = "cmpl", "text_completion", "text_completion"
    first: ClassVar[Json] = {}

    def added(self, reply: Reply, part: Part | None) -> Json:
        return {"text": "" if part is None else part.text}

    def complete(self, reply: Reply) -> Json:
        return {"text": "".join(part.text for part in reply.parts)}

    def logprobs(self, reply: Reply, found: Sequence[TokenLogprobs]) -> Json:
        tokens, offsets = [self.text_of(each.token) for each in found], []
        for token in tokens:
            offsets.append(self._told[reply])
            self._told[reply] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [{self.text_of(t): p for t, p in each.top} for each in found],
            "text_offset": offsets,
        }


def _call(part: Part) -> Json:
    function = {"name": part.name, "arguments": part.text}
    return {"id": part.identity, "type": "function", "function": function}


def _event(value: Json) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"
