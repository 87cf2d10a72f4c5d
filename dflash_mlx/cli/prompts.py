"""Files of prompts: JSON lines, or a list, of our rows or of published data sets as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_mlx.cli.options import read_stdin
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.text import parse_json, read_text
from dflash_mlx.session.templates import check_messages

Row = dict[str, Any]

STDIN = Path("-")


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


def read_prompts(source: Path) -> list[Row]:
    """Rows of a file, of standard input, or of all .json and .jsonl files in a folder.

    Those of published data sets have the file's name without its ending as their category; rows of
    a file are in the order of their categories. Raises DFlashError for damaged rows.
    """
    if source.is_dir():
        files = sorted(file for file in source.iterdir() if file.suffix in (".json", ".jsonl"))
        if not files:
            what = f"{source} holds no .json or .jsonl files"
            raise DFlashError(what, "give a file of prompts, or a folder of such files")
        return [row for file in files for row in read_prompts(file)]
    file = name_of(source)
    shape = "give JSON lines with id, category and messages"
    text = read_stdin() if source == STDIN else read_text(source, shape)
    rows = []
    for where, given in _parsed(text, file, shape).items():
        row = _adapted(Path(file).stem, given, where)
        if not isinstance(row, dict) or not isinstance(row.get("category"), str):
            raise DFlashError(f"{where} has no category", "give each row one")
        if isinstance(row.get("prompt"), str) and "messages" not in row:
            row["messages"] = [{"role": "user", "content": row["prompt"]}]
        row["messages"] = check_messages(row.get("messages"), where)
        rows.append(row)
    if not rows:
        raise DFlashError(f"{file} holds no prompts", "give JSON lines with messages")
    return first_of_each(rows)


def _adapted(category: str, row: Any, where: str) -> Any:
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


def _parsed(text: str, file: str, shape: str) -> dict[str, Any]:
    """What stands where: in every line, or in a list that is the whole file."""
    if text.lstrip("\ufeff \t\r\n").startswith("["):
        try:
            listed = parse_json(text)
        except ValueError as error:
            raise DFlashError(f"{file} is not a list in JSON ({error})", shape) from None
        return {f"entry {i} of {file}": row for i, row in enumerate(listed, start=1)}
    found: dict[str, Any] = {}
    for i, line in enumerate(text.split("\n"), start=1):
        where = f"line {i} of {file}"
        try:
            found |= {where: parse_json(line)} if line.strip() else {}
        except ValueError as error:
            raise DFlashError(f"{where} is not JSON ({error})", shape) from None
    return found


def first_of_each(rows: Sequence[Row], limit: int | None = None) -> list[Row]:
    """Rows by category, at most `limit` of each; DFlashError for a limit below 1."""
    if limit is not None and limit < 1:
        raise DFlashError(f"limit is {limit}", "choose 1 or more", "limit")
    taken: dict[str, list[Row]] = {}
    for row in rows:
        taken.setdefault(row["category"], []).append(row)
    return [row for category in taken.values() for row in category[:limit]]


def name_of(source: Path) -> str:
    """What a file of prompts is called in sentences."""
    return "standard input" if source == STDIN else str(source)
