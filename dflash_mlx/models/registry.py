"""Which drafter goes with which target: the public pairs of models.toml, found by name."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from dflash_mlx.engine.pair import Advice

_FILE = Path(__file__).parent / "models.toml"
_CACHED = re.compile(r"^models--.+--(?P<name>.+)$")  # a repository in the Hugging Face cache
_BITS = r"\d+(?:\.\d+)?-?(?:bits?|bpw)|int\d|q\d"
_FLOATS = r"b?float(?:16|32)|bf16|(?:mx|nv)?fp\d+"
_RECIPES = r"mlx|gs\d+|dwq(?:-\d{6})?|awq|gptq|optiq"
_QUANTISED = re.compile(rf"(?:-(?:{_BITS}|{_FLOATS}|{_RECIPES}))+$")


@dataclass(frozen=True)
class Entry:
    """A public pair; models.toml says what the fields mean."""

    targets: tuple[str, ...]
    drafter: str
    second_drafter: str | None = None
    method: str = "auto"
    block_size: int | None = None
    notes: str = ""

    @property
    def name(self) -> str:
        """Of its target, for lists."""
        return self.targets[0]

    @property
    def advice(self) -> Advice:
        """How the pair is best used."""
        return Advice(self.method, self.block_size)


@cache
def entries() -> tuple[Entry, ...]:
    """All pairs, in the order of the file."""
    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))["pair"]
    return tuple(Entry(**{**row, "targets": tuple(row["targets"])}) for row in rows)


def find(name: str) -> Entry | None:
    """The entry of a target, None where it has none.

    name: a Hugging Face id or a folder. Its last part counts, whoever the owner is, without upper
    case and without what names a quantisation or a dtype at its end. The whole rest must be equal:
    another release, size or tuning is another model.
    """
    wanted = _normalised(name)
    return next((e for e in entries() if wanted in map(_normalised, e.targets)), None)


def advice(target: str, drafter: str) -> Advice:
    """For this pair, as far as it is known; names as of `find`, of the drafter likewise."""
    entry = find(target)
    is_its = entry is not None and _normalised(entry.drafter) == _normalised(drafter)
    return entry.advice if entry is not None and is_its else Advice()


def _normalised(name: str) -> str:
    parts = [part for part in re.split(r"[/\\]", name) if part]
    cached = next((found["name"] for part in parts if (found := _CACHED.match(part))), None)
    last = cached or (parts[-1] if parts else "")
    return _QUANTISED.sub("", last.lower().replace("_", "-"))
