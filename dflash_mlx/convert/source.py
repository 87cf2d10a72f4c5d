"""Where a model comes from: a local folder, a GGUF file or a Hugging Face repository."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from dflash_mlx.convert import hub
from dflash_mlx.convert.conversion import DRAFTER, TARGET
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models import pair_folder
from dflash_mlx.models.source import Source as Files
from dflash_mlx.models.target_config import is_drafter
from dflash_mlx.system.files import existing

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_GIVE = "give a Hugging Face id like owner/name, a local folder or a GGUF file"


@dataclass(frozen=True)
class Source:
    """A model to be converted.

    path: its folder, or its GGUF file. files: the folder, as checks see it. heads_only: of its
    weights only the headers are to be read, and in a folder there is nothing behind them.
    download: bytes still to be fetched.
    """

    name: str
    kind: str
    path: Path
    files: Files
    heads_only: bool = False
    download: int = 0

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file."""
        return self.path.is_file()


def open_source(name: str, scratch: Path) -> Source:
    """Find `name`, and of a Hugging Face repository that is not here the headers.

    scratch: an empty folder for them. Raises DFlashError for what is neither a target nor a
    drafter, or cannot be had.
    """
    path = _local(name)
    if path is not None and path.is_file():
        return Source(name, TARGET, _gguf_file(path), Files.of(path.parent), heads_only=True)
    if path is None:
        path = hub.cached(name)
    if path is not None:
        return _open_folder(name, path)
    files = hub.Heads(name, scratch)
    return Source(name, _kind(files), scratch, files, heads_only=True, download=files.lay_out())


def fetch(source: Source) -> Source:
    """The same source with its weights, downloaded if need be."""
    if source.heads_only and not source.is_gguf:
        return _open_folder(source.name, hub.fetch(source.name))
    return replace(source, heads_only=False)


def _open_folder(name: str, folder: Path) -> Source:
    files = Files.of(folder)
    if pair_folder.is_pair_folder(folder):
        raise DFlashError(f"{folder} holds a pair", "give its target or drafter folder as SRC")
    if "config.json" not in files.files:
        raise DFlashError(f"{folder} has no config.json", _instead(folder))
    return Source(name, _kind(files), folder, files)


def _kind(files: Files) -> str:
    return DRAFTER if is_drafter(files.read_json("config.json")) else TARGET


def _instead(folder: Path) -> str:
    file = next(folder.glob("*.gguf"), None)
    return f"give the GGUF file {file}" if file is not None else _GIVE


def _local(name: str) -> Path | None:
    """The file or folder `name`, None where there is none and it can be a Hugging Face id."""
    if (path := existing(name)) is not None:
        return path
    try:
        if name.endswith(".gguf"):
            raise ValueError(name)
        validate_repo_id(name)
    except ValueError:
        raise DFlashError(f"there is no file or folder {name[:80]!r}", _GIVE) from None
    return None


def _gguf_file(path: Path) -> Path:
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic == b"GGUF":
        return path
    if path.suffix in _PICKLES:
        raise DFlashError(f"{path} is pickled, which can run any program", "give safetensors files")
    if path.suffix == ".safetensors":
        raise DFlashError(f"{path} is one file of a model", f"give its folder {path.parent}")
    raise DFlashError(f"{path} is no GGUF file, it begins with {magic!r}", _GIVE)
