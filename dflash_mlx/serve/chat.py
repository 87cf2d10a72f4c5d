"""A conversation in neutral words, and its prompt, through the model's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_mlx.core.config import RESERVED
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.engine.delta import END, opens_thought
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.read import unread_arguments
from dflash_mlx.serve.errors import ApiError, of_settings, refusal
from dflash_mlx.session.forms import PLAIN, TEMPLATE_FAULTS, Form, form_of, plain
from dflash_mlx.session.templates import ends_of_turns
from dflash_mlx.vision.pictures import Picture

Json = dict[str, Any]

STAND_IN = re.compile("(\0[0-9a-f]{32}\0)")  # in a text for what is none, see pictures.py
TOO_LONG = "context_length_exceeded"  # OpenAI's code of a prompt that is
_MOST_PER_TOKEN = 128  # characters; longer texts than that allows are not even read
_THINKING = ("enable_thinking", "reasoning_effort")  # arguments of a template
_SWITCH = "chat_template_kwargs.enable_thinking"
_TELLING = (
    "You may call these functions:\n{}\n"
    "To call one, answer with just its name and its arguments in this form:\n{}"
)
_RESULT = "<tool_response>"


@dataclass(frozen=True)
class Fields:
    """What an API calls the fields that say of which form an answer is."""

    form: str
    schema: str
    tool: str  # where the fields of a tool are; {} is its number
    parameters: str  # one of them
    messages: str = "messages"


@dataclass(frozen=True)
class Chat:
    """A conversation that any API asks to go on with, in the words that chat templates read."""

    fields: Fields
    messages: Sequence[Json]  # as OpenAI's, with contents of text and arguments as objects
    tools: Sequence[Json] = ()  # that may be called, as OpenAI's
    required: str | None = None  # the tool that has to be called, "" for any of them
    one_call: bool = False  # the answer is over with its first call
    schema: Json | None = None  # that the answer follows, None for words
    is_strict: bool = False  # nothing of the schema may be left out
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    # What is said of thoughts by field: efforts, whether there are any, tokens at most.
    wishes: Mapping[str, str | bool | int] = field(default_factory=dict)
    go_on: bool = False  # the last message is the beginning of the answer
    opened: bool = False  # the prompt begins a thought
    pictures: Mapping[str, Picture] = field(default_factory=dict)  # by what stands for them
    user: str = ""  # who asks
    ignored: list[str] | None = None  # names of what changes nothing; None where that is refused

    def ignore(self, name: str, problem: str, next_step: str) -> None:
        """Note what cannot be honoured; ApiError where the server is strict."""
        if self.ignored is None:
            raise refusal(name, problem, next_step)
        self.ignored.append(name)

    @property
    def asks(self) -> bool:
        """Whether the answer has to be of a form that only a grammar can promise."""
        strict = any(tool["function"].get("strict") for tool in self.tools)
        return strict or self.schema is not None or self.required is not None

    @property
    def wants_thoughts(self) -> bool:
        """Whether the request says that there are to be thoughts, and the template hears it."""
        said = {**self.wishes, _SWITCH: self.arguments.get("enable_thinking")}
        return any(it is True and name not in (self.ignored or ()) for name, it in said.items())

    @property
    def told(self) -> list[Json]:
        """The tools as the model is told of them: how they are kept is not its matter."""
        return [
            {**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}}
            for tool in self.tools
        ]


def text_of(content: str | list[Any] | None) -> str:
    """The text of a message, whose blocks follow each other without anything between them."""
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content or ())


def call_of(name: str, arguments: str | Mapping[str, Any], identity: str) -> Json:
    """An earlier tool call, as templates read it: with its arguments as an object."""
    given: Any = arguments
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = arguments
    inner = {"name": name, "arguments": given}
    return {"id": identity, "type": "function", "function": inner}


def prompt_of(pair: Pair, chat: Chat) -> Prompt:
    """The prompt of a conversation; ApiError where the model or its template cannot take it."""
    tokenizer, name, field = pair.tokenizer, pair.target.name, chat.fields.messages
    if not tokenizer.has_chat_template:
        raise refusal(field, f"need a chat template, and {name} has none", "use completions")
    if chat.asks and chat.go_on:
        step = "end with the user's, or leave the format of the answer to the model"
        raise refusal(field, "end with the assistant's words", step)
    arguments = {**pair.template, **_arguments(pair, chat)}
    arguments |= {"continue_final_message": True} if chat.go_on else {}
    _check_length(pair, sum(len(each.get("content") or "") for each in chat.messages), field)
    arguments |= {"add_generation_prompt": not chat.go_on}
    try:
        messages = _messages(form_of(pair), chat)
        try:
            prompt = _rendered(pair, chat, messages, arguments)
        except TEMPLATE_FAULTS:
            if not chat.tools or not form_of(pair).in_prompt:
                raise
            system, user, *rest = messages  # as the template may take no system prompt
            user = {**user, "content": f"{system['content']}\n\n{user['content']}"}
            prompt = _rendered(pair, chat, [user, *rest], arguments)
    except DFlashError as error:
        raise of_settings(error) from None
    except TEMPLATE_FAULTS as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        what = f"are refused by the model's chat template ({said})"
        raise refusal(field, what, "let user and assistant take turns") from None
    budgets = [name for name, wish in chat.wishes.items() if type(wish) is int]
    reads = budgets and not unread_arguments(tokenizer, ["enable_thinking"])
    opened = opens_thought(tokenizer, prompt.tokens)
    ends = tokenizer.think_end if tokenizer.has_thinking else END if opened or reads else None
    formed = chat.asks and (opened or chat.wants_thoughts)
    why = "they cannot be cut before a given format" if formed else f"{name} has none"
    for budget in budgets if formed or ends != END else ():
        chat.ignore(budget, f"limits thoughts, and {why}", "leave it out")
    if chat.pictures or not pair.target.is_recurrent:
        return prompt
    return replace(prompt, ends=_ends(pair, prompt.tokens, messages, arguments))


def _rendered(pair: Pair, chat: Chat, messages: list[Json], arguments: Json) -> Prompt:
    if not chat.pictures:
        text = pair.tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        return Prompt(_encoded(pair, text, chat.fields.messages, add_special_tokens=False))
    from dflash_mlx.vision.prompts import read_prompt

    parted = [_parted(each, chat.pictures) for each in messages]
    prompt = read_prompt(pair.target, pair.tokenizer, parted, chat.user, **arguments)
    check_tokens(pair, prompt.tokens, chat.fields.messages)
    return prompt


def _parted(message: Json, pictures: Mapping[str, Picture]) -> Json:
    """With parts in place of its text, where pictures are among it."""
    content = message.get("content") or ""
    check_text(content, "messages")
    pieces = [piece for piece in STAND_IN.split(content) if piece]
    if pictures.keys().isdisjoint(pieces):
        return message
    parts = [
        {"type": "image", "picture": pictures[piece]}
        if piece in pictures
        else {"type": "text", "text": piece}
        for piece in pieces
    ]
    return {**message, "content": parts}


def _ends(
    pair: Pair, tokens: Sequence[int], messages: Sequence[Json], arguments: Json
) -> tuple[int, ...]:
    """Of the turns whose states are worth keeping; none where the template refuses a part."""

    def render(some: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        how = {**arguments, "continue_final_message": False, "add_generation_prompt": False}
        text = pair.tokenizer.apply_chat_template([*some], tokenize=False, **how)
        return pair.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    with suppress(*TEMPLATE_FAULTS):
        return ends_of_turns(tokens, messages, render)
    return ()


def text_prompt(pair: Pair, text: str) -> tuple[int, ...]:
    """The prompt that a text is by itself."""
    _check_length(pair, len(text), "prompt")
    return _encoded(pair, text, "prompt")


def check_tokens(pair: Pair, tokens: Sequence[int], field: str = "prompt") -> None:
    """ApiError for tokens that the model does not have, or more than it takes."""
    if (largest := max(tokens, default=0)) >= (known := len(pair.tokenizer)):
        what = f"has the token {largest}, and the model {known} of them"
        raise refusal(field, what, "send tokens of this model")
    room = pair.target.context_length
    if not tokens:
        raise refusal(field, "is empty", "say something")
    if len(tokens) >= room:
        raise _too_long(field, f"{len(tokens)} tokens > {room - 1} maximum", room)


def check_text(text: str, field: str) -> None:
    """ApiError for half a surrogate pair, which UTF-8 cannot hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise refusal(field, "has half a surrogate pair", "send whole characters") from None


def _arguments(pair: Pair, chat: Chat) -> Json:
    """Of the chat template; where a form is given, thoughts come only if they are asked for."""
    unread = {*unread_arguments(pair.tokenizer, [*chat.arguments, *_THINKING, "tools"])}
    for name in chat.arguments:
        field = f"chat_template_kwargs.{name[:80]}"
        if not name.isidentifier() or name in RESERVED:
            raise refusal(field, "cannot be set by a request", "leave it out")
        if name in unread:
            chat.ignore(field, "is not read by the model's chat template", "leave it out")
    if in_prompt := bool(chat.tools) and form_of(pair).in_prompt:
        if chat.ignored is None:
            what = f"are not known to the chat template of {pair.target.name}"
            raise refusal("tools", what, "leave them out, or serve a model that knows tools")
        chat.ignored.append("tools: told in the system prompt, as the template knows none")
    found: Json = {"enable_thinking": False} if chat.asks else {}
    found |= {**_thinking(pair, chat, unread), **chat.arguments}
    found |= {"tools": chat.told} if chat.tools and not in_prompt else {}
    return {name: value for name, value in found.items() if name not in unread}


def _thinking(pair: Pair, chat: Chat, unread: set[str]) -> Json:
    """What a request says of thoughts, as arguments of the template; one rule for all APIs."""
    found: Json = {}
    wishes = {name: wish for name, wish in chat.wishes.items() if type(wish) is not int}
    for name, wish in wishes.items():
        told: Json = {"reasoning_effort": wish} if isinstance(wish, str) else {}
        told |= {"enable_thinking": wish is True} if wish in (True, False, "none") else {}
        read = {key: value for key, value in told.items() if key not in unread}
        wants = wish not in (False, "none")
        if wants and chat.asks and isinstance(wish, str):  # as programs send it unasked
            read = {}
        found |= read
        if not read and (wants or pair.tokenizer.has_thinking):
            chat.ignore(name, "is not read by the model's chat template", "leave it out")
    return found


def _messages(form: Form, chat: Chat) -> list[Json]:
    """The conversation as the template can write it, where it knows no tools, too."""
    messages: list[Json] = []
    for each in chat.messages:
        if form.takes_text and (calls := each.get("tool_calls")):
            told = {**each, "tool_calls": [_with_text(call) for call in calls]}
            messages.append(told)
        else:
            messages += _in_words(each, messages) if form is PLAIN else [each]
    if chat.tools and form.in_prompt:
        tools = "\n".join(json.dumps(t["function"], ensure_ascii=False) for t in chat.told)
        text = _TELLING.format(tools, form.example)
        if messages[0]["role"] == "system":
            text = f"{messages.pop(0).get('content')}\n\n{text}"
        messages.insert(0, {"role": "system", "content": text})
    return messages


def _with_text(call: Json) -> Json:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


def _in_words(message: Json, before: list[Json]) -> list[Json]:
    """A call as the assistant's words, and what a tool answered as the user's, with the next."""
    text, role = message.get("content") or "", message["role"]
    if calls := [call["function"] for call in message.get("tool_calls") or ()]:
        written = [plain(call["name"], call["arguments"]) for call in calls]
        return [{"role": role, "content": "\n".join(filter(None, [text, *written]))}]
    if role == "tool":
        text, role = f"{_RESULT}\n{text}\n</tool_response>", "user"
    last = before[-1] if before else {}
    if role == last.get("role") == "user" and last["content"].startswith(_RESULT):
        text = f"{before.pop()['content']}\n{text}"
    return [{**message, "role": role, "content": text}]


def _check_length(pair: Pair, characters: int, field: str) -> None:
    """ApiError for a text that is too long whatever its tokens are."""
    room = pair.target.context_length
    if characters > room * _MOST_PER_TOKEN:
        raise _too_long(field, f"{characters} characters", room)


def _too_long(field: str, what: str, room: int) -> ApiError:
    """In words that Claude Code and others look for, and with OpenAI's code."""
    said = f"{field}: prompt is too long: {what}; the model's maximum context length is {room}"
    step = "with the answer; shorten it or begin a new conversation"
    return ApiError(400, f"{said} {step}", field, TOO_LONG)


def _encoded(pair: Pair, text: str, field: str, **more: Any) -> tuple[int, ...]:
    check_text(text, field)
    tokens = tuple(pair.tokenizer.encode(text, **more))
    check_tokens(pair, tokens, field)
    return tokens
