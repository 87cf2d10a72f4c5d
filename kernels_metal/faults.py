"""What a compiler or a GPU says of a kernel that does not run: the line that tells, and a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_MARK = "error:"  # of a compiler, before what is wrong; lines with a caret and hints follow
Keep = Callable[[Path, str], bool]  # writes a text to a file, whole and down to the disk: whether


def first_error(said: str) -> str:
    """The first line with a compiler's error; without any the last, where a traceback says it."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in lines if _MARK in line), lines[-1] if lines else "")


@dataclass(frozen=True)
class Faults:
    """Keeps what was said in a folder, and tells the line that matters with the file's name."""

    folder: Path
    keep: Keep

    def report(self, said: str) -> str:
        """The first error; all of it is in the file named behind it, where it has more lines."""
        told = first_error(said)
        if told == said.strip():
            return told
        file = self.folder / f"{hashlib.sha256(said.encode()).hexdigest()[:12]}.txt"
        return f"{told} (all of it is in {file})" if self.keep(file, said) else told
