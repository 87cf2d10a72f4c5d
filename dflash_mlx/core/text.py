"""Texts that users write and read: JSON, arguments of chat templates, amounts of bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dflash_mlx.core.errors import DFlashError

_RESERVED = (  # what the call of a chat template decides itself
    *("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding"),
    *("add_generation_prompt", "continue_final_message", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)


def amount(count: float) -> str:
    """As 98.4 MB, 2.28 GB; in thousands, as disks and downloads are told."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{count / 1000:.1f} kB" if count else "0 kB"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; rows that are shorter than the header end in empty cells."""
    width = len(header)
    lines = ([*cells, *[""] * (width - len(cells))] for cells in (header, ["---"] * width, *rows))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def parse_json(text: str) -> Any:
    """What `text` stands for; ValueError for anything but JSON of a bearable depth.

    A byte order mark, as editors on Windows put before it, is no part of the text.
    """
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def reserved(name: str) -> bool:
    """Whether whoever renders a conversation decides this argument of a chat template."""
    return name in _RESERVED


def parse_template(given: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE texts, the values as JSON, as names and values; DFlashError for any other."""
    arguments = {}
    for text in given:
        key, _, value = text.partition("=")
        try:
            arguments[key] = parse_json(value)
        except ValueError:
            key = ""
        if not key.isidentifier():
            problem = f"template is {text[:200]!r}"
            raise DFlashError(problem, "choose KEY=VALUE, the value as JSON", "template")
        if reserved(key):
            step = "choose an argument of the model's template"
            raise DFlashError(f"template is {text[:200]!r}", step, "template")
    return arguments
