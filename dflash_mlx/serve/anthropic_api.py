"""Anthropic's API: its requests, as far as docs/serve.md says, and answers in its words."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from dflash_mlx.core.statistics import Statistics
from dflash_mlx.serve.chat import Chat, Fields, Json, call_of, text_of
from dflash_mlx.serve.errors import ANTHROPIC, ApiError, as_json, body_of, event, refusal
from dflash_mlx.serve.fields import Budget, ChatBody, Conversation, Stops, Strict
from dflash_mlx.serve.openai_requests import Format, Function, wanted
from dflash_mlx.serve.pictures import AnyShown, Shown
from dflash_mlx.serve.request_queue import TOOLS, Reply
from dflash_mlx.serve.service import Writer, converse, count, figures, progress
from dflash_mlx.session.calls import CALL, THOUGHT, WORDS, Part

_FORM = "output_config.format"
FIELDS = Fields(_FORM, f"{_FORM}.schema", tool="tools[{}].", parameters="input_schema")
_FUNCTION = {*Function.model_fields}


class Cached(Strict):
    """What may ask to be kept; caches here keep what they can without being asked."""

    cache_control: Json | None = None


class Text(Cached):
    """A text."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class Thinking(Strict):
    """What the model thought before."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUse(Cached):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Json
    caller: Json | None = None


class ToolResult(Cached):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[Text | AnyShown, Field(discriminator="type")]] | None = None
    is_error: bool | None = None


Block = Annotated[Text | AnyShown | Thinking | ToolUse | ToolResult, Field(discriminator="type")]
_OF_ROLE = {Thinking: "assistant", ToolUse: "assistant", ToolResult: "user"}


class Message(Strict):
    """What somebody says, with thoughts and calls of the model, or what tools answered."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Cached, Function):
    """A tool that the model may use."""

    parameters: Annotated[Json, Field(alias="input_schema")]
    type: Literal["custom"] | None = None


class ToolChoice(Strict):
    """Whether and which tool is to be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Strict):
    """What the answer has to be."""

    effort: str | None = None
    format: Format | None = None


class Counted(Conversation):
    """What the number of a prompt's tokens depends on: the body of .../count_tokens."""

    messages: Annotated[list[Message], Field(min_length=1)]
    system: str | list[Text] | None = None
    tools: Annotated[list[Tool], Field(max_length=1000)] | None = None
    tool_choice: ToolChoice | None = None
    context_management: dict[Literal["edits"], list[Json]] | None = None
    output_config: OutputConfig | None = None
    cache_control: Json | None = None

    def idle(self) -> list[str]:
        edits = (self.context_management or {}).get("edits", [])
        asking = (i for i, edit in enumerate(edits) if edit.get("keep") != "all")
        return [f"context_management.edits[{i}]" for i in asking]

    def chat(self) -> Chat:
        messages = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        for i, each in enumerate(self.messages):
            messages += _told(each, f"messages[{i}]")
        go_on = self.messages[-1].role == "assistant"
        if go_on and messages[-1].get("tool_calls"):
            step = "send the result after its call"
            raise refusal("messages", "end with a call of a tool", step)
        choice, output = self.tool_choice or ToolChoice(type="auto"), self.output_config
        if choice.type == "tool" and not choice.name:
            raise refusal("tool_choice", "of type tool names none", "send its name")
        tools = [each.model_dump(include=_FUNCTION, exclude_none=True) for each in self.tools or []]
        return Chat(
            FIELDS,
            messages,
            [{"type": "function", "function": each} for each in tools if choice.type != "none"],
            {"any": "", "tool": choice.name}.get(choice.type),
            bool(choice.disable_parallel_tool_use),
            *wanted(None if output is None else output.format, FIELDS.schema),
            go_on=go_on,
        )


def _told(message: Message, place: str) -> list[Json]:
    """As chat templates read it; what tools answered comes first."""
    role, content = message.role, message.content
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    for i, block in enumerate(content):
        if (other := _OF_ROLE.get(type(block), role)) != role:
            what = f"is {block.type}, which the {role} does not send"
            raise refusal(f"{place}.content[{i}].type", what, f"send it as the {other}")
    found = [_result(block) for block in content if isinstance(block, ToolResult)]
    texts = [block for block in content if isinstance(block, Text | Shown)]
    if texts or not found:
        found.append({"role": role, "content": text_of(texts)})
    if thoughts := [block.thinking for block in content if isinstance(block, Thinking)]:
        found[-1]["reasoning_content"] = "".join(thoughts)
    if calls := [block for block in content if isinstance(block, ToolUse)]:
        found[-1]["tool_calls"] = [call_of(call.name, call.input, call.id) for call in calls]
    return found


def _result(block: ToolResult) -> Json:
    """Templates know nothing of errors, so the words say that it is one."""
    told = ("Error: " if block.is_error else "") + text_of(block.content)
    return {"role": "tool", "content": told, "tool_call_id": block.tool_use_id}


class MessagesRequest(Counted, ChatBody):
    """The body of POST /v1/messages."""

    stop_field = "stop_sequences"

    max_tokens: Budget  # in this API a request has to say it; 0 has the prompt read for later
    stop_sequences: Stops | None = None
    metadata: dict[Literal["user_id"], str | None] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


_REASONS = {"length": "max_tokens", TOOLS: "tool_use"}
_DELTAS = {  # by the kind of a part: what adds it to its block, and under which key
    WORDS: ("text_delta", "text"),
    THOUGHT: ("thinking_delta", "thinking"),
    CALL: ("input_json_delta", "partial_json"),
}


async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    return await converse(request, body, BlockWriter)


async def count_tokens(body: Counted, request: Request) -> Response:
    """How many tokens a prompt has."""
    return as_json(await count(request, body))


class BlockWriter(Writer):
    """Writes one answer down, as blocks."""

    def __init__(self, body: MessagesRequest, replies: Sequence[Reply]) -> None:
        (self._reply,) = replies
        head = {"id": f"msg_{uuid.uuid4().hex[:24]}", "type": "message", "role": "assistant"}
        self._head = {**head, "model": body.model}
        self._body = body
        # The last block of a stream; its kind or call if it is open; whether there was an event.
        self._index, self._open, self._begun = -1, "", False

    @property
    def ping(self) -> bytes:
        return self._begin() + event("ping", **progress(self._body, self._reply))

    def _begin(self) -> bytes:
        """The first event, once: with the first part or ping, what caches hold is known."""
        if self._begun:
            return b""
        self._begun = True
        usage = {**_usage(self._reply.statistics), "output_tokens": 0}
        empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
        return event("message_start", message={**self._head, **empty, "usage": usage})

    def part(self, reply: Reply, part: Part) -> bytes:
        begin = self._begin()
        if (part.identity or part.kind) != self._open:
            begin, block = begin + self._close(), _block(replace(part, text=""))
            self._index, self._open = self._index + 1, part.identity or part.kind
            begin += event("content_block_start", index=self._index, content_block=block)
        kind, key = _DELTAS[part.kind]
        return begin + self._add({"type": kind, key: part.text})

    def end(self, reply: Reply) -> bytes:
        ending = event("message_delta", delta=self._ending(), **self._told())
        return self._begin() + self._close() + ending + event("message_stop")

    def error(self, error: ApiError) -> bytes:
        return event("error", **body_of(error, ANTHROPIC))

    def whole(self) -> Json:
        runs = groupby(self._reply.parts, lambda part: part.identity or part.kind)
        each = [[*parts] for _, parts in runs]
        blocks = [_block(replace(run[0], text="".join(p.text for p in run))) for run in each]
        return {**self._head, "content": blocks, **self._ending(), **self._told()}

    def _add(self, delta: Json) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        """The end of the block that is open, if one is."""
        kind, self._open = self._open, ""
        if not kind:
            return b""
        signed = self._add({"type": "signature_delta", "signature": ""}) if kind == THOUGHT else b""
        return signed + event("content_block_stop", index=self._index)

    def _ending(self) -> Json:
        """Why the answer ended."""
        reason, stop_text = self._reply.reason, self._reply.stop_text
        if stop_text is not None and reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_text}
        return {"stop_reason": _REASONS.get(reason, "end_turn"), "stop_sequence": None}

    def _told(self) -> Json:
        """Tokens and figures."""
        thought = {"thinking_tokens": self._reply.reader.thoughts.tokens}
        usage = {**_usage(self._reply.statistics), "output_tokens_details": thought}
        return {"usage": usage, "dflash": figures([self._reply])}


def _usage(s: Statistics) -> Json:
    """Tokens; those of the prompt that caches held are no `input_tokens`."""
    return {
        "input_tokens": s.prompt_tokens - s.reused_tokens,
        "output_tokens": s.generated_tokens,
        "cache_read_input_tokens": s.reused_tokens,
        "cache_creation_input_tokens": 0,
    }


def _block(part: Part) -> Json:
    if part.kind == CALL:
        given = json.loads(part.text or "{}")
        return {"type": "tool_use", "id": part.identity, "name": part.name, "input": given}
    if part.kind == THOUGHT:
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}
