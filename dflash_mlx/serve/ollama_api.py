"""Ollama's API: its requests, as far as docs/serve.md says, and answers as lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from dflash_mlx.core.option import LARGEST
from dflash_mlx.serve.chat import Chat, Fields, Json, call_of
from dflash_mlx.serve.errors import OLLAMA, ApiError, as_json, body_of, encoded, refusal
from dflash_mlx.serve.fields import Budget, ChatBody, Sampled, Stop
from dflash_mlx.serve.openai_replies import begin
from dflash_mlx.serve.openai_requests import AssistantMessage, Tool, told
from dflash_mlx.serve.pictures import Images
from dflash_mlx.serve.request_queue import Reply
from dflash_mlx.serve.service import Service, Writer, answer, converse, figures
from dflash_mlx.session.calls import CALL, THOUGHT, WORDS, Part

Length = Annotated[int, Field(ge=-2, le=LARGEST)]  # below 1 as the server has it


class Options(Sampled):
    """How tokens are drawn, and when an answer ends."""

    max_tokens: Annotated[Length | None, Field(alias="num_predict")] = None
    repetition_penalty: Annotated[float | None, Field(alias="repeat_penalty", gt=0, le=100)] = None
    repetition_context: Annotated[Budget | None, Field(alias="repeat_last_n")] = None
    stop: Stop | None = None


class Message(AssistantMessage):
    """What somebody says, or a tool answered."""

    role: Literal["system", "user", "assistant", "tool"]  # type: ignore[assignment]
    content: str = ""
    reasoning_content: Annotated[str | None, Field(alias="thinking")] = None
    name: Annotated[str | None, Field(alias="tool_name")] = None
    tool_call_id: str | None = None
    images: Images | None = None

    @property
    def said(self) -> str:
        """Its text, behind its pictures."""
        return "".join((*(each.text for each in self.images or ()), self.content))


class ChatRequest(ChatBody):
    """The body of POST /api/chat."""

    media = "application/x-ndjson"
    streams_calls = False
    words: ClassVar[Fields] = Fields("format", "format", "tools[{}].function.", "parameters")

    messages: list[Message] = []
    stream: bool | None = True
    options: Options = Options()
    stop: Stop | None = None
    tools: Annotated[list[Tool], Field(max_length=1000)] | None = None
    format: Literal["json", ""] | Json | None = None
    think: bool | str | None = None

    def model_post_init(self, _: Any) -> None:
        """Take the options for fields of the request, as they are in other APIs."""
        self.stream = self.stream is not False
        for name, value in self.options:
            if value is not None and (name != "max_tokens" or value > 0):
                setattr(self, name, value)

    def chat(self) -> Chat:
        last = self.messages[-1]
        return Chat(
            self.words,
            [{**told(each), "content": each.said} for each in self.messages],
            [each.model_dump(exclude_none=True) for each in self.tools or []],
            schema={"type": "object"} if self.format == "json" else self.format or None,
            go_on=last.role == "assistant" and bool(last.content) and not last.tool_calls,
        )


class GenerateRequest(ChatRequest):
    """The body of POST /api/generate: a conversation of one message."""

    words = Fields("format", "format", "", "", "prompt")

    prompt: str = ""
    system: str = ""
    raw: bool = False
    images: Images | None = None

    def model_post_init(self, _: Any) -> None:
        super().model_post_init(_)
        user = Message(role="user", content=self.prompt, images=self.images)
        system = [Message(role="system", content=self.system)] if self.system else []
        self.messages = [*system, user] if self.prompt else []

    def check(self) -> None:
        super().check()
        for name in ("system", "format", "think", "images") if self.raw else ():
            if getattr(self, name):
                raise refusal(name, "is not for a raw prompt", "leave it out, or raw")


async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, streamed or whole; one without words has the model loaded."""
    service: Service = request.app.state.service
    if not body.messages:
        async with service.using(body):
            pass
        return as_json({**_said(body), "done": True, "done_reason": "load"})
    if isinstance(body, GenerateRequest) and body.raw:
        return await answer(request, body, begin(request, body, [body.prompt]), LineWriter)
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
