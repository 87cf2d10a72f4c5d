"""The requests of OpenAI's API, as far as they are honoured; docs/serve.md has the table."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dflash_mlx.serve.fields import Count, Name, Sampled, Stops, StopText, Strict
from dflash_mlx.serve.settings import MOST_ANSWERS, MOST_TOP_LOGPROBS

Json = dict[str, Any]


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class FunctionCall(Strict):
    """Which function was called, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call that the assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # which some clients leave in


class SystemMessage(Strict):
    """What the model is told before the conversation."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    """What the user says."""

    role: Literal["user"]
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
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(Strict):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


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


class NamedFunction(Strict):
    """The function that has to be called."""

    name: Name


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Strict):
    """What a stream tells besides the answer."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Strict):
    """The schema of the answer; it is followed, strict or not."""

    name: Name
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Common(Sampled):
    """What chat completions and completions share."""

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    max_tokens: Count | None = None
    stop: StopText | Stops | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None


class ChatRequest(Common):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=1000)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Json | None = None
    reasoning_effort: str | None = None
    metadata: dict[str, str] | None = None
    modalities: list[str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Common):
    """The body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_ANSWERS)]
        | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
