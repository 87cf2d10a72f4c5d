"""The requests of Anthropic's API, as far as they are honoured; docs/serve.md has the table."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dflash_mlx.engine.pair import Pair
from dflash_mlx.serve.chat import Chat, Fields, Json, call_of, text_of
from dflash_mlx.serve.errors import refusal
from dflash_mlx.serve.fields import Budget, ChatBody, Conversation, Name, Stops, Strict

FIELDS = Fields(
    form="output_config.format",
    schema="output_config.format.schema",
    tool="tools[{}].",
    parameters="input_schema",
)


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


class OutputFormat(Strict):
    """The schema of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[Json, Field(alias="schema")]


class OutputConfig(Strict):
    """What the answer has to be."""

    effort: str | None = None
    format: OutputFormat | None = None


class Counted(Conversation):
    """What the number of a prompt's tokens depends on: the body of .../count_tokens."""

    messages: Annotated[list[Message], Field(min_length=1)]
    system: str | list[Text] | None = None
    tools: Annotated[list[Tool], Field(max_length=1000)] | None = None
    tool_choice: ToolChoice | None = None
    context_management: dict[Literal["edits"], list[Json]] | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    def idle(self) -> list[str]:
        edits = (self.context_management or {}).get("edits", [])
        asking = (i for i, edit in enumerate(edits) if edit.get("keep") != "all")
        return [f"context_management.edits[{i}]" for i in asking]

    def chat(self, pair: Pair) -> Chat:
        messages = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        for each in self.messages:
            messages += _told(each)
        go_on = isinstance(self.messages[-1], AssistantMessage)
        if go_on and messages[-1].get("tool_calls"):
            step = "send the result after its call"
            raise refusal("messages", "end with a call of a tool", step)
        choice, output = self.tool_choice or ToolChoice(type="auto"), self.output_config
        form = output.format if output is not None else None
        return Chat(
            FIELDS,
            messages,
            [_tool(each) for each in self.tools or []] if choice.type != "none" else [],
            self._required(choice),
            bool(choice.disable_parallel_tool_use),
            form.schema_ if form is not None else None,
            go_on=go_on,
        )

    def _required(self, choice: ToolChoice) -> str | None:
        """The tool that has to be called, "" for any."""
        if choice.type == "tool" and not choice.name:
            raise refusal("tool_choice", "of type tool names none", "send its name")
        return {"any": "", "tool": choice.name}.get(choice.type)


def _told(message: UserMessage | AssistantMessage | SystemMessage) -> list[Json]:
    """As chat templates read it; what tools answered comes first."""
    role, content = message.role, message.content
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    found = [_result(block) for block in content if isinstance(block, ToolResult)]
    texts = [block for block in content if isinstance(block, Text)]
    if texts or not found:
        found.append({"role": role, "content": text_of(texts)})
    if thoughts := [block.thinking for block in content if isinstance(block, Thinking)]:
        found[-1]["reasoning_content"] = "".join(thoughts)
    if calls := [block for block in content if isinstance(block, ToolUse)]:
        found[-1]["tool_calls"] = [call_of(call.name, call.input, call.id) for call in calls]
    return found


def _result(block: ToolResult) -> Json:
    """Templates know nothing of errors, so the words say that it is one."""
    told = ("Error: " if block.is_error else "") + text_of(block.content)
    return {"role": "tool", "content": told, "tool_call_id": block.tool_use_id}


def _tool(tool: Tool) -> Json:
    """In OpenAI's words."""
    own = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    function = {**own, "strict": tool.strict or None}
    told = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": told}


class MessagesRequest(Counted, ChatBody):
    """The body of POST /v1/messages."""

    stop_field = "stop_sequences"

    max_tokens: Budget  # in this API a request has to say it; 0 has the prompt read for later
    stop_sequences: Stops | None = None
    metadata: dict[Literal["user_id"], str | None] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
