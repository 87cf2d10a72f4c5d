"""The requests of OpenAI's responses, as far as they are honoured; docs/serve.md has the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from dflash_mlx.serve.chat import Chat, Fields, Json, call_of, text_of
from dflash_mlx.serve.errors import refusal
from dflash_mlx.serve.fields import ChatBody, Count, Sent, Strict
from dflash_mlx.serve.openai_requests import Choice, Format, Named, OpenAIBody, Tops, chosen, wanted
from dflash_mlx.serve.pictures import AnyShown

FIELDS = Fields("text.format", "text.format.schema", "tools[{}].", "parameters", "input")
INPUT = "input"  # the argument that a custom tool has where the model sees it
_TEXT = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
_CALLED, _GROUP = ("function", "custom"), "namespace"  # types of tools that clients run
KNOWN = {*_CALLED, _GROUP}
_SECRET = "encrypted_content"  # of thoughts, by another server, as we encrypt nothing
_LOGPROBS = "message.output_text.logprobs"  # in `include`

Unread = Annotated[Any, Field(exclude=True)]


class Returned(Strict):
    """What clients send back as it came; these fields change nothing."""

    id: Unread = None
    status: Unread = None
    phase: Unread = None


class Text(Strict):
    """A part of what somebody says."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: Unread = None
    logprobs: Unread = None


Content = str | list[Annotated[Text | AnyShown, Field(discriminator="type")]]


class Message(Returned):
    """What somebody says."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class Call(Named, Returned):
    """A call that the model made; what it has sent to a custom tool is `input`."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    arguments: str = ""
    input: str | None = None


class Output(Returned):
    """What a tool answered."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content


class Reference(Strict):
    """An item of an earlier response, by its id."""

    type: Literal["item_reference"]
    id: str


class Thought(Returned):
    """What the model thought before; where it was not told, nothing is known of it."""

    type: Literal["reasoning"]
    summary: list[Text] = []
    content: list[Text] | None = None
    encrypted_content: str | None = None


def _typed(item: Any) -> Any:
    """A message may leave its type out."""
    return {"type": "message", **item} if isinstance(item, dict) else item


Item = Annotated[
    Annotated[Message | Call | Output | Thought | Reference, Field(discriminator="type")],
    BeforeValidator(_typed),
]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class Tool(Named):
    """A tool that the model may use, or a namespace of some; all other types run at OpenAI."""

    type: str
    namespace: Annotated[str | None, Field(exclude=True)] = None  # of those in one
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    format: Json | None = None  # of a custom tool's input
    tools: Annotated[list[Tool], Field(max_length=1000)] | None = None  # of a namespace

    def function(self) -> Json:
        """In the words of chat completions; the input of a custom tool is its one argument."""
        keys = {"description", "parameters", "strict"}
        found = {"name": self.known, **self.model_dump(include=keys, exclude_none=True)}
        if self.type == "custom":
            grammar = (self.format or {}).get("definition")
            told = f"{self.description or ''}\n{f'Its input: {grammar}' if grammar else ''}".strip()
            found |= {"description": told, "parameters": _TEXT}
        return {"type": "function", "function": found}


class TextConfig(Sent):
    """Of which form the answer is."""

    format: Format | None = None
    verbosity: str | None = None


class ResponsesRequest(ChatBody, OpenAIBody):
    """The body of POST /v1/responses."""

    most_field = "max_output_tokens"

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[Tool], Field(max_length=1000)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    text: TextConfig | None = None
    background: Literal[False] | None = None
    conversation: None = None
    prompt: None = None
    top_logprobs: Tops | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    client_metadata: Json | None = None

    @property
    def tops(self) -> int | None:
        asks = self.top_logprobs or _LOGPROBS in (self.include or [])
        return (self.top_logprobs or 0) if asks else None

    @property
    def named(self) -> dict[str, Tool]:
        """What may be called, by the names that the model knows."""
        found: dict[str, Tool] = {}
        for i, tool in enumerate(self.tools or []):
            for each in tool.tools or [] if tool.type == _GROUP else [tool]:
                if each.type in _CALLED and not each.name:
                    raise refusal(f"tools[{i}].name", "is missing", "send it")
                if each.type in _CALLED:
                    each.namespace = tool.name if each is not tool else None
                    found[each.known] = each
        return found

    def idle(self) -> list[str]:
        asked: Json = {
            "truncation": self.truncation == "auto",
            "include": {*(self.include or [])} - {_LOGPROBS},
            "input[].encrypted_content": any(getattr(it, _SECRET, None) for it in self.items),
        }
        for i, tool in enumerate(self.tools or []):
            grammar = (tool.format or {}).get("definition")  # which the model is only told of
            asked |= {f"tools[{i}]": tool.type not in KNOWN, f"tools[{i}].format": grammar}
        return [name for name, is_asked in asked.items() if is_asked]

    def complete(self, before: list[Json], find: Callable[[str], Json]) -> None:
        """Put what was said before first, and items in the place of their ids."""
        given = self.input
        said = [Message(role="user", content=given)] if isinstance(given, str) else given
        new = [find(each.id) if isinstance(each, Reference) else each for each in said]
        self.input = ITEMS.validate_python([*before, *new])

    @property
    def items(self) -> list[Item]:
        """The conversation so far, without instructions: they hold for one answer only."""
        return [] if isinstance(self.input, str) else self.input

    def chat(self) -> Chat:
        tools = [tool.function() for tool in self.named.values()]
        told = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return Chat(
            FIELDS,
            _one_system([*told, *_told(self.items)]),
            *chosen(self.tool_choice, tools),
            self.parallel_tool_calls is False,
            *wanted(None if self.text is None else self.text.format, FIELDS.schema),
        )


def _told(items: list[Item]) -> list[Json]:
    """As chat templates read it: what the model thought, said and called at once is one message."""
    found: list[Json] = []
    for item in items:
        if isinstance(item, Output):
            content = text_of(item.output)
            found.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
        elif isinstance(item, Message) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            found.append({"role": role, "content": text_of(item.content)})
        else:
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            _add(found[-1], item)
    return found


def _add(message: Json, item: Item) -> None:
    """Add to a message of the assistant."""
    if isinstance(item, Message):
        message["content"] += text_of(item.content)
    elif isinstance(item, Call):
        given = item.arguments if item.input is None else {INPUT: item.input}
        call = call_of(item.known, given, item.call_id)
        message.setdefault("tool_calls", []).append(call)
    elif isinstance(item, Thought) and (thought := text_of(item.content or item.summary)):
        message["reasoning_content"] = message.get("reasoning_content", "") + thought


def _one_system(messages: list[Json]) -> list[Json]:
    """With one message for all that stands before the talk: many templates allow no second."""
    others = (i for i, each in enumerate(messages) if each["role"] != "system")
    number = next(others, len(messages))
    if number < 2:
        return messages
    text = "\n\n".join(each["content"] for each in messages[:number])
    return [{"role": "system", "content": text}, *messages[number:]]
