"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dflash_mlx.engine.logprobs import TokenLogprobs
from dflash_mlx.serve.errors import refusal
from dflash_mlx.serve.fields import decoding, only, with_seeds
from dflash_mlx.serve.openai_format import (
    Header,
    chat_logprobs,
    events,
    finish_reason,
    totals,
)
from dflash_mlx.serve.openai_requests import (
    AssistantMessage,
    ChatRequest,
    Common,
    Content,
    NamedTool,
    ResponseFormat,
    ToolMessage,
)
from dflash_mlx.serve.prompts import Chat, Message, call_of, check_arguments, check_tools
from dflash_mlx.serve.reading import Call, Part, Said, Thought
from dflash_mlx.serve.replies import End, Replies, Step, reader_of, respond, unless_gone
from dflash_mlx.serve.service import Service
from dflash_mlx.serve.structure import OPENAI, Wanted, structure_of, without_thoughts

Json = dict[str, Any]

PREFIX = "chatcmpl"


async def chat(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    replies = await unless_gone(request, _begin(service, body))
    writer = Writer(service, body, replies)
    streamed = events(replies, writer.chunks, writer.last_chunks) if body.stream else None
    return await respond(request, replies, streamed, writer.whole)


async def _begin(service: Service, body: ChatRequest) -> Replies:
    service.check_model(body.model)
    check_common(body)
    _check(body, service.config.messages)
    asked = await service.prepare(lambda: _chat_of(service, body))
    most = body.max_tokens or body.max_completion_tokens
    names = {"max_tokens": "max_completion_tokens" if body.max_completion_tokens else "max_tokens"}
    config = decoding(service.usual, body, most, stops_of(body), names, asked.structure)
    prompt = await service.read(asked)
    tops = (body.top_logprobs or 0) if body.logprobs else None
    ticket = await service.ask([prompt], with_seeds(config, body.n or 1), tops)
    one_call = body.parallel_tool_calls is False
    readers = [reader_of(service.pair, asked, prompt, one_call) for _ in ticket.asked]
    return Replies(ticket, readers)


def check_common(body: Common) -> None:
    """ApiError for fields of both kinds of completions that cannot be honoured."""
    only("frequency_penalty", body.frequency_penalty, 0)
    only("presence_penalty", body.presence_penalty, 0)
    only("logit_bias", body.logit_bias, {})
    if body.stream_options is not None and not body.stream:
        raise refusal("stream_options", "is for streams", "leave it out, or send stream: true")


def stops_of(body: Common) -> list[str]:
    """The stop texts, one or several."""
    return [body.stop] if isinstance(body.stop, str) else body.stop or []


def _check(body: ChatRequest, messages: int) -> None:
    if (number := len(body.messages)) > messages:
        raise refusal("messages", f"are {number}, and {messages} may be", "send fewer")
    both = body.max_tokens, body.max_completion_tokens
    if None not in both and both[0] != both[1]:
        step = "send one of them"
        raise refusal("max_tokens", f"is {both[0]}, but max_completion_tokens {both[1]}", step)
    if body.top_logprobs and not body.logprobs:
        raise refusal("top_logprobs", "is for logprobs: true", "send that, too, or leave it out")
    if body.tool_choice not in (None, "none", "auto") and not body.tools:
        raise refusal("tool_choice", "is given without tools", "leave it out, or send tools")
    only("modalities", body.modalities, ["text"])
    only("store", body.store, False)
    only("service_tier", body.service_tier, "auto", "default")


def _chat_of(service: Service, body: ChatRequest) -> Chat:
    """The conversation of a request; ApiError for what the model or this server cannot do."""
    pair, arguments = service.pair, _arguments(service, body)
    tools = [each.model_dump(exclude_none=True) for each in body.tools or []]
    tools = [] if body.tool_choice == "none" else tools
    if tools:
        check_tools(pair)
    required, one = _required(body), body.parallel_tool_calls is False
    wanted = Wanted(_schema(body.response_format), tools, required, one)
    if wanted.asks:
        fields = {"reasoning_effort": "reasoning_effort"} if body.reasoning_effort else {}
        arguments = without_thoughts(pair, arguments, fields)
    structure = structure_of(pair, wanted, OPENAI)
    messages = [_message(each) for each in body.messages]
    return Chat(messages, wanted.told, arguments, structure=structure)


def _required(body: ChatRequest) -> str | None:
    """The tool that has to be called, "" for any."""
    if isinstance(body.tool_choice, NamedTool):
        return body.tool_choice.function.name
    return "" if body.tool_choice == "required" else None


def _schema(wanted: ResponseFormat | None) -> Json | None:
    """The schema that an answer has to follow."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None:
        raise refusal("response_format.json_schema", "is missing", "send it")
    given = wanted.json_schema.schema_
    return {"type": "object"} if given is None else given


def _arguments(service: Service, body: ChatRequest) -> Json:
    """Arguments of the chat template; `reasoning_effort` is one of them where it is read."""
    given = body.chat_template_kwargs or {}
    check_arguments(service.pair, given, "chat_template_kwargs")
    if body.reasoning_effort is None:
        return given
    check_arguments(service.pair, {"reasoning_effort": 0}, "chat_template_kwargs")
    return {"reasoning_effort": body.reasoning_effort, **given}


def _message(message: Any) -> Message:
    """As chat templates read it."""
    role = "system" if message.role == "developer" else message.role
    found: Message = {"role": role, "content": text_of(message.content)}
    if message.name is not None:
        found["name"] = message.name
    if isinstance(message, ToolMessage):
        found["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.reasoning_content is not None:
            found["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            calls = [(each.function, each.id) for each in message.tool_calls]
            found["tool_calls"] = [call_of(f.name, f.arguments, key) for f, key in calls]
    return found


def text_of(content: Content | None) -> str:
    """The text of a message, whose parts follow each other without anything between them."""
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


@dataclass
class _Choice:
    """What one answer has said so far."""

    thought: str = ""
    text: str = ""
    calls: list[Json] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    begun: bool = False


class Writer:
    """Writes the answers of one request down."""

    def __init__(self, service: Service, body: ChatRequest, replies: Replies) -> None:
        self._tokenizer = service.pair.tokenizer
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._header = Header(PREFIX, kind, body.model)
        self._ends: dict[int, End] = {}
        self._replies, self._wants_logprobs = replies, bool(body.logprobs)
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._choices = [_Choice() for _ in replies.readers]

    async def whole(self) -> Json:
        """The response as one object."""
        async for step in self._replies.steps():
            if step is not None:
                self._take(step)
        choices = [self._choice(i, self._ends[i]) for i in range(len(self._choices))]
        return {**self._header.of(choices), **totals(self._ends, 1)}

    def chunks(self, step: Step) -> list[Json]:
        """The chunks of a stream that a step makes."""
        choice, deltas = self._choices[step.index], []
        if not choice.begun:
            choice.begun = True
            deltas.append({"role": "assistant", "content": ""})
        choice.logprobs += self._own(step.logprobs)
        deltas += [self._delta(choice, part) for part in step.parts]
        found = [self._chunk(step.index, delta, None) for delta in deltas]
        if step.end is not None:
            self._ends[step.index] = step.end
            found.append(self._chunk(step.index, {}, finish_reason(step.end)))
            if len(self._ends) == len(self._choices):
                found[-1]["dflash"] = totals(self._ends, 1)["dflash"]
        return found

    def last_chunks(self) -> list[Json]:
        """The chunk with the usage, where that was asked for: many clients expect a choice."""
        if not self._usage:
            return []
        return [{**self._header.of([]), "usage": totals(self._ends, 1)["usage"]}]

    def _take(self, step: Step) -> None:
        choice = self._choices[step.index]
        choice.logprobs += self._own(step.logprobs)
        for part in step.parts:
            self._delta(choice, part)
        if step.end is not None:
            self._ends[step.index] = step.end

    def _delta(self, choice: _Choice, part: Part) -> Json:
        """What a part adds, kept and as the delta of a chunk."""
        if isinstance(part, Thought):
            choice.thought += part.text
            return {"reasoning_content": part.text}
        if isinstance(part, Said):
            choice.text += part.text
            return {"content": part.text}
        call = _call(part)
        choice.calls.append(call)
        return {"tool_calls": [{"index": len(choice.calls) - 1, **call}]}

    def _own(self, logprobs: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        """Without a stop token, which is no part of the answer."""
        return [each for each in logprobs if each.token not in self._tokenizer.eos_token_ids]

    def _chunk(self, index: int, delta: Json, reason: str | None) -> Json:
        choice: Json = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
        logprobs = self._choices[index].logprobs
        if self._wants_logprobs and logprobs and (reason is not None or "role" not in delta):
            choice["logprobs"] = self._logprobs(logprobs)
            logprobs.clear()
        return self._header.of([choice])

    def _choice(self, index: int, end: End) -> Json:
        choice = self._choices[index]
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.thought:
            message["reasoning_content"] = choice.thought
        if choice.calls:
            message["tool_calls"] = choice.calls
            message["content"] = choice.text or None
        logprobs = self._logprobs(choice.logprobs) if self._wants_logprobs else None
        reason = finish_reason(end)
        return {"index": index, "message": message, "finish_reason": reason, "logprobs": logprobs}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> Json:
        return chat_logprobs(logprobs, lambda token: str(self._tokenizer.decode([token])))


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.identity, "type": "function", "function": function}
