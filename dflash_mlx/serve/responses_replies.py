"""OpenAI's responses: their paths, and answers as items."""

from __future__ import annotations

import json
import time
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dflash_mlx.serve.chat import TOO_LONG, Json
from dflash_mlx.serve.errors import ApiError, as_json, encoded, event
from dflash_mlx.serve.kept import Kept, Shelf
from dflash_mlx.serve.openai_replies import told_logprobs
from dflash_mlx.serve.request_queue import Reply
from dflash_mlx.serve.responses_requests import INPUT, ITEMS, KNOWN, ResponsesRequest
from dflash_mlx.serve.service import Service, Writer, converse, count, figures, progress
from dflash_mlx.session.calls import CALL, THOUGHT, WORDS, Part

_SUMMARY, _CUSTOM = "summary", "custom"  # a thought and a call, where a request has asked so
# Of items: the prefix of ids, the type, the key of the text, and what the part is that it is in.
_FORMS: dict[str, tuple[str, str, str, str]] = {
    WORDS: ("msg", "message", "content", "output_text"),
    THOUGHT: ("rs", "reasoning", "content", "reasoning_text"),
    _SUMMARY: ("rs", "reasoning", _SUMMARY, "summary_text"),
    CALL: ("fc", "function_call", "arguments", ""),
    _CUSTOM: ("ctc", "custom_tool_call", INPUT, ""),
}
_ECHOED = {
    *("instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p"),
    *("top_logprobs", "reasoning", "user", "safety_identifier", "prompt_cache_key"),
}


async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    service: Service = request.app.state.service
    make = partial(ItemWriter, service.shelf, _owner(request))
    _complete(body, request)
    try:
        return await converse(request, body, make)
    except ApiError as error:
        if not body.stream or error.code != TOO_LONG:
            raise
        writer = make(body, [Reply((), service.usual)])
        said = writer.start() + writer.error(error)  # where Codex looks for it
        return Response(said, media_type=body.media)


async def input_tokens(body: ResponsesRequest, request: Request) -> Response:
    """How many tokens a prompt has."""
    _complete(body, request)
    return as_json({"object": "response.input_tokens", **await count(request, body)})


def _complete(body: ResponsesRequest, request: Request) -> None:
    """Put in what it names of responses that are kept."""
    shelf, owner = request.app.state.service.shelf, _owner(request)
    name, field = body.previous_response_id, "previous_response_id"
    before: list[Json] = []
    if name is not None:
        kept = shelf.get(owner, name, field)
        before = [*json.loads(kept.before), *kept.output]
    body.complete(before, partial(shelf.item, owner))


async def input_items(name: str, request: Request, order: str = "desc") -> Response:
    """The conversation before a response, all of it at once."""
    before = json.loads(request.app.state.service.shelf.get(_owner(request), name).before)
    found = [{**each, "id": f"item_{i}_{name[5:]}"} for i, each in enumerate(before)]
    for each in found:
        if isinstance(text := each.get("content"), str):
            kind = "output_text" if each["role"] == "assistant" else "input_text"
            each["content"] = [{"type": kind, "text": text}]
    found = found if order == "asc" else found[::-1]
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"], "has_more": False}
    return as_json({"object": "list", "data": found, **ends})


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


class ItemWriter(Writer):
    """Writes one answer down, as items."""

    def __init__(
        self, shelf: Shelf, owner: str, body: ResponsesRequest, replies: Sequence[Reply]
    ) -> None:
        (self._reply,) = replies
        self._keep, self._body = partial(shelf.put, owner), body
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model,
            **_echo(body),
        }
        self._items: list[Json] = []  # of the answer so far
        self._number = 0  # of events
        self._parts = self._told = 0  # of the answer, and tokens whose log-probabilities are told
        # Which part or call is open, "" for none, its form, and the text of a call.
        self._open, self._form, self._arguments = "", _FORMS[WORDS], ""

    @property
    def ping(self) -> bytes:
        """An event, as Codex does not take comments for a sign of life."""
        now = self._object("in_progress") | progress(self._body, self._reply)
        return self._event("response.in_progress", response=now)

    def start(self) -> bytes:
        return self._event("response.created", response=self._object("in_progress")) + self.ping

    def part(self, reply: Reply, part: Part) -> bytes:
        self._parts += 1
        goes_on = (part.identity or part.kind) == self._open
        begin = b"" if goes_on else self._close("completed") + self._begin(part)
        holder, key, added, more = self._items[-1], self._form[2], part.text, dict[str, Any]()
        if part.kind == CALL:
            self._arguments += added
            added = self._input()[len(holder[key]) :] if key == INPUT else added
        else:
            holder, key = holder[key][0], "text"
            if part.kind == WORDS:
                more = {"logprobs": self._logprobs(added, goes_on)}
                holder["logprobs"] += more["logprobs"]
        holder[key] += added
        return begin + (self._said("delta", delta=added, **more) if added else b"")

    def end(self, reply: Reply) -> bytes:
        last = self._close(self._status)
        found = self._finished(self._status)
        return last + self._event(f"response.{self._status}", response=found)

    @property
    def _status(self) -> str:
        """Of an answer that is over."""
        return "incomplete" if self._reply.reason == "length" else "completed"

    def error(self, error: ApiError) -> bytes:
        usual = "rate_limit_exceeded" if error.status_code == 429 else "server_error"
        last = self._close("incomplete")
        told = {"error": {"code": error.code or usual, "message": error.detail}}
        return last + self._event("response.failed", response=self._object("failed") | told)

    def whole(self) -> Json:
        for part in self._reply.parts:
            self.part(self._reply, part)
        self._close(self._status)
        return self._finished(self._status)

    def _begin(self, part: Part) -> bytes:
        """The beginning of another item."""
        tool, reasoning = self._body.named.get(part.name), self._body.reasoning
        kind = _CUSTOM if tool is not None and tool.type == _CUSTOM else part.kind
        if kind == THOUGHT and reasoning is not None and reasoning.summary:
            kind = _SUMMARY
        self._open, self._form, self._arguments = part.identity or part.kind, _FORMS[kind], ""
        prefix, of_type, key, in_part = self._form
        item: Json = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": of_type}
        item |= {"role": "assistant"} if part.kind == WORDS else {}
        item |= {"summary": []} if part.kind == THOUGHT else {}
        if part.kind == CALL:
            item |= {"call_id": part.identity, "name": part.name if tool is None else tool.name}
            item |= {"namespace": tool.namespace} if tool is not None and tool.namespace else {}
        self._items.append({**item, "status": "in_progress", key: [] if in_part else ""})
        begin = self._placed("output_item.added", item=self._items[-1])
        if not in_part:
            return begin
        own: Json = {"annotations": [], "logprobs": []} if part.kind == WORDS else {}
        self._items[-1][key].append({"type": in_part, "text": "", **own})
        return begin + self._said("added", part=self._items[-1][key][0])

    def _close(self, status: str) -> bytes:
        """The end of the item that is open, if one is."""
        if not self._open:
            return b""
        item, key, self._open = self._items[-1], self._form[2], ""
        if self._form[3]:
            part = item[key][0]
            told = {name: part[name] for name in ("text", "logprobs") if name in part}
            done = self._said("done", **told) + self._said("done", part=part)
        else:
            done = self._said("done", **{name: item[name] for name in (key, "name")})
        item["status"] = status
        return done + self._placed("output_item.done", item=item)

    def _input(self) -> str:
        """What a custom tool is sent, by now: a string in the arguments that the model writes."""
        for end in ("", '"}'):
            with suppress(ValueError, LookupError, TypeError, RecursionError):
                text = str(json.loads(self._arguments + end)[INPUT])
                return text[:-1] if end and "\ud800" <= text[-1:] <= "\udbff" else text
        return str(self._items[-1][INPUT])

    def _logprobs(self, text: str, goes_on: bool) -> list[Json]:
        """Those of the tokens that a text came of, the last by then; none of marks before it."""
        until = self._reply.until[self._parts - 1]
        tokenizer, found = self._reply.tokenizer, self._reply.logprobs[self._told : until]
        if not found or not (text := text.strip()):
            return []

        def read(tokens: int) -> str:
            return str(tokenizer.decode([each.token for each in found[:tokens]])) if tokens else ""

        whole, number = read(len(found)), range(len(found))
        at = max(0, whole.find(text) if goes_on else whole.rfind(text))
        end = bisect_left(number, at + len(text), key=lambda tokens: len(read(tokens)))
        begin = bisect_right(number[:end], at, key=lambda tokens: len(read(tokens + 1)))
        self._told += end
        return told_logprobs(tokenizer, found[0 if goes_on else begin : end])

    def _said(self, what: str, **values: Any) -> bytes:
        """An event about the text of the item, or about the `part` that it is in."""
        _, of_type, key, in_part = self._form
        name = f"{key}_part" if "part" in values else in_part or f"{of_type}_{key}"
        name = f"reasoning_{name}" if key == _SUMMARY else name
        place = {"item_id": self._items[-1]["id"], **({f"{key}_index": 0} if in_part else {})}
        return self._placed(f"{name}.{what}", **place, **values)

    def _placed(self, kind: str, **values: Any) -> bytes:
        return self._event(f"response.{kind}", output_index=len(self._items) - 1, **values)

    def _event(self, kind: str, **values: Any) -> bytes:
        self._number += 1
        return event(kind, sequence_number=self._number - 1, **values)

    def _object(self, status: str) -> Json:
        """The response as it is by now."""
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        told = {"status": status, "error": None, "incomplete_details": cut}
        return {**self._head, **told, "output": self._items, "usage": None}

    def _finished(self, status: str) -> Json:
        """The response in the end, which is kept where that is wanted."""
        found = self._object(status) | {"usage": self._usage(), "dflash": figures([self._reply])}
        found |= {"completed_at": int(time.time())} if status == "completed" else {}
        if self._body.store is not False:
            before = encoded(ITEMS.dump_python(self._body.items, exclude_none=True))
            kept = Kept(encoded(found), before, self._items)
            self._keep(self._head["id"], kept)
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
    form = body.text.format if body.text is not None else None
    told = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    return {
        **body.model_dump(include=_ECHOED),
        "metadata": body.metadata or {},
        "tools": [t.model_dump(exclude_none=True) for t in body.tools or [] if t.type in KNOWN],
        "tool_choice": body.model_dump(exclude_none=True).get("tool_choice", "auto"),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "store": body.store is not False,
        "background": False,
        "truncation": "disabled",
        "text": {"format": told},
    }
