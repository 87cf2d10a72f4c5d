"""Texts that users write and read: JSON, amounts of bytes."""

from __future__ import annotations

import json
from typing import Any


def amount(count: float) -> str:
    """As 98.4 MB, 2.28 GB; in thousands, as disks and downloads are told."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{count / 1000:.1f} kB" if count else "0 kB"


def parse_json(text: str) -> Any:
    """What `text` stands for; ValueError for anything but JSON of a bearable depth.

    A byte order mark, as editors on Windows put before it, is no part of the text.
    """
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
