"""Fetching from the Hugging Face hub: whole models, or the heads of their weight files alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP client

from dflash_mlx.compatibility import HubRepository
from dflash_mlx.convert.staging import check_space
from dflash_mlx.errors import DFlashError

FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken", "LICENSE*")

_SMALL = ("config.json", "generation_config.json", "tokenizer_config.json")
_DOWNLOAD_ERRORS = (OSError, HTTPError, ValueError)


def cached(name: str) -> Path | None:
    """The snapshot of a repository that is here whole; None where something must be fetched.

    Without a network, what is here counts as its newest revision.
    """
    try:
        wanted = _wanted(list(HubRepository(name).files))
    except DFlashError:
        return _snapshot_offline(name)
    return None if _missing(name, wanted) else _download(name, wanted)


def fetch(name: str) -> Path:
    """The snapshot of a repository's newest revision; what is in the cache is not fetched again.

    Raises DFlashError where that fails, and where the cache's disk is too small.
    """
    wanted = _wanted(list(HubRepository(name).files))
    if missing := _missing(name, wanted):
        check_space(cache_folder(), missing, f"downloading {name}")
    return _download(name, wanted)


def cache_folder() -> Path:
    """Where downloads go, or the nearest folder above it that is there."""
    folder = Path(constants.HF_HUB_CACHE)
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


def fetch_heads(name: str, folder: Path) -> int:
    """Lay out a repository in `folder`, its weight files with nothing behind their headers.

    mlx-lm can build the model from that as if it were whole. Returns the bytes of its files
    that are not in the cache.
    """
    repository = HubRepository(name)
    wanted = _wanted(list(repository.files))
    for file in wanted:
        if file in _SMALL or file.endswith("index.json"):
            shutil.copyfile(repository.path(file), folder / file)
        elif file.endswith(".safetensors"):
            _write_head(repository, file, folder / file)
    return _missing(name, wanted)


def _write_head(repository: HubRepository, name: str, file: Path) -> None:
    tensors = repository.header(name, "choose another model")
    header = {
        key: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": list(t.offsets)}
        for key, t in tensors.items()
    }
    text = json.dumps(header).encode()
    end = max((t.offsets[1] for t in tensors.values()), default=0)
    with open(file, "wb") as output:
        output.write(len(text).to_bytes(8, "little") + text)
        output.truncate(8 + len(text) + end)  # a hole, which takes no place on the disk


def _wanted(files: Sequence[str]) -> list[str]:
    return [file for file in files if any(Path(file).match(pattern) for pattern in FILES)]


def _missing(name: str, wanted: list[str]) -> int:
    """Bytes that are still to be downloaded."""
    with _as_sentences(name):
        parts = snapshot_download(name, allow_patterns=wanted, dry_run=True)
    return sum(part.file_size or 0 for part in parts if part.will_download)


def _download(name: str, wanted: list[str]) -> Path:
    with _as_sentences(name):
        return Path(snapshot_download(name, allow_patterns=wanted))


def _snapshot_offline(name: str) -> Path | None:
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES), local_files_only=True))
    except _DOWNLOAD_ERRORS:
        return None


@contextmanager
def _as_sentences(name: str) -> Iterator[None]:
    try:
        yield
    except _DOWNLOAD_ERRORS as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DFlashError(
            f"{name} could not be downloaded ({reason})",
            "run the same command again, which goes on where this one stopped",
        ) from None
