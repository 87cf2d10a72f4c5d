"""JSON of files and command lines that users write."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str) -> Any:
    """What `text` stands for; ValueError for anything but JSON of a bearable depth.

    A byte order mark, as editors on Windows put before it, is no part of the text.
    """
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
