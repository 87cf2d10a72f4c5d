"""Texts that users write and read: JSON, amounts of bytes, tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dflash_mlx.core.errors import DFlashError


def amount(count: float) -> str:
    """As 98.4 MB, 2.28 GB; in thousands, as disks and downloads are told."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{count / 1000:.1f} kB" if count else "0 kB"


def counted(number: int, what: str) -> str:
    """A number with its noun."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, its columns aligned; rows that are shorter than the header end in empty cells."""
    columns = [*zip_longest(header, ["---"] * len(header), *rows, fillvalue="")]
    widths = [max(map(len, cells)) for cells in columns]
    lines = (map(str.ljust, cells, widths) for cells in zip(*columns, strict=True))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def parse_json(text: str) -> Any:
    """What `text` stands for; ValueError, saying where, for anything but JSON of bearable depth.

    A byte order mark, as editors on Windows put before it, is no part of the text.
    """
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        raise ValueError(f"see line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_text(file: Path, next_step: str) -> str:
    """A file of UTF-8, line ends as they are; DFlashError with this next step for any other."""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        what = f"{file} cannot be read ({getattr(error, 'strerror', None) or error})"
        raise DFlashError(what, next_step) from None


def read_json_file(file: Path, next_step: str) -> Any:
    """What a file of JSON holds; DFlashError with this next step where it holds something else."""
    try:
        return parse_json(read_text(file, next_step))
    except ValueError as error:
        raise DFlashError(f"{file} is not JSON ({error})", next_step) from None
