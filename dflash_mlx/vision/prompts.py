"""Prompts of conversations with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.prompt import Prompt


def read_prompt(
    target: Any, tokenizer: Any, messages: Sequence[dict[str, Any]], **template_options: Any
) -> Prompt:
    """The prompt of a conversation whose messages have pictures."""
    raise DFlashError(f"{target.name} cannot be shown pictures", "leave them out")
