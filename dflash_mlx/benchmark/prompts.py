"""Prompts of our files and of published data sets as they are; as tokens, padded where wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dflash_mlx.cli.prompts import Row, name_of, read_prompts
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.session.templates import prompt_tokens

_TRIES = 8  # corrections until a padded prompt has its length

# What asks in published data sets, and what stands below it where a row has that.
QUESTIONS = {
    "turns": "",  # MT-Bench, and other sets as drafters' programs keep them; the first turn
    "question": "",  # GSM8K
    "problem": "",  # MATH-500, AIME25
    "question_content": "starter_code",  # LiveCodeBench
    "instruction": "input",  # Alpaca
    "prompt": "",  # HumanEval, MBPP (sanitised); MT-Bench elsewhere
    "text": "",  # MBPP
}
_IDS = ("id", "task_id", "question_id", "unique_id", "prompt_id")


@dataclass(frozen=True)
class BenchmarkPrompt:
    """A prompt as the model gets it."""

    id: str
    category: str  # by which figures are grouped
    tokens: list[int]
    context: int | None = None  # tokens that it was to have


def read_rows(source: Path) -> list[Row]:
    """Rows of a file, of standard input, or of all .json and .jsonl files in a folder.

    Those of published data sets have the file's name without its ending as their category. Raises
    DFlashError for rows of unknown fields, and as `read_prompts` does.
    """
    if not source.is_dir():
        return read_prompts(source, partial(adapted, Path(name_of(source)).stem))
    files = sorted(file for file in source.iterdir() if file.suffix in (".json", ".jsonl"))
    if not files:
        what = f"{source} holds no .json or .jsonl files"
        raise DFlashError(what, "give a file of prompts, or a folder of such files")
    return [row for file in files for row in read_rows(file)]


def adapted(category: str, row: Any, where: str) -> Any:
    """A row of a published data set as one of ours; what may be one of ours stays as it is."""
    is_ours = not isinstance(row, dict) or "messages" in row
    if is_ours or ("category" in row and not isinstance(row.get("prompt"), list | None)):
        return row
    name = next((name for name in QUESTIONS if row.get(name)), "")
    asked = row.get(name)
    asked = asked[0] if isinstance(asked, list) else asked
    if not isinstance(asked, str):
        known = ", ".join(("messages", *QUESTIONS))
        what = f"{where} has the fields {', '.join(map(str, row))[:200]}, none of which asks a text"
        raise DFlashError(what, f"name the one that does as one of {known}")
    below = row.get(QUESTIONS[name]) or ""
    content = f"{asked}\n\n{below}" if isinstance(below, str) and below else asked
    number = next((str(row[name]) for name in _IDS if row.get(name) is not None), "")
    return {"id": number, "category": category, "prompt": content}


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
    filler, size = _filler(tokenizer, row, source, length), length - len(tokens)
    for _ in range(_TRIES):
        tokens = behind(tokenizer.decode(filler[:size]))
        if len(tokens) == length:
            return tokens
        size = max(0, size + length - len(tokens))
    while len(tokens) > length:  # texts can have no encoding of exactly this length
        size -= 1
        tokens = behind(tokenizer.decode(filler[:size]))
    return tokens


def _filler(tokenizer: Any, row: Row, source: Sequence[Row], length: int) -> list[int]:
    at = source.index(row) if row in source else 0
    texts = [_text(other) for other in (*source[at:], *source[:at])]
    others = [text for text in texts if text not in ("", _text(row))]
    if not others:
        raise DFlashError("there is no other prompt to pad with", "leave --context out")
    around = tokenizer.encode("\n\n".join([*others, ""]), add_special_tokens=False)
    return (around * (1 + length // len(around)))[:length]  # type: ignore[no-any-return]


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
