"""What would complete the word at the cursor: a command, a model, or a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from dflash_chat.commands import COMMANDS
from dflash_mlx.client import amount, available_models, installed_memory

MOST = 50  # files that are offered
COMMAND = re.compile(r"/[A-Za-z]*")
_FILE = re.compile(r'(?<!\S)@("[^"]*|[^"\s]*)$')

Choice = tuple[str, str]  # what to type, and its meaning


def complete(line: str) -> tuple[str, list[Choice]]:
    """The word at the end of `line`, and what it may become; what it is already comes first."""
    if COMMAND.fullmatch(line):
        name = line[1:].lower()
        known = sorted(COMMANDS, key=lambda command: command.name != name)
        known = [command for command in known if command.name.startswith(name)]
        told = (f"{c.argument}: {c.help}" if c.needs_argument else c.help for c in known)
        named = (f"/{c.name}{' ' * c.needs_argument}" for c in known)
        return line, [*zip(named, told, strict=True)]
    if file := _FILE.search(line):
        return file[0], [*_files(file[1])]
    if not line.startswith("/model "):
        return "", []
    installed, word = installed_memory(), line.partition(" ")[2]
    models = [m for m in available_models(Path()) if word.lower() in m.name.lower()]
    models.sort(key=lambda m: (not m.here, not m.fits(installed)))
    return word, [(model.name, model.terms(installed)) for model in models]


def _files(typed: str) -> Iterator[Choice]:
    """Those of the folder that is named as far as `typed` goes; hidden ones behind a dot."""
    folder, slash, begin = typed.lstrip('"').rpartition("/")
    try:
        with os.scandir(Path(folder + slash).expanduser()) as entries:
            there = {e.name: e for e in entries if e.name.startswith(begin) and '"' not in e.name}
        shown = (n for n in there if n.isprintable() and (n[0] != "." or begin))
        for name in sorted(shown)[:MOST]:
            path, size = f"{folder}{slash}{name}", there[name].stat().st_size
            quote = '"' if " " in path or typed.startswith('"') else ""
            if there[name].is_dir():
                yield f"@{quote}{path}/", "folder"
            else:
                yield f"@{quote}{path}{quote} ", amount(size)
    except (OSError, RuntimeError, ValueError):  # no such folder or user, or a link that is broken
        return
