"""OpenAI's chat completions and completions: their paths, and answers in their words."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from dflash_mlx.drafters.methods import source_of
from dflash_mlx.engine.delta import TokenLogprobs, token_bytes
from dflash_mlx.engine.pair import Pair
from dflash_mlx.serve.chat import Json, check_tokens, text_prompt
from dflash_mlx.serve.errors import ApiError, body_of, encoded
from dflash_mlx.serve.fields import Answered, decoding
from dflash_mlx.serve.openai_requests import ChatRequest, Completed, CompletionRequest
from dflash_mlx.serve.request_queue import Reply, ResponseStream
from dflash_mlx.serve.service import Service, Writer, answer, converse, figures, progress
from dflash_mlx.session.calls import CALL, THOUGHT, WORDS, Part

_KEYS = {THOUGHT: "reasoning_content", WORDS: "content"}


async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    return await converse(request, body, ChatWriter)


async def completions(body: CompletionRequest, request: Request) -> Response:
    """Go on with one text or several, streamed or whole."""
    stream = begin(request, body, body.prompts, bool(body.echo))
    return await answer(request, body, stream, TextWriter)


async def begin(
    request: Request, body: Answered, given: Sequence[str | list[int]], echo: bool = False
) -> ResponseStream:
    """Ask for answers that go on with texts. echo: the texts are told, too."""
    service: Service = request.app.state.service
    body.check()
    async with service.using(body) as pair:
        prompts = await service.prepare(lambda: [_prompt(pair, each) for each in given])
        configs, tokens = decoding(service.usual, body), [tokens for tokens, _ in prompts]
        replies = service.replies(request, body, pair, configs, tokens)
        for reply in replies:
            reply.goes_on = True
            if echo:
                reply.echo = prompts[reply.index // body.answers][1]
        return await service.queue.open(replies)


def _prompt(pair: Pair, given: str | list[int]) -> tuple[tuple[int, ...], str]:
    """The tokens and the text of a prompt."""
    if isinstance(given, str):
        return text_prompt(pair, given), given
    check_tokens(pair, given)
    return tuple(given), str(pair.tokenizer.decode(given))


def _best(replies: Sequence[Reply], body: Completed) -> list[Reply]:
    """Those of each prompt whose tokens have the highest mean log-probability, in order."""

    def mean(reply: Reply) -> float:
        own = reply.logprobs[-reply.statistics.generated_tokens :]
        return sum(each.logprob or 0.0 for each in own) / max(1, len(own))

    if body.answers == body.wanted:
        return [*replies]
    groups = (replies[i : i + body.answers] for i in range(0, len(replies), body.answers))
    return [r for each in groups for r in sorted(each, key=mean, reverse=True)[: body.wanted]]


class ChatWriter(Writer):
    """Writes answers down as choices, each a message, whole or in chunks."""

    # Of ids; `object` of a whole response, and of a chunk.
    prefix, kind, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    first: ClassVar[Json] = {"delta": {"role": "assistant", "content": ""}}
    tells_end = False  # whether a stop token has log-probabilities

    def __init__(self, body: Completed, replies: Sequence[Reply]) -> None:
        self._tokenizer, self._body, self._replies = replies[0].tokenizer, body, replies
        self._header = {
            "id": f"{self.prefix}-{uuid.uuid4().hex[:24]}",
            "object": self.chunk if body.stream else self.kind,
            "created": int(time.time()),
            "model": body.model,
        }
        self._bytes = cache(partial(token_bytes, self._tokenizer))
        self._calls: dict[Reply, list[str]] = {}  # that chunks have begun
        for each in replies if body.stream and body.return_drafts else ():
            each.rounds = []
        self._told: Counter[Reply] = Counter()  # characters of tokens that logprobs were told of

    @property
    def ping(self) -> bytes:
        told = progress(self._body, self._replies[0])
        return _event({**self.of(), **told}) if told else b": alive\n\n"

    def part(self, reply: Reply, part: Part) -> bytes:
        begin = self._begin(reply) if part is reply.parts[0] else b""
        told = self.of(self.choice(reply, self.added(reply, part)))
        told |= {"dflash": it} if (it := self._drafts(reply)) else {}
        return begin + _event(told)

    def end(self, reply: Reply) -> bytes:
        begin = self._begin(reply) if not reply.parts else b""
        last = self.of(self.choice(reply, self.added(reply, None), reply.reason))
        if not all(each.reason for each in self._replies):
            return begin + _event(last)
        done = begin + _event({**last, "dflash": {**self._drafts(reply), **figures(self._replies)}})
        options = self._body.stream_options
        if options is not None and options.include_usage:  # without a choice, as clients expect
            done += _event({**self.of(), "usage": self._usage()})
        return done + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return _event(body_of(error, ""))

    def _drafts(self, reply: Reply) -> Json:
        """What was drafted in the rounds that no event has told, where a request asks for it."""
        ends, found = {*self._tokenizer.eos_token_ids}, []
        for delta in reply.rounds or ():
            tree, path = delta.accepted.tree, delta.accepted.path
            names = [source_of(tree, node, delta.statistics.method) for node in path[1:]]
            came = zip([*names, "target"], delta.tokens, strict=False)
            told = [[source, [*self._bytes(t)]] for source, t in came if t not in ends]
            found.append({"drafted": len(tree) - 1, "accepted": len(path) - 1, "tokens": told})
        reply.rounds = reply.rounds and []
        return {"drafts": found} if found else {}

    def _begin(self, reply: Reply) -> bytes:
        """The first chunk of an answer; its tokens are told by the next."""
        none = {"finish_reason": None, "logprobs": None}
        return _event(self.of({"index": reply.index, **self.first, **none})) if self.first else b""

    def whole(self) -> Json:
        best = _best(self._replies, self._body)
        told = (self.choice(r, self.complete(r), r.reason) for r in best)
        every = [{**choice, "index": i} for i, choice in enumerate(told)]
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
        return {"content": told_logprobs(self._tokenizer, found), "refusal": None}

    def of(self, *choices: Json) -> Json:
        """An object with these choices."""
        return {**self._header, "choices": choices}

    def choice(self, reply: Reply, said: Json, reason: str | None = None) -> Json:
        """One of them, with the log-probabilities that no other has told."""
        left_out: set[int] = set()
        if not self.tells_end:
            left_out = {*self._tokenizer.eos_token_ids, *(self._body.stop_token_ids or ())}
        found = [p for p in reply.logprobs if p.token not in left_out]
        reply.logprobs.clear()
        tells = self._body.tops is not None and (found or not self._body.stream)
        told = self.logprobs(reply, found) if tells else None
        return {"index": reply.index, **said, "finish_reason": reason, "logprobs": told}

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
    tells_end = True

    def added(self, reply: Reply, part: Part | None) -> Json:
        return {"text": "" if part is None else part.text}

    def complete(self, reply: Reply) -> Json:
        return {"text": "".join(part.text for part in reply.parts)}

    def logprobs(self, reply: Reply, found: Sequence[TokenLogprobs]) -> Json:
        offsets = []
        for each in found:
            offsets.append(self._told[reply])
            own, told = self._bytes(each.token), reply.parts[0].text if reply.parts else ""
            if each.logprob is not None or told.encode().startswith(own):  # else added to the text
                self._told[reply] += sum(byte & 0xC0 != 0x80 for byte in own)  # not inside of one
        return {
            "tokens": [self._name(each.token) for each in found],
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [self._tops(each) for each in found] if self._body.tops else None,
            "text_offset": offsets,
        }

    def _tops(self, told: TokenLogprobs) -> dict[str, float] | None:
        """The likeliest tokens and the token itself; of those that read alike the likelier."""
        found: dict[str, float] = {}
        if told.logprob is None:
            return None
        for token, logprob in (*told.top, (told.token, told.logprob)):
            found.setdefault(self._name(token), logprob)
        return found

    def _name(self, token: int) -> str:
        """Its text; of a part of a character its bytes, as OpenAI writes them."""
        own = self._bytes(token)
        text = own.decode("utf-8", "replace")
        return text if text.encode() == own else "bytes:" + "".join(f"\\x{b:02x}" for b in own)


def told_logprobs(tokenizer: Any, found: Sequence[TokenLogprobs]) -> list[Json]:
    """Of tokens; of one that is only a part of a character, the bytes say which."""

    @cache
    def named(token: int) -> Json:
        own = token_bytes(tokenizer, token)
        return {"token": own.decode("utf-8", "replace"), "bytes": [*own]}

    def one(token: int, logprob: float | None) -> Json:
        return {**named(token), "logprob": logprob}

    return [{**one(p.token, p.logprob), "top_logprobs": [one(*t) for t in p.top]} for p in found]


def _call(part: Part) -> Json:
    function = {"name": part.name, "arguments": part.text}
    return {"id": part.identity, "type": "function", "function": function}


def _event(value: Json) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"
