"""Anthropic's messages: their paths, and answers in their words."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from starlette.requests import Request
from starlette.responses import Response

from dflash_mlx.core.statistics import Statistics
from dflash_mlx.serve.anthropic_requests import Counted, MessagesRequest
from dflash_mlx.serve.chat import Json
from dflash_mlx.serve.errors import ANTHROPIC, ApiError, as_json, body_of, event
from dflash_mlx.serve.request_queue import TOOLS, Reply
from dflash_mlx.serve.service import Writer, converse, count, figures, progress
from dflash_mlx.session.calls import CALL, THOUGHT, WORDS, Part

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
