"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import uuid
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dflash_mlx.serve.anthropic_prompt import chat_of
from dflash_mlx.serve.anthropic_requests import Counted, MessagesRequest
from dflash_mlx.serve.errors import ANTHROPIC, ApiError, as_json, body_of, encoded
from dflash_mlx.serve.fields import decoding
from dflash_mlx.serve.prompts import Prompt, spaced
from dflash_mlx.serve.reading import Call, Part, Said, Thought
from dflash_mlx.serve.replies import (
    TOOLS,
    End,
    Replies,
    Step,
    merged,
    reader_of,
    unless_gone,
    unspaced,
    write,
)
from dflash_mlx.serve.service import Service

Json = dict[str, Any]

_REASONS = {"length": "max_tokens", "context": "max_tokens", TOOLS: "tool_use"}
_NAMES = {"stop": "stop_sequences"}


async def count_tokens(service: Service, body: Counted, request: Request) -> Response:
    """How many tokens a prompt has."""
    prompt = await unless_gone(request, _read(service, body))
    return as_json({"input_tokens": len(prompt.tokens)})


async def messages(service: Service, body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    replies = await unless_gone(request, _begin(service, body))
    writer = BlockWriter(body.model, len(replies.ticket.asked[0].tokens))
    return await write(request, replies, writer, body.stream)


async def _read(service: Service, body: Counted) -> Prompt:
    chat = await service.prepare(lambda: chat_of(service, body))
    return await service.read(chat)


async def _begin(service: Service, body: MessagesRequest) -> Replies:
    chat = await service.prepare(lambda: chat_of(service, body))
    stops = body.stop_sequences or []
    config = decoding(service.usual, body, body.max_tokens, stops, _NAMES, chat.structure)
    prompt = await service.read(chat)
    ticket = await service.ask([prompt], [config], None)
    choice = body.tool_choice
    one_call = bool(choice and choice.disable_parallel_tool_use)
    reader = reader_of(service.pair, chat, prompt, one_call)
    return Replies(ticket, [reader], partial(spaced, service.pair) if chat.go_on else unspaced)


class BlockWriter:
    """Writes one answer down, as blocks. read: how many tokens the prompt has."""

    def __init__(self, model: str, read: int) -> None:
        self._model, self._prompt_tokens = model, read
        self._identity = f"msg_{uuid.uuid4().hex[:24]}"
        self._blocks: list[Json] = []
        self._is_open = False  # the last block, in a stream
        self._end: End | None = None
        self.ping = _event("ping")

    def start(self) -> list[bytes]:
        read = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        start = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": read}
        return [_event("message_start", message=start)]

    def step(self, step: Step) -> list[bytes]:
        self._end = step.end
        return [event for part in step.parts for event in self._parted(part)]

    def end(self) -> list[bytes]:
        assert self._end is not None
        return [
            *self._closed(len(self._blocks) - 1),
            _event("message_delta", delta=_ending(self._end), **_told(self._end)),
            _event("message_stop"),
        ]

    def error(self, error: ApiError) -> bytes:
        return _event("error", **body_of(error, ANTHROPIC))

    def whole(self) -> Json:
        assert self._end is not None
        return {**self._message(self._blocks), **_ending(self._end), **_told(self._end)}

    def _parted(self, part: Part) -> list[bytes]:
        """The events that a part makes."""
        before = len(self._blocks)
        self._take(part)
        index, found = len(self._blocks) - 1, []
        if len(self._blocks) > before:
            found += self._closed(before - 1)
            begun = _EMPTY[type(part)] | {
                key: self._blocks[-1][key] for key in ("id", "name") if key in self._blocks[-1]
            }
            found.append(_event("content_block_start", index=index, content_block=begun))
            self._is_open = True
        found.append(_event("content_block_delta", index=index, delta=_delta(part)))
        return found

    def _closed(self, index: int) -> list[bytes]:
        """The end of the block that is open, if one is."""
        if not self._is_open:
            return []
        self._is_open = False
        found = []
        if self._blocks[index]["type"] == "thinking":
            delta = {"type": "signature_delta", "signature": ""}
            found.append(_event("content_block_delta", index=index, delta=delta))
        return [*found, _event("content_block_stop", index=index)]

    def _take(self, part: Part) -> None:
        """Add a part to the last block, or a new one."""
        if isinstance(part, Call):
            given = json.loads(part.arguments)
            block = {"id": part.identity, "name": part.name, "input": given}
            self._blocks.append({"type": "tool_use", **block})
            return
        kind = "thinking" if isinstance(part, Thought) else "text"
        if not self._blocks or self._blocks[-1]["type"] != kind:
            self._blocks.append(dict(_EMPTY[type(part)]))
        self._blocks[-1][kind] += part.text

    def _message(self, blocks: list[Json]) -> Json:
        start = {"id": self._identity, "type": "message", "role": "assistant"}
        return {**start, "model": self._model, "content": blocks}


_EMPTY: dict[type, Json] = {
    Thought: {"type": "thinking", "thinking": "", "signature": ""},
    Said: {"type": "text", "text": ""},
    Call: {"type": "tool_use", "input": {}},
}


def _delta(part: Part) -> Json:
    if isinstance(part, Call):
        return {"type": "input_json_delta", "partial_json": part.arguments}
    if isinstance(part, Thought):
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "text_delta", "text": part.text}


def _ending(end: End) -> Json:
    """Why the answer ended."""
    if end.stop_text is not None and end.reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_text}
    return {"stop_reason": _REASONS.get(end.reason, "end_turn"), "stop_sequence": None}


def _told(end: End) -> Json:
    """Tokens and figures; tokens that caches held are no `input_tokens`."""
    s = end.statistics
    usage = {
        "input_tokens": s.prompt_tokens - s.reused_tokens,
        "output_tokens": s.generated_tokens,
        "cache_read_input_tokens": s.reused_tokens,
        "cache_creation_input_tokens": 0,
    }
    return {"usage": usage, "dflash": merged([end])}


def _event(kind: str, **values: Any) -> bytes:
    body = encoded({"type": kind, **values})
    return f"event: {kind}\ndata: ".encode() + body + b"\n\n"
