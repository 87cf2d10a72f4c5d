"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dflash_mlx.serve.errors import refusal
from dflash_mlx.serve.fields import decoding, only, with_seeds
from dflash_mlx.serve.openai_format import Answer, Writer, chat_logprobs, finish_reason
from dflash_mlx.serve.openai_requests import (
    AssistantMessage,
    ChatRequest,
    Common,
    NamedTool,
    ResponseFormat,
    ToolMessage,
)
from dflash_mlx.serve.prompts import Chat, Message, call_of, check_arguments, check_tools, text_of
from dflash_mlx.serve.reading import Call, Part, Said, Thought
from dflash_mlx.serve.replies import End, Replies, Step, reader_of, unless_gone, write
from dflash_mlx.serve.service import Service
from dflash_mlx.serve.structure import OPENAI, StructureRequest, structure_of, without_thoughts

Json = dict[str, Any]

PREFIX = "chatcmpl"


async def chat(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    replies = await unless_gone(request, _begin(service, body))
    writer = ChatWriter(service, body, len(replies.readers))
    return await write(request, replies, writer, body.stream)


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
    wanted = StructureRequest(_schema(body.response_format), tools, required, one)
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


class ChatWriter(Writer):
    """Writes answers down as messages."""

    def __init__(self, service: Service, body: ChatRequest, answers: int) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(service, body, answers, PREFIX, kind, 1)
        self._wants_logprobs = bool(body.logprobs)

    def take(self, answer: Answer, part: Part) -> Json:
        if isinstance(part, Thought):
            answer.thought += part.text
            return {"reasoning_content": part.text}
        if isinstance(part, Said):
            answer.text += part.text
            return {"content": part.text}
        call = _call(part)
        answer.calls.append(call)
        return {"tool_calls": [{"index": len(answer.calls) - 1, **call}]}

    def chunks(self, step: Step, deltas: list[Json]) -> list[Json]:
        answer = self._answers[step.index]
        if not answer.begun:
            answer.begun = True
            deltas = [{"role": "assistant", "content": ""}, *deltas]
        found = [self._chunk(step.index, delta, None) for delta in deltas]
        if step.end is not None:
            found.append(self._chunk(step.index, {}, finish_reason(step.end)))
        return found

    def choice(self, index: int, end: End) -> Json:
        answer = self._answers[index]
        message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.thought:
            message["reasoning_content"] = answer.thought
        if answer.calls:
            message["tool_calls"] = answer.calls
            message["content"] = answer.text or None
        told = chat_logprobs(answer.logprobs, self.text_of) if self._wants_logprobs else None
        reason = finish_reason(end)
        return {"index": index, "message": message, "finish_reason": reason, "logprobs": told}

    def _chunk(self, index: int, delta: Json, reason: str | None) -> Json:
        choice: Json = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
        found = self._answers[index].logprobs
        if self._wants_logprobs and found and (reason is not None or "role" not in delta):
            choice["logprobs"] = chat_logprobs(found, self.text_of)
            found.clear()
        return self.of([choice])


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.identity, "type": "function", "function": function}
