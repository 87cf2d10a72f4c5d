"""The registry, models.toml: the public pairs, which drafter goes with which target."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from dflash_mlx.engine.pair import Preset

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
    others: tuple[tuple[str, str], ...] = ()
    method: str = "auto"
    template: tuple[tuple[str, Any], ...] = ()
    notes: str = ""
    billions: float = 0
    verified: bool = False
    alternatives: tuple[str, ...] = ()
    pickled: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.targets[0]

    @property
    def more(self) -> str:
        others = (f"{name} ({family})" for family, name in self.others)
        return ", ".join((*others, *self.alternatives))

    @property
    def preset(self) -> Preset:
        return Preset(self.method, self.template)


@cache
def entries() -> tuple[Entry, ...]:
    """All pairs, in the order of the file."""
    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))["pair"]
    return tuple(_entry(**row) for row in rows)


def _entry(**row: Any) -> Entry:
    tables = {key: tuple(value.items()) for key, value in row.items() if isinstance(value, dict)}
    lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return Entry(**(row | tables | lists))


def registered(name: str) -> Entry | None:
    """The entry of a target, by its Hugging Face id or folder; None where it has none.

    The last part counts, whatever its case and what names a quantisation or a dtype at its end.
    """
    wanted = _normalised(name)
    return next((e for e in entries() if wanted in map(_normalised, e.targets)), None)


def instead_of(drafter: str) -> str | None:
    """A drafter in .safetensors files for the target of one that is a pickle; None if unknown."""
    pickled = (pair for entry in entries() for pair in entry.pickled)
    return next((other for name, other in pickled if same_weights(name, drafter)), None)


def same_weights(one: str, other: str) -> bool:
    """Whether two names differ in owner, case and quantisation alone, as of `registered`."""
    return _normalised(one) == _normalised(other)


def without_quantisation(name: str) -> str:
    """The last part of a name, without what names a quantisation or a dtype at its end."""
    return re.sub(_QUANTISED.pattern, "", name.rpartition("/")[2], flags=re.IGNORECASE)


def preset_for(target: str, drafter: str) -> Preset:
    """For this pair, as far as it is known; names as of `registered`, of the drafter likewise."""
    entry = registered(target)
    is_its = entry is not None and _normalised(entry.drafter) == _normalised(drafter)
    return entry.preset if entry is not None and is_its else Preset()


def _normalised(name: str) -> str:
    parts = [part for part in re.split(r"[/\\]", name) if part]
    cached = next((found["name"] for part in parts if (found := _CACHED.match(part))), None)
    last = cached or (parts[-1] if parts else "")
    return _QUANTISED.sub("", last.lower().replace("_", "-"))
