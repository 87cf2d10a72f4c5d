"""OpenAI's responses: their paths, and answers as items."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dflash_mlx.serve.calls import CALL, THOUGHT, WORDS, Part
from dflash_mlx.serve.chat import TOO_LONG, Json
from dflash_mlx.serve.errors import ApiError, as_json, encoded
from dflash_mlx.serve.kept import Kept
from dflash_mlx.serve.request_queue import Reply
from dflash_mlx.serve.responses_requests import ITEMS, ResponsesRequest
from dflash_mlx.serve.service import EventStream, Service, converse, figures

_CUT = ("length", "context")  # reasons of an answer that is not complete
_EVENTS = {  # by the kind of a part: its deltas, the prefix of its item's id
    WORDS: ("output_text", "msg"),
    THOUGHT: ("reasoning_text", "rs"),
    CALL: ("function_call_arguments", "fc"),
}
_ECHOED = ("instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p")


async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    service, owner = request.app.state.service, _owner(request)
    shelf, name = service.shelf, body.previous_response_id
    kept = shelf.get(owner, name, "previous_response_id").items if name is not None else b"[]"
    referred = {each: shelf.item(owner, each) for each in body.references}
    body.complete(ITEMS.validate_python(json.loads(kept)), referred)
    try:
        return await converse(request, body, partial(ItemWriter, owner))
    except ApiError as error:
        if not body.stream or error.code != TOO_LONG:
            raise
        writer = ItemWriter(owner, service, body, [Reply((), service.usual)])
        said = writer.start() + writer.error(error)  # where Codex looks for it
        return Response(said, media_type=EventStream.media_type)


async def response(name: str, request: Request) -> Response:
    """A response that is kept."""
    kept = request.app.state.service.shelf.get(_owner(request), name)
    return Response(kept.response, media_type="application/json")


async def forget(name: str, request: Request) -> Response:
    """Keep a response no longer."""
    request.app.state.service.shelf.drop(_owner(request), name)
    return as_json({"id": name, "object": "response", "deleted": True})


def _owner(request: Request) -> str:
    """Who asks, by the key that was sent, which is not kept itself."""
    sent = request.headers.get("authorization", ""), request.headers.get("x-api-key", "")
    return sha256("\n".join(sent).encode("utf-8", "replace")).hexdigest()


class ItemWriter:
    """Writes one answer down, as items."""

    def __init__(
        self, owner: str, service: Service, body: ResponsesRequest, replies: Sequence[Reply]
    ) -> None:
        (self._reply,) = replies
        self._owner, self._service, self._body = owner, service, body
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model,
            **_echo(body),
        }
        self._items: list[Json] = []  # of the answer so far
        self._kind, self._number = "", 0  # of the item that is open, "" for none; of events

    @property
    def ping(self) -> bytes:
        """An event, as Codex does not take comments for a sign of life."""
        return self._event("response.in_progress", response=self._object("in_progress"))

    def start(self) -> bytes:
        return self._event("response.created", response=self._object("in_progress")) + self.ping

    def part(self, reply: Reply, part: Part) -> bytes:
        goes_on = part.kind == self._kind
        if goes_on and part.kind == CALL:
            goes_on = self._items[-1]["call_id"] == part.identity
        begin = b"" if goes_on else self._close("completed") + self._open(part)
        item = self._items[-1]
        if part.kind == CALL:
            item["arguments"] += part.text
        else:
            item["content"][0]["text"] += part.text
        more: Json = {"logprobs": []} if part.kind == WORDS else {}
        return begin + self._said("delta", delta=part.text, **more)

    def end(self, reply: Reply) -> bytes:
        status = "incomplete" if reply.reason in _CUT else "completed"
        last = self._close(status)
        return last + self._event(f"response.{status}", response=self._finished(status))

    def error(self, error: ApiError) -> bytes:
        usual = "rate_limit_exceeded" if error.status_code == 429 else "server_error"
        last = self._close("incomplete")
        told = {"error": {"code": error.code or usual, "message": error.detail}}
        return last + self._event("response.failed", response=self._object("failed") | told)

    def whole(self) -> Json:
        for part in self._reply.parts:
            self.part(self._reply, part)
        status = "incomplete" if self._reply.reason in _CUT else "completed"
        self._close(status)
        return self._finished(status)

    def _open(self, part: Part) -> bytes:
        """The beginning of another item."""
        self._kind = part.kind
        said, prefix = _EVENTS[part.kind]
        item: Json = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress"}
        if part.kind == CALL:
            item |= {"type": "function_call", "call_id": part.identity, "name": part.name}
            self._items.append({**item, "arguments": ""})
            return self._item("added")
        if part.kind == WORDS:
            item |= {"type": "message", "role": "assistant", "content": []}
        else:
            item |= {"type": "reasoning", "summary": [], "content": []}
        self._items.append(item)
        begin = self._item("added")
        own: Json = {"annotations": [], "logprobs": []} if part.kind == WORDS else {}
        item["content"].append({"type": said, "text": "", **own})
        return begin + self._content("added")

    def _close(self, status: str) -> bytes:
        """The end of the item that is open, if one is."""
        if not self._kind:
            return b""
        item, kind = self._items[-1], self._kind
        if kind == CALL:
            done = self._said("done", arguments=item["arguments"], name=item["name"])
        else:
            more: Json = {"logprobs": []} if kind == WORDS else {}
            done = self._said("done", text=item["content"][0]["text"], **more)
            done += self._content("done")
        item["status"], self._kind = status, ""
        return done + self._item("done")

    def _said(self, what: str, **values: Any) -> bytes:
        """An event about the text of the item."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        place |= {"content_index": 0} if self._kind != CALL else {}
        return self._event(f"response.{_EVENTS[self._kind][0]}.{what}", **place, **values)

    def _content(self, what: str) -> bytes:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        part = self._items[-1]["content"][0]
        return self._event(f"response.content_part.{what}", **place, content_index=0, part=part)

    def _item(self, what: str) -> bytes:
        place = {"output_index": len(self._items) - 1, "item": self._items[-1]}
        return self._event(f"response.output_item.{what}", **place)

    def _event(self, kind: str, **values: Any) -> bytes:
        body = encoded({"type": kind, "sequence_number": self._number, **values})
        self._number += 1
        return f"event: {kind}\ndata: ".encode() + body + b"\n\n"

    def _object(self, status: str) -> Json:
        """The response as it is by now."""
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        told = {"status": status, "error": None, "incomplete_details": cut}
        return {**self._head, **told, "output": self._items, "usage": None}

    def _finished(self, status: str) -> Json:
        """The response in the end, which is kept where that is wanted."""
        ended = {"completed_at": int(time.time())} if status == "completed" else {}
        found = {
            **self._object(status),
            **ended,
            "usage": self._usage(),
            "dflash": figures([self._reply]),
        }
        if self._body.store is not False:
            items = [*ITEMS.dump_python(self._body.items), *self._items]
            kept = Kept(encoded(found), encoded(items), self._items)
            self._service.shelf.put(self._owner, self._head["id"], kept)
        return found

    def _usage(self) -> Json:
        s, thinking = self._reply.statistics, self._reply.reader.thoughts.tokens
        cached = {"cached_tokens": s.reused_tokens, "cache_write_tokens": 0}
        return {
            "input_tokens": s.prompt_tokens,
            "input_tokens_details": cached,
            "output_tokens": s.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": thinking},
            "total_tokens": s.prompt_tokens + s.generated_tokens,
        }


def _echo(body: ResponsesRequest) -> Json:
    """Fields of the request that its response has, too."""
    found = body.model_dump(include={*_ECHOED, "metadata", "tools", "tool_choice"}, by_alias=True)
    form = body.text.format if body.text is not None else None
    told = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    tools = [tool.model_dump() for tool in body.tools or [] if tool.type == "function"]
    return {
        **found,
        "metadata": body.metadata or {},
        "tools": tools,
        "tool_choice": found["tool_choice"] or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "store": body.store is not False,
        "background": False,
        "truncation": "disabled",
        "text": {"format": told},
    }
