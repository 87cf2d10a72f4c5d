"""The requests of OpenAI's API, as far as they are honoured; docs/serve.md has the table."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dflash_mlx.engine.pair import Pair
from dflash_mlx.serve.chat import Chat, Fields, Json, call_of, text_of
from dflash_mlx.serve.errors import refusal
from dflash_mlx.serve.fields import Answered, ChatBody, Count, Name, Stops, StopText, Strict
from dflash_mlx.serve.settings import MOST_ANSWERS, MOST_TOP_LOGPROBS

FIELDS = Fields(
    form="response_format",
    schema="response_format.json_schema.schema",
    tool="tools[{}].function.",
    parameters="parameters",
)
_TOLD = {"role", "name", "tool_call_id", "reasoning_content"}  # of a message, as it is

Tops = Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)]
Nothing = Annotated[list[Any], Field(max_length=0)]


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class FunctionCall(Strict):
    """Which function was called, with its arguments as JSON text."""

    name: str
    arguments: str | Json  # as an object in Ollama's API


class ToolCall(Strict):
    """A call that the assistant made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # which some clients leave in


class PlainMessage(Strict):
    """What the model is told before the conversation, and what the user says."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class AssistantMessage(Strict):
    """What the model said before."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=1000)] | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Nothing | None = None


class ToolMessage(Strict):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[PlainMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: Annotated[dict[Literal["name"], Name], Field(min_length=1)]


class StreamOptions(Strict):
    """What a stream tells besides the answer."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Strict):
    """The schema of the answer; it is followed, strict or not."""

    name: Name | None = None
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None  # of a json_object

    @property
    def wanted(self) -> Json | None:
        """The schema that an answer has to follow, None for words."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return self.schema_ or {"type": "object"}
        if self.json_schema is None:
            raise refusal("response_format.json_schema", "is missing", "send it")
        given = self.json_schema.schema_
        return {"type": "object"} if given is None else given


class Completed(Answered):
    """What chat completions and completions share."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    stop: StopText | Stops | None = None
    user: str | None = None

    @property
    def answers(self) -> int:
        return self.n or 1

    def idle(self) -> list[str]:
        return [] if self.stream or self.stream_options is None else ["stream_options"]


class ChatRequest(ChatBody, Completed):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None
    tools: Annotated[list[Tool], Field(max_length=1000)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    metadata: dict[str, str] | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def most(self) -> int | None:
        return self.max_tokens or self.max_completion_tokens

    @property
    def tops(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            step = "send one of them"
            raise refusal("max_tokens", f"is {both[0]}, but max_completion_tokens {both[1]}", step)
        if self.top_logprobs and not self.logprobs:
            raise refusal(
                "top_logprobs", "is for logprobs: true", "send that, too, or leave it out"
            )
        last, goes_on = self.messages[-1], bool(self.continue_final_message)
        if self.add_generation_prompt is goes_on:
            step = "leave it out, or send the opposite"
            raise refusal("add_generation_prompt", "is the same as continue_final_message", step)
        has_words = isinstance(last, AssistantMessage) and last.content and not last.tool_calls
        if goes_on and not has_words:
            step = "end with the assistant's words"
            raise refusal("continue_final_message", "has nothing to go on from", step)

    def chat(self, pair: Pair) -> Chat:
        required: str | None = "" if self.tool_choice == "required" else None
        if isinstance(self.tool_choice, NamedTool):
            required = self.tool_choice.function["name"]
        form = self.response_format
        tools = self.tools or [] if self.tool_choice != "none" else []
        return Chat(
            FIELDS,
            [told(each) for each in self.messages],
            [each.model_dump(exclude_none=True) for each in tools],
            required,
            self.parallel_tool_calls is False,
            form.wanted if form is not None else None,
            form is not None and form.json_schema is not None and bool(form.json_schema.strict),
            go_on=bool(self.continue_final_message),
        )


def told(message: PlainMessage | AssistantMessage | ToolMessage) -> Json:
    """As chat templates read it."""
    role = "system" if message.role == "developer" else message.role
    found = message.model_dump(include=_TOLD, exclude_none=True)
    found |= {"role": role, "content": text_of(message.content)}
    if isinstance(message, AssistantMessage) and message.tool_calls:
        calls = [(each.function, each.id) for each in message.tool_calls]
        found["tool_calls"] = [call_of(f.name, f.arguments, key) for f, key in calls]
    return found


class CompletionRequest(Completed):
    """The body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_ANSWERS)]
        | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    )
    logprobs: Tops | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None

    @property
    def tops(self) -> int | None:
        return self.logprobs
