"""Fetching from the Hugging Face hub: whole models, or the heads of their weight files alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from tqdm.auto import tqdm

from dflash_mlx.convert.staging import check_space
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import in_one_line
from dflash_mlx.models.names import whole_copy
from dflash_mlx.models.source import BESIDE, HUB_ERRORS, INDEX, TARGET_WEIGHTS, WEIGHTS, Source
from dflash_mlx.system.safetensors_header import TensorHeader, read_header

FILES = (*BESIDE, WEIGHTS, "LICENSE*")
CHOOSE_ANOTHER = "choose another model"

_SMALL = ("config.json", "generation_config.json", "tokenizer_config.json")


def cached(name: str) -> Path | None:
    """The snapshot of a repository that is here whole; None where something must be fetched.

    Without a network, what is here counts as its newest revision.
    """
    try:
        wanted = _wanted(list(Source(name).files))
    except DFlashError:
        copy = whole_copy(name, "drafter")
        return None if copy is None else copy.folder
    return None if _missing(name, wanted) else _download(name, wanted)


def fetch(name: str) -> Path:
    """The snapshot of a repository's newest revision; what is in the cache is not fetched again.

    Raises DFlashError where that fails, and where the cache's disk is too small.
    """
    wanted = _wanted(list(Source(name).files))
    if missing := _missing(name, wanted):
        check_space(cache_folder(), missing, f"downloading {name}")
    return _download(name, wanted)


def cache_folder() -> Path:
    """Where downloads go, or the nearest folder above it that is there."""
    folder = Path(constants.HF_HUB_CACHE)
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


class Heads(Source):
    """A repository whose weight files are laid out in a folder with nothing behind their headers.

    mlx-lm can build the model from that as if it were whole.
    """

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)
        self.scratch = folder

    @cached_property
    def files(self) -> Mapping[str, int]:
        """Without the weight files that are not fetched."""
        listed = super().files
        wanted = _wanted(list(listed))
        kept = (f for f in listed if f in wanted or not f.endswith(".safetensors"))
        return {file: listed[file] for file in kept}

    def lay_out(self) -> int:
        """Fill the folder; returns the bytes of the model's files that are not in the cache."""
        wanted = _wanted(list(self.files))
        for file in wanted:
            if file in _SMALL or file == INDEX:
                shutil.copyfile(self.path(file), self.scratch / file)
            elif file.endswith(".safetensors"):
                _write_head(super().header(file, CHOOSE_ANOTHER), self.scratch / file)
        return _missing(self.name, wanted)

    def header(self, file: str, next_step: str) -> dict[str, TensorHeader]:
        """As `lay_out` has found it."""
        return read_header(self.scratch / file, next_step)


def _write_head(tensors: Mapping[str, TensorHeader], file: Path) -> None:
    header = {
        name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": list(t.offsets)}
        for name, t in tensors.items()
    }
    text = json.dumps(header).encode()
    end = max((tensor.offsets[1] for tensor in tensors.values()), default=0)
    with open(file, "wb") as output:
        output.write(len(text).to_bytes(8, "little") + text)
        output.truncate(8 + len(text) + end)  # a hole, which takes no place on the disk


class _NoBar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A progress bar for what takes no time."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{**keywords, "disable": True})


def _wanted(files: Sequence[str]) -> list[str]:
    """Without other libraries' copies of the weights, where there are files that mlx-lm reads."""
    readable = [file for file in files if any(fnmatch(file, pattern) for pattern in FILES)]
    if any(fnmatch(file, TARGET_WEIGHTS) for file in readable):
        return [f for f in readable if not f.endswith(".safetensors") or fnmatch(f, TARGET_WEIGHTS)]
    return readable


def _missing(name: str, wanted: list[str]) -> int:
    """Bytes that are still to be downloaded."""
    with _as_sentences(name):
        parts = snapshot_download(name, allow_patterns=wanted, dry_run=True, tqdm_class=_NoBar)
    return sum(part.file_size or 0 for part in parts if part.will_download)


def _download(name: str, wanted: list[str]) -> Path:
    with _as_sentences(name):
        return Path(snapshot_download(name, allow_patterns=wanted))


@contextmanager
def _as_sentences(name: str) -> Iterator[None]:
    try:
        yield
    except HUB_ERRORS as error:
        raise DFlashError(
            f"{name} could not be downloaded ({in_one_line(error)})",
            "run the same command again, which goes on where this one stopped",
        ) from None
