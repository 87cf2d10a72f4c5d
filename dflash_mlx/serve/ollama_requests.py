"""The requests of Ollama's API, as far as they are honoured; docs/serve.md has the table."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from dflash_mlx.core.option import LARGEST
from dflash_mlx.engine.pair import Pair
from dflash_mlx.serve.chat import Chat, Fields, Json
from dflash_mlx.serve.errors import refusal
from dflash_mlx.serve.fields import Budget, ChatBody, Sampled, Stop
from dflash_mlx.serve.openai_requests import AssistantMessage, Tool, told
from dflash_mlx.serve.pictures import Images

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

    def chat(self, pair: Pair) -> Chat:
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
