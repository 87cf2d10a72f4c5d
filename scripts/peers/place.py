"""Where everything lies, and the pair that all read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.pair import Folders


@dataclass(frozen=True)
class Place:
    """A folder for all that is made. python: to use in place of an environment that is made."""

    out: Path
    python: Path | None
    folders: Folders
    pair: Mapping[str, Any]  # what our own program is told of the pair, by its settings

    @property
    def environments(self) -> Path:
        made = self.out / "environments"
        made.mkdir(parents=True, exist_ok=True)
        return made

    @property
    def words(self) -> tuple[str, ...]:
        """The pair as options of a command of ours."""
        options = {"model": "--model", "drafter": "--drafter"}
        return tuple(
            word
            for name, option in options.items()
            if (value := self.pair.get(name)) is not None
            for word in (option, str(value))
        )
