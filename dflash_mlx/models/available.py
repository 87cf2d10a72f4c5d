"""Which models can be chosen: the built-in pair, local folders, the Hugging Face cache."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models import memory, registry
from dflash_mlx.models.check import check_drafter, check_pair, describe_target
from dflash_mlx.models.names import DEFAULT_MODEL, find_names, shipped_folder
from dflash_mlx.models.pair_folder import is_pair_folder
from dflash_mlx.models.source import TARGET_WEIGHTS, WEIGHTS, Source
from dflash_mlx.models.target_config import is_drafter, language_model
from dflash_mlx.models.weight_files import is_whole


@dataclass(frozen=True)
class AvailableModel:
    """A model to choose.

    place: where it comes from. needs: bytes of memory with its drafters, 0 where unknown. drafter:
    in words. notes: the registry's.
    """

    name: str
    config: PairConfig
    place: str
    needs: int = 0
    drafter: str = ""
    notes: str = ""


@dataclass(frozen=True)
class Folder:
    """A model folder on this machine. name: a Hugging Face id or a path; config: config.json."""

    name: str
    path: Path
    config: dict[str, Any]
    place: str


def available_models(here: Path) -> list[AvailableModel]:
    """Everything that can be chosen. here: the folder whose subfolders may be models."""
    folders = [*local_folders(here), *cached_folders()]
    drafters = [folder for folder in folders if is_drafter(folder.config)]
    models = [folder for folder in folders if not is_drafter(folder.config)]
    default, names = PairConfig(), {drafter.name for drafter in drafters}
    needs = memory.needed_by(find_names(default))
    found = [AvailableModel(DEFAULT_MODEL, default, "built in", needs), *local_pairs(here)]
    found += [on_this_machine(model, drafters) for model in models]
    here_already = {registry.find(folder.name) for folder in models}
    for entry in registry.entries():
        if entry in here_already or shipped_folder(entry.drafter) is not None:
            continue
        words = f"drafter {entry.drafter}" + " (on this machine)" * (entry.drafter in names)
        config, place = PairConfig(entry.name), "to download"
        found.append(AvailableModel(entry.name, config, place, drafter=words, notes=entry.notes))
    return found


def local_pairs(here: Path) -> list[AvailableModel]:
    """Converted pairs in `here` and in its folder `models`."""
    found = []
    for folder in filter(is_pair_folder, _subfolders(here)):
        config = PairConfig(str(folder))
        try:
            needs = memory.needed_by(find_names(config))
        except DFlashError:  # damaged: choosing it says how
            needs = 0
        found.append(AvailableModel(str(folder), config, "converted pair", needs))
    return found


def on_this_machine(model: Folder, drafters: Sequence[Folder]) -> AvailableModel:
    """The model with the registry's drafter, or else the first of `drafters` that fits it."""
    needs, entry = memory.needed(model.path, TARGET_WEIGHTS), registry.find(model.name)
    if entry is not None:
        config, drafter = PairConfig(model.name), entry.drafter
        there = next((d.path for d in drafters if d.name == drafter), shipped_folder(drafter))
        words = f"drafter {drafter}" + ("" if there else ", to download")
    else:
        target = describe_target(language_model(model.config), model.name)
        fitting = (d for d in drafters if not check_pair(target, check_drafter(d.path)).errors)
        there, drafter = next(((d.path, d.name) for d in fitting), (None, ""))
        config = PairConfig(model.name, drafter or None)
        words = f"drafter {drafter}" if drafter else "no drafter"
    needs += memory.needed(there) if there and needs else 0
    notes = "" if entry is None else entry.notes
    return AvailableModel(model.name, config, model.place, needs, words, notes)


def local_folders(here: Path) -> list[Folder]:
    """Model folders in `here` and in its folder `models`."""
    return _folders((str(folder), folder) for folder in _subfolders(here))


def _subfolders(here: Path) -> list[Path]:
    """Also one that may not be entered, or that is a link to such; `Path.is_dir` would raise."""
    found: list[Path] = []
    for parent in (here, here / "models"):
        with suppress(OSError):
            found += sorted(child for child in parent.iterdir() if os.path.isdir(child))
    return found


def cached_folders() -> list[Folder]:
    """Complete models in the Hugging Face cache."""
    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except (CacheNotFound, OSError, ValueError):
        return []
    newest = (
        (repo.repo_id, max(repo.revisions, key=lambda r: r.last_modified).snapshot_path)
        for repo in sorted(repos, key=lambda repo: repo.repo_id)
        if repo.revisions
    )
    return [
        found
        for found in _folders(newest, "Hugging Face cache")
        if is_whole(Source.of(found.path), WEIGHTS if is_drafter(found.config) else TARGET_WEIGHTS)
    ]


def near_names(typed: str) -> list[str]:
    """Names like the one that was typed, the best first."""
    public = (target for entry in registry.entries() for target in entry.targets)
    known = [DEFAULT_MODEL, *public, *(f.name for f in cached_folders())]
    known += [folder.name for folder in local_folders(Path())]
    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(typed.lower(), by_lower, n=2, cutoff=0.7)
    return [by_lower[name] for name in near if by_lower[name] != typed]


def _folders(named: Iterable[tuple[str, Path]], place: str = "local folder") -> list[Folder]:
    found = []
    for name, path in named:
        source = Source.of(path)
        with suppress(DFlashError):  # no model, or a damaged one
            config = source.read_json("config.json")
            if any(file.endswith(".safetensors") for file in source.files):
                found.append(Folder(name, path, config, place))
    return found
