"""Which models can be chosen: the built-in pair, local folders, the Hugging Face cache."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from dflash_chat import memory
from dflash_chat.figures import gigabytes
from dflash_mlx import DFlashError, PairConfig
from dflash_mlx.default_model import DEFAULT_TARGET
from dflash_mlx.drafters.checkpoint import check_fit, read_config
from dflash_mlx.drafters.network import NetworkConfig
from dflash_mlx.resolve import DEFAULT_MODEL

# Published pairs whose drafter was made for exactly this target.
PUBLISHED = {
    "Qwen/Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
    "Qwen/Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16",
}
_DEFAULT_BITS = 5  # per weight of the built-in model's file, which becomes float32


@dataclass(frozen=True)
class Candidate:
    """A model to choose. needs: bytes of memory, 0 where unknown. place: where it comes from."""

    name: str
    config: PairConfig
    place: str
    needs: int = 0

    def line(self, there: int) -> str:
        """For a list: what it is, its drafter, and memory needed against memory there."""
        parts = [self.name, self.place]
        if self.config.model is not None:
            parts.append(f"drafter {self.config.drafter}" if self.config.drafter else "no drafter")
        if self.needs:
            fits = "" if self.needs <= there else ", does not fit"
            parts.append(f"needs {gigabytes(self.needs)} of {gigabytes(there)}{fits}")
        return "  ".join(parts)


@dataclass(frozen=True)
class Folder:
    """A model folder on this machine. name: a Hugging Face id or a path; config: config.json."""

    name: str
    path: Path
    config: dict[str, Any]
    place: str


def candidates(here: Path) -> list[Candidate]:
    """Everything that can be chosen. here: the folder whose subfolders may be models."""
    folders = [*local_folders(here), *cached_folders()]
    drafters = [folder for folder in folders if "dflash_config" in folder.config]
    models = [folder for folder in folders if "dflash_config" not in folder.config]
    found = [built_in(), *(with_drafter(model, drafters) for model in models)]
    known = {candidate.name for candidate in found}
    published = (
        Candidate(model, PairConfig(model, drafter), "to download")
        for model, drafter in PUBLISHED.items()
        if model not in known
    )
    return [*found, *published]


def built_in() -> Candidate:
    """The default pair."""
    needs = int(DEFAULT_TARGET.size * 32 / _DEFAULT_BITS * memory.HEADROOM)
    return Candidate(DEFAULT_MODEL, PairConfig(), "built in", needs)


def with_drafter(model: Folder, drafters: Sequence[Folder]) -> Candidate:
    """The model with the first drafter that fits it."""
    drafter = next((d.name for d in drafters if _fits(d, model)), None)
    needs = memory.needed(model.path, bool(mx.default_device() == mx.Device(mx.cpu)))
    return Candidate(model.name, PairConfig(model.name, drafter), model.place, needs)


def local_folders(here: Path) -> list[Folder]:
    """Model folders in `here` and in its folder `models`."""
    found = []
    for parent in (here, here / "models"):
        try:
            children = sorted(child for child in parent.iterdir() if child.is_dir())
        except OSError:
            continue
        found += _folders((str(child), child) for child in children)
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
    return _folders(newest, "Hugging Face cache")


def near_names(typed: str) -> list[str]:
    """Names like the one that was typed, the best first."""
    known = [DEFAULT_MODEL, *PUBLISHED, *(f.name for f in cached_folders())]
    known += [folder.name for folder in local_folders(Path())]
    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(typed.lower(), by_lower, n=2, cutoff=0.7)
    return [by_lower[name] for name in near if by_lower[name] != typed]


def _folders(named: Iterable[tuple[str, Path]], place: str = "local folder") -> list[Folder]:
    found = []
    for name, path in named:
        try:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(config, dict) and any(path.glob("*.safetensors")):
            found.append(Folder(name, path, config, place))
    return found


def _fits(drafter: Folder, model: Folder) -> bool:
    try:
        config: NetworkConfig = read_config(drafter.path)
        check_fit(config, {**model.config, **model.config.get("text_config", {})}, model.name)
    except (DFlashError, TypeError):
        return False
    return True
