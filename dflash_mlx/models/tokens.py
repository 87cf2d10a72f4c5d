"""What is known of a tokenizer: its likely tokens, so that drafts need no others; its template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, TemplateError, meta

from dflash_mlx.core.errors import DFlashError

LIKELY_TOKENS = "likely_tokens.npy"  # beside a drafter's weights: ids, the most frequent first
LEAST = 8192  # tokens, where nobody asks for fewer
SHARE = 4  # of the vocabulary one part in so many is drafted from, unless asked otherwise


def likely_tokens(folder: Path, tokenizer: Any, vocabulary: int) -> npt.NDArray[np.int64]:
    """All tokens [V], the likeliest first.

    By the frequencies beside the drafter. Then, or without such a file, what ends an answer, and
    the others by their ids: a tokenizer makes frequent tokens first. DFlashError for another file.
    """
    file = folder / LIKELY_TOKENS
    try:
        counted = np.load(file).astype(np.int64)
    except FileNotFoundError:
        counted = np.zeros(0, np.int64)
    except (OSError, ValueError, EOFError, AttributeError, TypeError) as error:
        raise DFlashError(f"{file} cannot be read ({error})", "delete it") from None
    if counted.ndim != 1 or np.any((counted < 0) | (counted >= vocabulary)):
        raise DFlashError(f"{file} has ids that are no tokens", "delete it")
    ends = sorted(token for token in tokenizer.eos_token_ids if token < vocabulary)
    order = np.concatenate([ends, counted, np.arange(vocabulary)]).astype(np.int64)
    _, first = np.unique(order, return_index=True)
    return order[np.sort(first)]


def draft_size(asked: int | None, vocabulary: int) -> int:
    """How many of them drafts are made of; DFlashError for more than there are."""
    if asked is not None and asked > vocabulary:
        raise DFlashError(
            f"draft_vocabulary is {asked}, but the model has {vocabulary} tokens",
            f"choose 1 to {vocabulary}",
            "draft_vocabulary",
        )
    return asked or max(min(LEAST, vocabulary), vocabulary // SHARE)


def unread_arguments(tokenizer: Any, names: Iterable[str]) -> list[str]:
    """Those of `names` that the model's chat template does not read; all without a template."""
    jinja = Environment(extensions=["jinja2.ext.loopcontrols"])  # as transformers reads them
    if callable(getattr(tokenizer, "_chat_template", None)):
        return []  # a template in Python, of mlx-lm's own
    renamed = {"enable_thinking": getattr(tokenizer, "_thinking_kwarg", None)}  # by mlx-lm
    source = getattr(tokenizer, "chat_template", None)
    sources = source.values() if isinstance(source, dict) else [source or ""]
    read: set[str] = set()
    for text in sources:
        try:
            read |= meta.find_undeclared_variables(jinja.parse(text))
        except TemplateError:
            read |= set(names)  # what cannot be looked into may read anything
    return [name for name in names if (renamed.get(name) or name) not in read]
