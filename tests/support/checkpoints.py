"""Drafter folders in the native layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.reference_dflash import random_drafter, tiny_drafter_config, write_drafter_folder


def write(folder: Path, config: dict[str, Any] | None = None) -> Path:
    config = config or tiny_drafter_config()
    return write_drafter_folder(folder, config, random_drafter(config))


def write_config(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without(*names: str) -> dict[str, Any]:
    """The tiny config without these fields; a dot leads into dflash_config."""
    config = tiny_drafter_config()
    for name in names:
        part = config["dflash_config"] if "." in name else config
        del part[name.rpartition(".")[2]]
    return config


def dflash(**changes: Any) -> dict[str, Any]:
    """The tiny config with these fields of dflash_config."""
    config = tiny_drafter_config()
    return {**config, "dflash_config": {**config["dflash_config"], **changes}}
