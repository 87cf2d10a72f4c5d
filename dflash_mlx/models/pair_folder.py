"""Folders that hold a target with the drafters that fit it, as `dflash_mlx.convert` writes them.

target/ is an mlx-lm model folder, drafter/ a drafter folder, second-drafter/, where there is one,
D2SD's variable-prefix drafter. pair.json has the layout's version, what each was made from, and
what wrote it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.source import Source

FILE = "pair.json"
VERSION = 1
TARGET, DRAFTER, SECOND_DRAFTER = "target", "drafter", "second-drafter"

_CONVERT_AGAIN = "convert the pair again with python -m dflash_mlx.convert"


def is_pair_folder(folder: Path) -> bool:
    """Whether `folder` holds a pair, readable or not; a folder that cannot be entered does not."""
    return os.path.isfile(folder / FILE)  # where `Path.is_file` would raise


def read(folder: Path) -> dict[str, str]:
    """What each of a pair's models was made from, by its folder; the models are not looked at.

    DFlashError where the pair.json is damaged, or one of the folders is missing.
    """
    file = folder / FILE
    raw = Source.of(folder).read_json(FILE, _CONVERT_AGAIN)
    version, names = raw.get("version"), raw.get("made_from")
    if version != VERSION:
        shown = repr(version)[:80]
        raise DFlashError(f"{file} has version {shown}, supported is {VERSION}", _CONVERT_AGAIN)
    known, needed = {TARGET, DRAFTER, SECOND_DRAFTER}, {TARGET, DRAFTER}
    if not isinstance(names, dict) or not needed <= names.keys() <= known:
        raise DFlashError(f"made_from in {file} is {repr(names)[:200]}", _CONVERT_AGAIN)
    for part in names:
        if not os.path.isdir(folder / part):
            raise DFlashError(f"{folder} lacks the folder {part}", _CONVERT_AGAIN)
    return {part: str(name) for part, name in names.items()}


def write(folder: Path, names: dict[str, str], made_with: dict[str, str]) -> None:
    """Write pair.json. names: what each folder was made from; made_with: versions of packages."""
    text = json.dumps({"version": VERSION, "made_from": names, "made_with": made_with}, indent=2)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")
