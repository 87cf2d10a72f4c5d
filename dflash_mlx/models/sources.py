"""Where models can be checked before their weights are here: folders, and the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.compatibility import HubRepository, LocalFolder
from dflash_mlx.models.compatibility.model_source import ModelSource
from dflash_mlx.models.compatibility.whole import TARGET_WEIGHTS, whole_snapshot
from dflash_mlx.models.resolve import local_folder, resolve_folder, shipped_folder

MODEL = "model"  # the option that names a target


def find_source(name: str, option: str) -> ModelSource:
    """A folder, or the hub's repository where no whole copy of it is here.

    A copy is brought up to date. Where the hub does not answer, everything is downloaded at once,
    or DFlashError says why it cannot be. option: the command-line option that `name` came from.
    """
    if (folder := _folder(name, option)) is not None:
        return LocalFolder(folder)
    repository = HubRepository(name)
    if _whole_copy(name, option) is None and _answers(repository):
        return repository
    return LocalFolder(resolve_folder(name, option))


def source_as_it_is(name: str, option: str) -> ModelSource:
    """As `find_source`, but nothing is downloaded, and a whole copy stays as it is."""
    folder = _folder(name, option) or _whole_copy(name, option)
    return HubRepository(name) if folder is None else LocalFolder(folder)


def fetched(source: ModelSource, option: str) -> Path:
    """The folder of a source, downloaded if need be; raises as `resolve_folder` does."""
    return source.folder if isinstance(source, LocalFolder) else resolve_folder(source.name, option)


def _folder(name: str, option: str) -> Path | None:
    return (None if option == MODEL else shipped_folder(name)) or local_folder(name, option)


def _whole_copy(name: str, option: str) -> Path | None:
    return whole_snapshot(name, TARGET_WEIGHTS if option == MODEL else "*.safetensors")


def _answers(repository: HubRepository) -> bool:
    try:
        if "config.json" in repository.files:
            repository.path("config.json")
    except DFlashError:
        return False
    return True
