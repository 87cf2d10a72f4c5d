"""What was measured, a line of JSON each, so that a run that was stopped goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_mlx.core.errors import DFlashError


class Runs:
    """Lines of a file; the last one may have been cut off by a kill.

    settings: what all lines have to be measured with; DFlashError where some have others.
    """

    def __init__(self, file: Path, **settings: Any) -> None:
        self.file, self.settings, self.lines = file, settings, list[dict[str, Any]]()
        if file.exists():
            text = file.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                file.write_text(whole, encoding="utf-8")
            self.lines = [json.loads(line) for line in whole.splitlines()]
        for line in self.lines:
            for key, value in settings.items():
                if line[key] != value:
                    what = f"{file} was measured with {key} {line[key]!r}, not {value!r}"
                    raise DFlashError(what, "name another folder with --out")

    def has(self, **named: Any) -> bool:
        """Whether there is a line with these values."""
        return any(all(line.get(k) == v for k, v in named.items()) for line in self.lines)

    def add(self, **named: Any) -> None:
        line = {**self.settings, **named}
        self.lines.append(line)
        with open(self.file, "a", encoding="utf-8") as output:
            output.write(json.dumps(line) + "\n")
