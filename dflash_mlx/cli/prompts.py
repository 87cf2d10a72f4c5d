"""Files of prompts: JSON lines, or a list, with id, category, and messages or the prompt alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_mlx.cli.options import read_stdin
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.json_text import parse_json
from dflash_mlx.session.templates import check_messages

Row = dict[str, Any]

STDIN = Path("-")


def read_prompts(
    source: Path, adapt: Callable[[Any, str], Any] = lambda row, where: row
) -> list[Row]:
    """Rows of a file, or of standard input, by category.

    source: `STDIN` for standard input. adapt: makes such a row of any other; it is told where that
    stands. Raises DFlashError for damaged rows.
    """
    file = name_of(source)
    shape = "give JSON lines with id, category and messages"
    try:
        text = read_stdin() if source == STDIN else source.read_text(encoding="utf-8")
    except OSError as error:
        raise DFlashError(f"{file} cannot be read ({error.strerror or error})", shape) from None
    except ValueError as error:
        raise DFlashError(f"{file} is no text in UTF-8 ({error})", shape) from None
    rows = {where: adapt(row, where) for where, row in _parsed(text, file, shape).items()}
    for where, row in rows.items():
        if not isinstance(row, dict) or not isinstance(row.get("category"), str):
            raise DFlashError(f"{where} has no category", "give each row one")
        if isinstance(row.get("prompt"), str) and "messages" not in row:
            row["messages"] = [{"role": "user", "content": row["prompt"]}]
        row["messages"] = check_messages(row.get("messages"), where)
    if not rows:
        raise DFlashError(f"{file} holds no prompts", "give JSON lines with messages")
    return first_of_each(list(rows.values()))


def _parsed(text: str, file: str, shape: str) -> dict[str, Any]:
    """What stands where: in every line, or in a list that is the whole file."""
    if text.lstrip("\ufeff \t\r\n").startswith("["):
        try:
            listed = parse_json(text)
        except ValueError as error:
            raise DFlashError(f"{file} is no list in JSON ({error})", shape) from None
        return {f"entry {i} of {file}": row for i, row in enumerate(listed, start=1)}
    found: dict[str, Any] = {}
    for i, line in enumerate(text.split("\n"), start=1):
        where = f"line {i} of {file}"
        try:
            found |= {where: parse_json(line)} if line.strip() else {}
        except ValueError as error:
            raise DFlashError(f"{where} is no JSON ({error})", shape) from None
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
