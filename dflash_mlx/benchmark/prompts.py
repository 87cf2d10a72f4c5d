"""Prompts as tokens, padded with the text of other prompts where a long context is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from dflash_mlx.cli.prompts import Row
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.session.templates import prompt_tokens

_TRIES = 8  # corrections until a padded prompt has its length


@dataclass(frozen=True)
class Question:
    """A prompt as the model gets it.

    category: what its figures are grouped by. context: the length in tokens that it was to have.
    """

    id: str
    category: str
    tokens: list[int]
    context: int | None = None


def read_contexts(text: str | None) -> list[int]:
    """Lengths in tokens from comma-separated text; DFlashError for anything else."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise DFlashError(f"the context is {part!r}", "give whole numbers of tokens, 1 or more")
    return [int(part) for part in parts]


def questions(
    tokenizer: Any, rows: Sequence[Row], contexts: Sequence[int], source: Sequence[Row]
) -> list[Question]:
    """Every row once, or once for every length in `contexts`.

    With several lengths they are the categories, so that each has figures of its own. A prompt that
    is longer already stays as it is. source: rows whose text pads the others.
    """
    if not contexts:
        return [Question(_id(row), row["category"], _tokens(tokenizer, row)) for row in rows]
    result = []
    for row in rows:
        for length in contexts:
            category = row["category"] if len(contexts) == 1 else f"{length} tokens"
            tokens = pad(tokenizer, row, length, source)
            result.append(Question(_id(row), category, tokens, length))
    return result


def pad(tokenizer: Any, row: Row, length: int, source: Sequence[Row]) -> list[int]:
    """The row's prompt as `length` tokens, template included, or a few less.

    The user turns of the rows after it in `source`, in order and from the start again at the end,
    are put before its own last turn, in one message. Its own text is never among them. Raises
    DFlashError where there is no other text.
    """
    tokens = _tokens(tokenizer, row)
    if len(tokens) >= length:
        return tokens
    filler = _filler(tokenizer, row, source, length)
    size = length - len(tokens)
    for _ in range(_TRIES):
        tokens = _tokens(tokenizer, _behind(tokenizer.decode(filler[:size]), row))
        if len(tokens) == length:
            return tokens
        size = max(0, size + length - len(tokens))
    while len(tokens) > length:  # texts can have no encoding of exactly this length
        size -= 1
        tokens = _tokens(tokenizer, _behind(tokenizer.decode(filler[: max(0, size)]), row))
    return tokens


def _filler(tokenizer: Any, row: Row, source: Sequence[Row], length: int) -> list[int]:
    """At least `length` tokens of other rows' text."""
    own = _text(row)
    at = next((i for i, other in enumerate(source) if other == row), 0)
    texts = [_text(other) for other in (*source[at:], *source[:at])]
    others = [text for text in texts if text not in ("", own)]
    if not others:
        raise DFlashError("there is no other prompt to pad with", "leave --context out")
    result: list[int] = []
    for text in cycle(others):
        if len(result) >= length:
            return result
        result += tokenizer.encode(text + "\n\n", add_special_tokens=False)
    raise AssertionError("a cycle does not end")


def _behind(text: str, row: Row) -> Row:
    """The row with `text` before its last message."""
    text = text.strip("\ufffd").strip()  # a character that was cut in half
    if not text:
        return row
    *before, last = row["messages"]
    content = f"{text}\n\n{last['content']}"
    return {**row, "messages": [*before, {**last, "content": content}]}


def _text(row: Row) -> str:
    return "\n\n".join(m["content"] for m in row["messages"] if m["role"] == "user").strip()


def _tokens(tokenizer: Any, row: Row) -> list[int]:
    return prompt_tokens(tokenizer, row["messages"], None, raw=False)


def _id(row: Row) -> str:
    return str(row.get("id", ""))


def describe_lengths(asked: Sequence[Question]) -> dict[str, Any]:
    """How long the prompts are in fact, in tokens, for the report."""
    lengths = [len(question.tokens) for question in asked]
    longer = sum(q.context is not None and len(q.tokens) > q.context for q in asked)
    contexts = sorted({q.context for q in asked if q.context is not None})
    return {
        "asked": contexts,
        "longer_than_asked": longer,
        "shortest": min(lengths),
        "longest": max(lengths),
    }
