"""Whether a model is here whole: what an interrupted download leaves behind is none."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP client

from dflash_mlx.core.findings import Collector
from dflash_mlx.models.compatibility.model_source import LocalFolder, read_json
from dflash_mlx.models.compatibility.weight_files import missing_files

TARGET_WEIGHTS = "model*.safetensors"
_LOADED = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken", TARGET_WEIGHTS)


def whole_snapshot(name: str, pattern: str = "*.safetensors") -> Path | None:
    """The snapshot of a repository in the Hugging Face cache, None where it is not whole.

    Asks no network. pattern: of the weight files that are wanted.
    """
    try:
        found = snapshot_download(  # where the hub's listing was kept, this compares with it
            name, allow_patterns=[*_LOADED], ignore_patterns=["*/*"], local_files_only=True
        )
    except (OSError, HTTPError, ValueError):
        return None
    return Path(found) if is_whole(Path(found), pattern) else None


def is_whole(folder: Path, pattern: str = "*.safetensors") -> bool:
    """Whether config.json is there, and the weight files: all shards, all that the index names.

    By their names; pattern: theirs.
    """
    source, found = LocalFolder(folder), Collector()
    there = found.attempt(lambda: source.files) or {}
    files = [name for name in there if fnmatch(name, pattern)]
    if not files or found.attempt(read_json, source, "config.json") is None:
        return False
    found.add(found.attempt(lambda: [*missing_files(source, files, pattern)]) or ())
    return not found.errors
