"""Messages to prompt tokens."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.prompt import shared_length
from dflash_mlx.core.text import read_json_file

Message = dict[str, str]
Conversation = str | Sequence[Message]

_SHAPE = 'a JSON list of objects like {"role": "user", "content": "..."}'


def check_prompt(prompt: Conversation, system: str | None, raw: bool) -> None:
    """Raise DFlashError for a prompt that no model could answer; needs no model."""
    if not prompt or (isinstance(prompt, str) and not prompt.strip() and not raw):
        raise DFlashError("the prompt is empty", "give some text")
    if raw and (system is not None or not isinstance(prompt, str)):
        raise DFlashError("raw works on plain text alone", "leave it out", "raw")
    texts = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt]
    for text in [*texts, system or ""]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise DFlashError(
                f"the prompt is not UTF-8: {text[:40]!r}", "convert it, with iconv for example"
            ) from None


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
    if raw:
        return list(tokenizer.encode(prompt))
    if not tokenizer.has_chat_template:
        raise DFlashError("this model has no chat template", "add --raw to send plain text")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    arguments = {"add_generation_prompt": True, **(template or {})}
    try:
        return list(tokenizer.apply_chat_template(messages, **arguments))
    except TemplateError as error:
        named = (template or {}).items()
        given = "".join(f" with {key}={json.dumps(value)}" for key, value in named)
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
