"""The choices between kernels and stock MLX that were raced on this machine, kept on disk.

`kernel_choices()` has those of every model that was raced here, `pair.target.kernels.choices` those
of a loaded one together with what could not be raced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import platformdirs

from dflash_mlx.system.files import keep_text
from dflash_mlx.system.machine import model_key
from kernels_metal.dispatch import Choice, table_from_json

_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)


class Table:
    """The choices for one model on this machine: a file in the cache folder beside pass times.

    name, parameters: of the target. A file that cannot be read or written is done without.
    """

    def __init__(
        self,
        name: str,
        parameters: Callable[[], Iterable[tuple[str, mx.array]]],
        folder: Path | None = None,
    ) -> None:
        self._name, self._parameters, self._folder = name, parameters, folder or default_folder()

    @cached_property
    def file(self) -> Path:
        """One for each machine, model and set of versions."""
        return self._folder / f"{model_key(self._name, self._parameters())}.json"

    def load(self) -> dict[str, Choice]:
        """What was chosen before, empty where nothing fits or can be read."""
        try:
            return _read(self.file)[1]
        except _DAMAGED:
            return {}

    def save(self, table: dict[str, Any]) -> None:
        """Keep what `Dispatch.to_json` gave."""
        keep_text(self.file, json.dumps({"model": self._name, **table}, indent=1))


def kernel_choices(folder: Path | None = None) -> dict[str, dict[str, Choice]]:
    """The stored choices that hold for these kernels and this MLX, by model, then by case.

    A case reads op/rows/shape/bits/dtype/GPU. Empty where nothing was raced, as without Metal.
    """
    found: dict[str, dict[str, Choice]] = {}
    for file in sorted((folder or default_folder()).glob("*.json")):
        try:
            name, choices = _read(file)
        except _DAMAGED:
            continue
        if choices:
            found.setdefault(name, {}).update(choices)
    return found


def default_folder() -> Path:
    """In the user's cache."""
    return platformdirs.user_cache_path("dflash-chat") / "kernels"


def _read(file: Path) -> tuple[str, dict[str, Choice]]:
    """A file's model and choices. Raises one of _DAMAGED for a file that `Table` did not write."""
    saved = json.loads(file.read_text(encoding="utf-8"))
    choices = table_from_json(saved)
    for choice in choices.values():
        if not isinstance(choice.kernel, bool) or not isinstance(choice.reason, str):
            raise ValueError("no choice")
    return str(saved["model"]), choices
