"""The clipboard of the machine, by the program that it has for that."""

from __future__ import annotations

import os
import shutil
import subprocess

# Each with the variable without which it has no screen to copy to.
_PROGRAMS = (
    ("", ("pbcopy",)),
    ("WAYLAND_DISPLAY", ("wl-copy",)),
    ("DISPLAY", ("xclip", "-selection", "clipboard")),
)
_PATIENCE = 2.0  # seconds


def copied(text: str) -> bool:
    """Copy `text`; False where no program can, or the user sits at another machine (SSH)."""
    if any(name in os.environ for name in ("SSH_CONNECTION", "SSH_TTY")):
        return False
    return any(
        _ran(command, text)
        for variable, command in _PROGRAMS
        if (not variable or os.environ.get(variable)) and shutil.which(command[0])
    )


def _ran(command: tuple[str, ...], text: str) -> bool:
    pipe, nowhere = text.encode("utf-8", "replace"), subprocess.DEVNULL  # xclip stays, and holds it
    try:
        subprocess.run(
            command, input=pipe, stdout=nowhere, stderr=nowhere, timeout=_PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return True
