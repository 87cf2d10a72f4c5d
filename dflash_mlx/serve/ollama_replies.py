"""Ollama's API: its paths, and answers as lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone

from starlette.requests import Request
from starlette.responses import Response

from dflash_mlx.serve.chat import Json, call_of
from dflash_mlx.serve.errors import OLLAMA, ApiError, as_json, body_of, encoded
from dflash_mlx.serve.ollama_requests import ChatRequest, GenerateRequest
from dflash_mlx.serve.openai_replies import begin
from dflash_mlx.serve.request_queue import Reply
from dflash_mlx.serve.service import Service, Writer, answer, converse, figures
from dflash_mlx.session.calls import CALL, THOUGHT, WORDS, Part


async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, streamed or whole; one without words has the model loaded."""
    service: Service = request.app.state.service
    if not body.messages:
        async with service.using(body):
            pass
        return as_json({**_said(body), "done": True, "done_reason": "load"})
    if isinstance(body, GenerateRequest) and body.raw:
        return await answer(request, body, begin(request, body), LineWriter)
    return await converse(request, body, LineWriter)


async def generate(body: GenerateRequest, request: Request) -> Response:
    """Answer a prompt, streamed or whole."""
    return await chat(body, request)


class LineWriter(Writer):
    """Writes one answer down, a line for each part."""

    def __init__(self, body: ChatRequest, replies: Sequence[Reply]) -> None:
        self._body, (self._reply,) = body, replies

    @property
    def ping(self) -> bytes:
        """A line that adds nothing, as clients read over no other."""
        return _line(_said(self._body))

    def part(self, reply: Reply, part: Part) -> bytes:
        return _line(_said(self._body, part))

    def end(self, reply: Reply) -> bytes:
        return _line({**_said(self._body), **self._ending()})

    def error(self, error: ApiError) -> bytes:
        return _line(body_of(error, OLLAMA))

    def whole(self) -> Json:
        return {**_said(self._body, *self._reply.parts), **self._ending()}

    def _ending(self) -> Json:
        """Why the answer ended, tokens, and durations in nanoseconds."""
        reply, s = self._reply, self._reply.statistics
        seconds = {
            "total_duration": time.monotonic() - reply.since,
            "load_duration": max(0.0, s.time_to_first_token - s.prefill_seconds),  # it waited
            "prompt_eval_duration": s.prefill_seconds,
            "eval_duration": s.decode_seconds,
        }
        return {
            "done": True,
            "done_reason": "length" if reply.reason == "length" else "stop",
            **{name: max(1, round(each * 1e9)) for name, each in seconds.items()},
            "prompt_eval_count": s.prompt_tokens,
            "eval_count": s.generated_tokens,
            "dflash": figures([reply]),
        }


def _said(body: ChatRequest, *parts: Part) -> Json:
    """An object that tells these parts of an answer."""
    text, thought = ("".join(p.text for p in parts if p.kind == k) for k in (WORDS, THOUGHT))
    calls = [call_of(p.name, p.text, p.identity) for p in parts if p.kind == CALL]
    said: Json = {"thinking": thought} if thought else {}
    if isinstance(body, GenerateRequest):
        said |= {"response": text}
    else:
        more = {"tool_calls": calls} if calls else {}
        said = {"message": {"role": "assistant", "content": text, **said, **more}}
    now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    return {"model": body.model, "created_at": now, **said, "done": False}


def _line(value: Json) -> bytes:
    return encoded(value) + b"\n"
