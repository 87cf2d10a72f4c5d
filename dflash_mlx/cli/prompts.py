"""Files of prompts: JSON lines with id, category, and messages or the prompt alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.json_text import parse_json
from dflash_mlx.session.templates import check_messages

Row = dict[str, Any]


def read_prompts(file: Path, limit: int | None) -> list[Row]:
    """Rows of `file`, at most `limit` of each category; DFlashError for damaged ones."""
    if limit is not None and limit < 1:
        raise DFlashError(f"limit is {limit}", "choose 1 or more", "limit")
    shape = "give JSON lines with id, category and messages"
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DFlashError(f"{file} cannot be read ({error.strerror or error})", shape) from None
    except ValueError as error:
        raise DFlashError(f"{file} is no text in UTF-8 ({error})", shape) from None
    rows: dict[int, Any] = {}
    for i, line in enumerate(lines, start=1):
        try:
            rows |= {i: parse_json(line)} if line.strip() else {}
        except ValueError as error:
            raise DFlashError(f"line {i} of {file} is no JSON ({error})", shape) from None
    taken: dict[str, list[Row]] = {}
    for i, row in rows.items():
        if not isinstance(row, dict) or not isinstance(row.get("category"), str):
            raise DFlashError(f"line {i} of {file} has no category", "give each row one")
        if isinstance(row.get("prompt"), str) and "messages" not in row:
            row["messages"] = [{"role": "user", "content": row["prompt"]}]
        row["messages"] = check_messages(row.get("messages"), f"line {i} of {file}")
        taken.setdefault(row["category"], []).append(row)
    if not taken:
        raise DFlashError(f"{file} holds no prompts", "give JSON lines with messages")
    return [row for category in taken.values() for row in category[:limit]]
