"""The requests of Anthropic's API, as far as they are honoured; docs/serve.md has the table."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dflash_mlx.serve.fields import Count, Name, Sampled, Stops, Strict

Json = dict[str, Any]


class CacheControl(Strict):
    """Asks to keep what stands before; caches here keep what they can without being asked."""

    type: Literal["ephemeral"]
    ttl: str | None = None
    scope: str | None = None


class Cached(Strict):
    """What may carry a `cache_control`."""

    cache_control: CacheControl | None = None


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
    content: str | list[Text] | None = None
    is_error: bool | None = None


UserBlock = Annotated[Text | ToolResult, Field(discriminator="type")]
AssistantBlock = Annotated[Text | Thinking | ToolUse, Field(discriminator="type")]


class UserMessage(Strict):
    """What the user says, and what tools answered."""

    role: Literal["user"]
    content: str | list[UserBlock]


class AssistantMessage(Strict):
    """What the model said before."""

    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class SystemMessage(Strict):
    """What the model is told in between."""

    role: Literal["system"]
    content: str | list[Text]


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class Tool(Cached):
    """A tool that the model may use."""

    name: Name
    description: str | None = None
    input_schema: Json
    type: Literal["custom"] | None = None
    strict: bool | None = None


class ToolChoice(Strict):
    """Whether and which tool is to be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingChoice(Strict):
    """Whether the model thinks first."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Strict):
    """The schema of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[Json, Field(alias="schema")]


class OutputConfig(Strict):
    """What the answer has to be."""

    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(Strict):
    """Who asks."""

    user_id: str | None = None


class Counted(Strict):
    """What the number of a prompt's tokens depends on: the body of .../count_tokens."""

    model: Name
    messages: Annotated[list[Message], Field(min_length=1)]
    system: str | list[Text] | None = None
    tools: Annotated[list[Tool], Field(max_length=1000)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingChoice | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: Json | None = None


class MessagesRequest(Counted, Sampled):
    """The body of POST /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Stops | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
