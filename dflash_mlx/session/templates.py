"""Messages to prompt tokens."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.prompt import Prompt, shared_length
from dflash_mlx.core.text import read_json_file
from dflash_mlx.engine.pair import Pair
from dflash_mlx.vision.pictures import check_sees

Message = dict[str, Any]  # "content" is a text, or parts where pictures are among them
Conversation = str | Sequence[Message]

_SHAPE = 'a JSON list of objects like {"role": "user", "content": "..."}'


def check_prompt(prompt: Conversation, system: str | None, raw: bool) -> None:
    """Raise DFlashError for a prompt that no model could answer; needs no model."""
    if not prompt or (isinstance(prompt, str) and not prompt.strip() and not raw):
        raise DFlashError("the prompt is empty", "give some text")
    if raw and (system is not None or not isinstance(prompt, str)):
        raise DFlashError("raw works on plain text alone", "leave it out", "raw")
    contents = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt]
    texts = [text for content in contents for text in words_of(content)]
    for text in [*texts, system or ""]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise DFlashError(
                f"the prompt is not UTF-8: {text[:40]!r}", "convert it, with iconv for example"
            ) from None


def words_of(content: str | Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts of a message, between which there are pictures."""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def prompt_of(
    pair: Pair, prompt: Conversation, system: str | None = None, raw: bool = False
) -> Prompt:
    """The prompt of `prompt_tokens`, pictures included, which only some targets see.

    A picture is a part {"type": "image", "picture": Picture} of a message's content.
    """
    if not has_pictures(prompt):
        return Prompt.of(prompt_tokens(pair.tokenizer, prompt, system, raw, pair.template))
    check_prompt(prompt, system, raw)
    check_sees(pair.target)
    from dflash_mlx.vision.prompts import read_prompt

    arguments = {"add_generation_prompt": True, **pair.template}
    with _template_faults(pair.template):
        return read_prompt(pair.target, pair.tokenizer, _all(prompt, system), **arguments)


def has_pictures(prompt: Conversation) -> bool:
    """Whether a message has parts, as only those with pictures do."""
    return not isinstance(prompt, str) and not all(isinstance(m["content"], str) for m in prompt)


def prompt_tokens(
    tokenizer: Any,
    prompt: Conversation,
    system: str | None = None,
    raw: bool = False,
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of `prompt`: a user's text or a conversation, through the model's chat template.

    system: put before the conversation. raw: encode the text as it is, without a template.
    template: arguments of the template, see `Pair.template`. Raises DFlashError for a prompt that
    `check_prompt` refuses, and where the model's template is missing or refuses the conversation.
    """
    check_prompt(prompt, system, raw)
    if has_pictures(prompt):
        raise DFlashError("the conversation has pictures, and this reads text", "leave them out")
    if raw:
        return list(tokenizer.encode(prompt))
    if not tokenizer.has_chat_template:
        raise DFlashError("this model has no chat template", "add --raw to send plain text")
    arguments = {"add_generation_prompt": True, **(template or {})}
    with _template_faults(template or {}):
        return list(tokenizer.apply_chat_template(_all(prompt, system), **arguments))


def _all(prompt: Conversation, system: str | None) -> list[Message]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return messages if system is None else [{"role": "system", "content": system}, *messages]


@contextmanager
def _template_faults(template: Mapping[str, Any]) -> Iterator[None]:
    """Say in a sentence what a chat template with these arguments refuses."""
    try:
        yield
    except TemplateError as error:
        given = "".join(f" with {key}={json.dumps(value)}" for key, value in template.items())
        raise DFlashError(
            f"the model's chat template refuses the conversation{given} ({error})",
            "leave --system or --template out, or let user and assistant take turns",
        ) from None


def ends_of_turns(
    tokens: Sequence[int],
    messages: Sequence[Mapping[str, Any]],
    render: Callable[[Sequence[Mapping[str, Any]]], Sequence[int]],
) -> tuple[int, ...]:
    """Up to where prompts to come will begin as `tokens` do: a system prompt, a user's last words.

    Other conversations part from this one behind the first, and behind the other templates leave
    out the thoughts of earlier answers. render: the tokens of messages, without an answer begun.
    """
    asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not asked:
        return ()
    other = [*messages[: asked[0]], {"role": "user", "content": ""}]
    ends = (shared_length(tokens, render(some)) for some in (other, messages[: asked[-1] + 1]))
    return tuple(sorted({*ends}))


def read_messages(file: Path) -> list[Message]:
    """The conversation in a JSON file; DFlashError when it is missing or of another shape."""
    return check_messages(read_json_file(file, f"give {_SHAPE}"), str(file))


def check_messages(messages: Any, source: str) -> list[Message]:
    """Messages of texts, or of text parts (OpenAI); DFlashError naming `source` for others."""
    if not isinstance(messages, list) or not messages:
        raise DFlashError(f"{source} holds no messages", f"give {_SHAPE}")
    checked = []
    for i, message in enumerate(messages, start=1):
        content = _content(message.get("content")) if isinstance(message, dict) else None
        if content is None or not isinstance(message.get("role"), str):
            shown = reprlib.repr(message)
            raise DFlashError(f"message {i} in {source} is {shown}", f"give {_SHAPE}")
        checked.append({**message, "content": content})
    return checked


def _content(content: Any) -> str | None:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) and content else [None]
    found = [p.get("text") for p in parts if isinstance(p, dict) and p.get("type") == "text"]
    texts = [text for text in found if isinstance(text, str)]
    return "".join(texts) if len(texts) == len(parts) else None
