"""Where models can be checked before their weights are here: folders, and the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from dflash_mlx.compatibility import HubRepository, LocalFolder
from dflash_mlx.compatibility.model_source import ModelSource
from dflash_mlx.compatibility.whole import TARGET_WEIGHTS, whole_snapshot
from dflash_mlx.errors import DFlashError
from dflash_mlx.resolve import local_folder, resolve_folder, shipped_folder

MODEL = "model"  # the option that names a target


def find_source(name: str, option: str) -> ModelSource:
    """A folder, or the hub's repository where no whole copy of it is here.

    A copy is brought up to date. Where the hub does not answer, everything is downloaded at once,
    or DFlashError says why it cannot be. option: the command-line option that `name` came from.
    """
    folder = (None if option == MODEL else shipped_folder(name)) or local_folder(name, option)
    if folder is not None:
        return LocalFolder(folder)
    pattern = TARGET_WEIGHTS if option == MODEL else "*.safetensors"
    repository = HubRepository(name)
    if whole_snapshot(name, pattern) is None and _answers(repository):
        return repository
    return LocalFolder(resolve_folder(name, option))


def fetched(source: ModelSource, option: str) -> Path:
    """The folder of a source, downloaded if need be; raises as `resolve_folder` does."""
    return source.folder if isinstance(source, LocalFolder) else resolve_folder(source.name, option)


def _answers(repository: HubRepository) -> bool:
    try:
        if "config.json" in repository.files:
            repository.path("config.json")
    except DFlashError:
        return False
    return True
