"""Conversations to prompt tokens, through the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jinja2 import TemplateError

from dflash_mlx.core.config import StructureConfig
from dflash_mlx.core.template import reserved
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.text import BEGIN
from dflash_mlx.models.read import unread_arguments
from dflash_mlx.serve.errors import ApiError, refusal

Message = dict[str, Any]

_MOST_PER_TOKEN = 128  # characters; longer texts than that allows are not even read
TEMPLATE_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RecursionError,
)


@dataclass(frozen=True)
class Chat:
    """A conversation in the words of OpenAI, the form that chat templates read.

    tools: that the model may call. arguments: of the chat template. go_on: whether the last
    message is the beginning of the answer. structure: what the answer has to be.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    go_on: bool = False
    structure: StructureConfig = StructureConfig()


@dataclass(frozen=True)
class Prompt:
    """Tokens, and whether the answer begins inside a thought that the template opened."""

    tokens: tuple[int, ...]
    in_thought: bool = False


class Text(Protocol):
    """A block of words, as every API has it."""

    text: str


def text_of(content: str | Sequence[Text] | None) -> str:
    """The text of a message, whose blocks follow each other without anything between them."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content)


def render(pair: Pair, chat: Chat) -> Prompt:
    """The prompt of a conversation; ApiError where the model's template does not take it."""
    tokenizer, arguments = pair.tokenizer, {**pair.template, **chat.arguments}
    if not tokenizer.has_chat_template:
        step = "use /v1/completions"
        raise ApiError(400, f"{pair.target.name} has no chat template; {step}", "messages")
    if chat.tools:
        arguments["tools"] = list(chat.tools)
    begin = {"add_generation_prompt": not chat.go_on}
    if chat.go_on:
        begin["continue_final_message"] = True
    check_length(pair, sum(len(_text_of(each)) for each in chat.messages), "messages")
    try:
        text = tokenizer.apply_chat_template(
            list(chat.messages), tokenize=False, **begin, **arguments
        )
        text.encode("utf-8")
    except TEMPLATE_FAULTS as error:
        what = f"messages are not what the model's chat template takes ({_short(error)})"
        raise ApiError(400, f"{what}; let user and assistant take turns", "messages") from None
    tokens = _encoded(pair, text, "messages", add_special_tokens=False)
    in_thought = text.rstrip().endswith(BEGIN)
    if in_thought and chat.structure.kind:
        what = f"{pair.target.name} thinks first, and an answer whose form is given has no room"
        raise ApiError(400, f"{what} for thoughts; leave the form to the model")
    return Prompt(tokens, in_thought)


def encode(pair: Pair, text: str) -> Prompt:
    """The prompt that a text is by itself."""
    check_length(pair, len(text), "prompt")
    return Prompt(_encoded(pair, text, "prompt"))


def check_tokens(pair: Pair, tokens: Sequence[int]) -> None:
    """ApiError for tokens that the model does not have, or more than it takes."""
    for token in tokens:
        if token >= len(pair.tokenizer):
            what = f"has the token {token}, and the model {len(pair.tokenizer)} of them"
            raise refusal("prompt", what, "send tokens of this model")
    _check_room(pair, tokens, "prompt")


def check_length(pair: Pair, characters: int, field: str) -> None:
    """ApiError for a text that is too long whatever its tokens are."""
    room = pair.target.context_length
    if characters > room * _MOST_PER_TOKEN:
        what = f"has {characters} characters, and the model's context {room} tokens"
        raise refusal(field, what, "shorten it")


def check_arguments(pair: Pair, arguments: Mapping[str, Any], field: str) -> None:
    """ApiError for arguments of the chat template that it does not read, or that we give."""
    for name in arguments:
        if not name.isidentifier() or reserved(name):
            raise refusal(f"{field}.{name[:80]}", "is not for a request to say", "leave it out")
    for name in unread_arguments(pair.tokenizer, arguments):
        what = "is nothing that the model's chat template reads"
        raise refusal(f"{field}.{name[:80]}", what, "leave it out")


def check_tools(pair: Pair, field: str = "tools") -> None:
    """ApiError where the model's template or mlx-lm knows no tools."""
    tokenizer = pair.tokenizer
    if unread_arguments(tokenizer, ["tools"]):
        what = f"are nothing that the chat template of {pair.target.name} reads"
        raise refusal(field, what, "leave them out, or serve a model that knows tools")
    if not tokenizer.has_tool_calling:
        what = f"called by {pair.target.name} come in a form that mlx-lm does not know"
        raise refusal(field, what, "leave them out, or serve another model")


def call_of(name: str, arguments: str | Mapping[str, Any], identity: str) -> Message:
    """An earlier tool call, as templates read it: with its arguments as an object."""
    given: Any = arguments
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = arguments
    inner = {"name": name, "arguments": given}
    return {"id": identity, "type": "function", "function": inner}


def spaced(pair: Pair, token: int) -> bool:
    """Whether a token begins with a space, as tokenizers of both kinds write it."""
    piece = pair.tokenizer.convert_ids_to_tokens(token)
    return isinstance(piece, str) and piece.startswith(("Ġ", "▁", " "))


def _encoded(pair: Pair, text: str, field: str, **more: Any) -> tuple[int, ...]:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"has half a surrogate pair, {text[error.start]!r}"
        raise refusal(field, half, "send whole characters") from None
    tokens = tuple(pair.tokenizer.encode(text, **more))
    _check_room(pair, tokens, field)
    return tokens


def _check_room(pair: Pair, tokens: Sequence[int], field: str) -> None:
    room = pair.target.context_length
    if not tokens:
        raise refusal(field, "is empty", "say something")
    if len(tokens) >= room:
        what = f"has {len(tokens)} tokens, and the model holds {room} with the answer"
        raise refusal(field, what, "shorten it or begin a new conversation")


def _text_of(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _short(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines[0] else type(error).__name__
