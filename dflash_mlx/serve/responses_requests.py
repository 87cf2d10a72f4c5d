"""The requests of OpenAI's responses, as far as they are honoured; docs/serve.md has the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, PrivateAttr, Tag, TypeAdapter

from dflash_mlx.engine.pair import Pair
from dflash_mlx.serve.chat import Chat, Fields, Json, call_of, text_of
from dflash_mlx.serve.errors import refusal
from dflash_mlx.serve.fields import ChatBody, Count, Name, Stops, StopText, Strict

FIELDS = Fields(
    form="text.format",
    schema="text.format.schema",
    tool="tools[{}].",
    parameters="parameters",
    messages="input",
)
_REFUSED = {  # fields that would change the answer, and what to do instead
    "background": "wait for the answer, or stream it",
    "conversation": "send previous_response_id, or all of the input",
    "prompt": "send its text as instructions",
}


class Sent(Strict):
    """What clients send back as it came, with fields that change nothing."""

    model_config = ConfigDict(extra="ignore")


class Text(Sent):
    """A part of what somebody says."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class Message(Sent):
    """What somebody says."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Text]


class Call(Sent):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class Unseen(Sent):
    """A picture or a file that a tool returned; the model is told that it does not see it."""

    type: Literal["input_image", "input_file"]

    @property
    def text(self) -> str:
        """What the model reads instead."""
        return "[not shown: this model reads text only]"


class Output(Sent):
    """What a tool answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Annotated[Text | Unseen, Field(discriminator="type")]]


class Reference(Sent):
    """An item of an earlier response, by its id."""

    type: Literal["item_reference"]
    id: str


class Thought(Sent):
    """What the model thought before; where it was not told, nothing is known of it."""

    type: Literal["reasoning"]
    summary: list[Text] = []
    content: list[Text] | None = None


def _kind(item: Any) -> Any:
    """A message may leave its type out."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[Call, Tag("function_call")]
    | Annotated[Output, Tag("function_call_output")]
    | Annotated[Thought, Tag("reasoning")]
    | Annotated[Reference, Tag("item_reference")],
    Discriminator(_kind),
]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class Tool(Sent):
    """A tool that the model may use; only functions can be, all others run at OpenAI."""

    type: str
    name: Name | None = None
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    name: Name


class Format(Strict):
    """What the answer has to be; a schema is followed, strict or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None

    @property
    def wanted(self) -> Json | None:
        """The schema that an answer has to follow, None for words."""
        if self.type == "json_schema" and self.schema_ is None:
            raise refusal(FIELDS.schema, "is missing", "send it")
        return {"text": None, "json_object": {"type": "object"}}.get(self.type, self.schema_)


class TextConfig(Sent):
    """Of which form the answer is."""

    format: Format | None = None
    verbosity: str | None = None


class StreamOptions(Strict):
    """What a stream tells besides the answer."""

    include_obfuscation: bool | None = None


class ResponsesRequest(ChatBody):
    """The body of POST /v1/responses."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Count | None = None
    stop: StopText | Stops | None = None
    tools: Annotated[list[Tool], Field(max_length=1000)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    conversation: str | Json | None = None
    prompt: Json | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: int | None = None  # of tools that run at OpenAI
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    client_metadata: Json | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    _before: list[Item] = PrivateAttr(default_factory=list)

    @property
    def most(self) -> int | None:
        return self.max_output_tokens or self.max_tokens

    @property
    def items(self) -> list[Item]:
        """The conversation so far, without instructions: they hold for one answer only."""
        new = self.input
        said = [Message(role="user", content=new)] if isinstance(new, str) else new
        return [*self._before, *said]

    @property
    def references(self) -> list[str]:
        """Ids of items that the input only names."""
        return [each.id for each in self.input if isinstance(each, Reference)]

    def idle(self) -> list[str]:
        tools = [f"tools[{i}]" for i, t in enumerate(self.tools or []) if t.type != "function"]
        asked = {"truncation": self.truncation == "auto", "include": bool(self.include)}
        return [*tools, *(name for name, is_asked in asked.items() if is_asked)]

    def complete(self, before: list[Item], referred: Mapping[str, Json]) -> None:
        """Put what was said before first, and items in the place of their ids."""
        self._before = before
        if isinstance(self.input, list) and referred:
            raw = [
                referred.get(each.id, each) if isinstance(each, Reference) else each
                for each in self.input
            ]
            self.input = ITEMS.validate_python(raw)

    def check(self) -> None:
        for name, step in _REFUSED.items():
            if getattr(self, name):
                raise refusal(name, "is not supported by this server", step)
        if "message.output_text.logprobs" in (self.include or []):
            step = "ask chat completions for logprobs"
            raise refusal("include", "asks for log-probabilities, which are not told here", step)

    def chat(self, pair: Pair) -> Chat:
        required: str | None = "" if self.tool_choice == "required" else None
        if isinstance(self.tool_choice, NamedTool):
            required = self.tool_choice.name
        form = self.text.format if self.text is not None else None
        told = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return Chat(
            FIELDS,
            _one_system([*told, *_told(self.items)]),
            self._tools() if self.tool_choice != "none" else [],
            required,
            self.parallel_tool_calls is False,
            form.wanted if form is not None else None,
        )

    def _tools(self) -> list[Json]:
        """In the words of chat completions."""
        found: list[Json] = []
        for i, tool in enumerate(self.tools or []):
            if tool.type == "function":
                if tool.name is None:
                    raise refusal(f"tools[{i}].name", "is missing", "send it")
                function = tool.model_dump(exclude={"type"}, exclude_none=True)
                found.append({"type": "function", "function": function})
        return found


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
        call = call_of(item.name, item.arguments, item.call_id)
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
