"""Arguments of a chat template, as a command line gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.json_text import parse_json

_RESERVED = (  # what the call of a chat template decides itself
    *("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding"),
    *("add_generation_prompt", "continue_final_message", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)


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
