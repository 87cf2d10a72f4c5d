"""The requests of OpenAI's API, as far as they are honoured; docs/serve.md has the table."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, model_validator

from dflash_mlx.serve.chat import Chat, Fields, Json, call_of, text_of
from dflash_mlx.serve.errors import refusal
from dflash_mlx.serve.fields import Answered, Budget, ChatBody, Count, Name, Sent, Stop, Strict
from dflash_mlx.serve.pictures import AnyShown
from dflash_mlx.serve.settings import MOST_ANSWERS, MOST_TOP_LOGPROBS

_FORM = "response_format"
FIELDS = Fields(_FORM, f"{_FORM}.json_schema.schema", "tools[{}].function.", "parameters")
_TOLD = {"role", "name", "tool_call_id", "reasoning_content"}  # of a message, as it is

Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
Several = Field(min_length=1, max_length=MOST_ANSWERS)
_THOUGHT = Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))
Tops = Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)]


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


Content = str | list[Annotated[TextPart | AnyShown, Field(discriminator="type")]]


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
    reasoning_content: Annotated[str | None, _THOUGHT] = None
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


class Named(Sent):
    """What has the name of a tool, in its namespace if there is one."""

    name: Annotated[str, Field(max_length=200)] = ""
    namespace: str | None = None

    @property
    def known(self) -> str:
        """The name by which the model knows the tool; models are taught names without dots."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


class Nested(Sent):
    """What responses have flat, and chat completions one level deeper, by the type."""

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, given: Any) -> Any:
        inner = given.get(str(given.get("type"))) if isinstance(given, dict) else None
        return {**given, **inner} if isinstance(inner, dict) else given


class Choice(Nested, Named):
    """The tool that has to be called, or those that may be."""

    type: Literal["function", "custom", "allowed_tools"]
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[Choice], Field(max_length=1000)] | None = None


def chosen(choice: str | Choice | None, tools: list[Json]) -> tuple[list[Json], str | None]:
    """The tools that may be called, and the one that has to be: "" for any, None for none."""
    if choice is None or isinstance(choice, str):
        return [] if choice == "none" else tools, "" if choice == "required" else None
    if choice.type != "allowed_tools" and choice.name:
        return tools, choice.known
    names = {each.known for each in choice.tools or []}
    found = [tool for tool in tools if tool["function"]["name"] in names]
    if len(found) < max(1, len(names)):
        raise refusal("tool_choice", "names a tool that is not there", "name some of the tools")
    return found, "" if choice.mode == "required" else None


class StreamOptions(Strict):
    """What a stream tells besides the answer."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Format(Nested):
    """What the answer has to be; a schema is followed, strict or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None


def wanted(form: Format | None, field: str) -> tuple[Json | None, bool]:
    """The schema of an answer, None for words, and whether it is strict. field: where it is."""
    if form is None or form.type == "text":
        return None, False
    if form.type == "json_schema" and form.schema_ is None and form.name is None:
        raise refusal(field, "is missing", "send it")
    return form.schema_ or {"type": "object"}, bool(form.strict)


class OpenAIBody(Answered):
    """What all requests of this API share."""

    stream_options: StreamOptions | None = None
    stop: Stop | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class Completed(OpenAIBody):
    """What chat completions and completions share."""

    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    return_drafts: bool | None = None  # in a stream: what each round drafted

    @property
    def wanted(self) -> int:
        """Answers to each prompt that are told, the best of those that are made."""
        return self.n or 1

    @property
    def answers(self) -> int:
        return self.wanted

    def idle(self) -> list[str]:
        return [] if self.stream or self.stream_options is None else ["stream_options"]


class ChatRequest(ChatBody, Completed):
    """The body of POST /v1/chat/completions."""

    most_field = "max_completion_tokens"

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None
    tools: Annotated[list[Tool], Field(max_length=1000)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    response_format: Format | None = None
    modalities: list[Literal["text"]] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def tops(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def idle(self) -> list[str]:
        return [*super().idle(), *(["store"] if self.store else [])]

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs", "is for logprobs: true", "send both, or neither")
        last, goes_on = self.messages[-1], bool(self.continue_final_message)
        if self.add_generation_prompt is goes_on:
            step = "leave it out, or send the opposite"
            raise refusal("add_generation_prompt", "is the same as continue_final_message", step)
        has_words = isinstance(last, AssistantMessage) and last.content and not last.tool_calls
        if goes_on and not has_words:
            step = "end with the assistant's words"
            raise refusal("continue_final_message", "has nothing to go on from", step)

    def chat(self) -> Chat:
        tools = [each.model_dump(exclude_none=True) for each in self.tools or []]
        return Chat(
            FIELDS,
            [told(each) for each in self.messages],
            *chosen(self.tool_choice, tools),
            self.parallel_tool_calls is False,
            *wanted(self.response_format, FIELDS.schema),
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

    prompt: str | Annotated[list[str], Several] | Ids | Annotated[list[Ids], Several]
    max_tokens: Budget | None = None
    logprobs: Tops | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each by itself."""
        found: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        return [found] if isinstance(found[0], int) else found

    @property
    def answers(self) -> int:
        return self.best_of or self.wanted

    @property
    def tops(self) -> int | None:
        return self.logprobs

    @property
    def laws(self) -> tuple[int | None, int | None]:
        ranked = self.tops or 0 if self.answers > self.wanted else self.tops
        return ranked, self.tops if self.echo else None

    def check(self) -> None:
        wanted, made = self.wanted, self.answers
        if self.suffix:
            raise refusal("suffix", "cannot be honoured, as texts are only gone on with", "drop it")
        if made < wanted or (self.stream and made > wanted):
            what = f"is {made} with n {wanted} and stream {bool(self.stream)}"
            raise refusal("best_of", what, "let it be n, or more where nothing streams")
        if (answers := len(self.prompts) * made) > MOST_ANSWERS:
            what = f"asks for {answers} answers with {len(self.prompts)} prompts"
            name = "best_of" if self.best_of else "n"
            raise refusal(name, what, f"ask for at most {MOST_ANSWERS} at once")
