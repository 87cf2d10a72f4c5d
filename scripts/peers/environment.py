"""Environments of their own, in which the others are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers.table import ENVIRONMENTS, OURS

FIRST = Path(__file__).parent / "first"
_VERSIONS = (
    "import importlib.metadata as m, json; "
    "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
)


class PeerError(Exception):
    """Why a peer has no figures, in a sentence."""


@contextmanager
def started(
    names: Sequence[str], start: Callable[[str], Any], failed: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Those that run, ended at last; why others do not goes to `failed`."""
    running: dict[str, Any] = {}
    try:
        for name in names:
            print(f"starting {name}", file=sys.stderr)
            try:
                running[name] = start(name)
            except PeerError as error:
                failed[name] = str(error)
        yield running
    finally:
        for each in running.values():
            each.end()


def python_of(name: str, folder: Path, given: Path | None = None) -> Path:
    """The Python of an environment, made in `folder` where it is missing; PeerError if it fails.

    given: one to use in place of the common one.
    """
    if name == OURS:
        return Path(sys.executable)
    if given is not None and name == "common":
        return given
    place = folder / name
    python, stamp = place / "bin" / "python", place / "installed.json"
    wanted = json.dumps(ENVIRONMENTS[name])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"installing {name} in {place}", file=sys.stderr)
    _run([sys.executable, "-m", "venv", str(place)], folder)
    for words in ENVIRONMENTS[name]:
        _run([str(python), "-m", "pip", "install", "--no-input", "-q", *words], folder)
    stamp.write_text(wanted)
    return python


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    with open(folder / "pip.log", "a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}")
    if done.returncode:
        raise PeerError(f"it cannot be installed ({last_line(done.stderr) or done.returncode})")


def last_line(text: str) -> str:
    """The last one that says something, shortened; pip's hints and traces left out."""
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if line and not line.startswith(("[notice]", "WARNING", "^"))]
    return said[-1][:200] if said else ""


def versions_of(python: Path) -> dict[str, str]:
    """Of all packages, by name."""
    found: dict[str, str] = json.loads(subprocess.check_output([str(python), "-c", _VERSIONS]))
    return found


def variables(name: str, home: Path) -> Mapping[str, str]:
    """The environment variables of a process in an environment.

    home: what it stores lies there, and not among the user's files; it reaches no hub.
    """
    if name == OURS:
        return os.environ
    home.mkdir(parents=True, exist_ok=True)
    own = {"PYTHONPATH": str(FIRST), "HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own, "TOKENIZERS_PARALLELISM": "false"}
