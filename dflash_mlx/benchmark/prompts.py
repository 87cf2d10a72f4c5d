"""Prompts as tokens, padded where wanted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mlx.cli.prompts import Row
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.session.templates import prompt_tokens


@dataclass(frozen=True)
class BenchmarkPrompt:
    """A prompt as the model gets it."""

    id: str
    category: str  # by which figures are grouped
    tokens: list[int]
    context: int | None = None  # tokens that it was to have


def read_contexts(text: str | None) -> list[int]:
    """Lengths in tokens from comma-separated text; DFlashError for anything else."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise DFlashError(f"the context is {part!r}", "give whole numbers of tokens, 1 or more")
    return [int(part) for part in parts]


def questions(
    tokenizer: Any,
    rows: Sequence[Row],
    contexts: Sequence[int],
    source: Sequence[Row],
    template: Mapping[str, Any] | None = None,
) -> list[BenchmarkPrompt]:
    """Every row once, or once for every length in `contexts`.

    With several lengths they are the categories, so that each has figures of its own. source: rows
    whose text pads the others. template: arguments of the chat template.
    """
    result = []
    for row in rows:
        for length in contexts or (None,):
            category = f"{length} tokens" if len(contexts) > 1 else row["category"]
            tokens = pad(tokenizer, row, length or 0, source, template)
            result.append(BenchmarkPrompt(str(row.get("id", "")), category, tokens, length))
    return result


def pad(
    tokenizer: Any,
    row: Row,
    length: int,
    source: Sequence[Row],
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """The row's prompt as `length` tokens, template included, or a few less.

    The user turns of the rows after it in `source`, and then of those before it, are put in front
    of its own last turn, in one message. Raises DFlashError where there is no other text.
    """

    def behind(text: str) -> list[int]:
        *before, last = row["messages"]
        text = text.strip("\ufffd").strip()  # a character that was cut in half
        content = f"{text}\n\n{last['content']}" if text else last["content"]
        messages = [*before, {**last, "content": content}]
        return prompt_tokens(tokenizer, messages, template=template)

    tokens = behind("")
    if len(tokens) >= length:
        return tokens
    filler = _filler(tokenizer, row, source, length)

    def padded(size: int) -> list[int]:
        return behind(tokenizer.decode(filler[:size]))

    # texts can have no encoding of exactly this length
    return padded(bisect_right(range(len(filler)), length, key=lambda size: len(padded(size))) - 1)


def _filler(tokenizer: Any, row: Row, source: Sequence[Row], length: int) -> list[int]:
    at = source.index(row) if row in source else 0
    texts = [_text(other) for other in (*source[at:], *source[:at])]
    others = [text for text in texts if text not in ("", _text(row))]
    if not others:
        raise DFlashError("there is no other prompt to pad with", "leave --context out")
    around = tokenizer.encode("\n\n".join([*others, ""]), add_special_tokens=False)
    # Twice as much, for where two texts meet, tokens of both can become one.
    return around * (1 + 2 * length // len(around))  # type: ignore[no-any-return]


def _text(row: Row) -> str:
    return "\n\n".join(m["content"] for m in row["messages"] if m["role"] == "user").strip()


def describe_lengths(asked: Sequence[BenchmarkPrompt]) -> dict[str, Any]:
    """How long the prompts are in fact, in tokens, for the report."""
    lengths = [len(question.tokens) for question in asked]
    return {
        "asked": sorted({q.context for q in asked if q.context is not None}),
        "longer_than_asked": sum(len(q.tokens) > q.context for q in asked if q.context is not None),
        "shortest": min(lengths),
        "longest": max(lengths),
    }
