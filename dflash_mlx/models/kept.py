"""What lies on the disk for this program: models, draft models, and what was measured of them.

The Hugging Face cache is read and cleared through huggingface_hub, since other programs share it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import platformdirs
from huggingface_hub import HFCacheInfo, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import format_of
from dflash_mlx.models.available import local_folders
from dflash_mlx.models.default_model import kept_at
from dflash_mlx.models.names import DEFAULT_MODEL
from dflash_mlx.models.pair_folder import FILE, is_pair_folder
from dflash_mlx.models.source import CONFIG, INDEX, Source, cache_folder
from dflash_mlx.models.weight_files import is_whole
from dflash_mlx.system.files import is_locked
from dflash_mlx.system.machine import model_of

KINDS = {
    "model": "models to talk to",
    "drafter": "draft models",
    "unfinished": "downloads that were broken off",
    "converted": "pairs that dflash_mlx.convert has written, in this folder",
    "folder": "other model folders, in this folder; yours, so never removed from here",
    "calibration": "times of a model's passes on this machine, measured again when needed",
    "kernels": "which kernels a model uses on this machine, found out again when needed",
    "prefixes": "what models have read of conversations, read again when needed",
    "features": "hidden states for training draft models, computed again when needed",
    "emulator": "compiled kernels of the emulator, compiled again when needed",
}
YOURS = "folder"  # of KINDS
_MOMENT = 60.0  # seconds; between two files of a download nothing is locked
_PART = ".incomplete"  # how huggingface_hub's names of files under way end


@dataclass(frozen=True)
class Kept:
    """One thing on the disk.

    kind: of KINDS. name: a model's, or what the folder is called. path: a file or a folder. size:
    in bytes. changed: in seconds since 1970. repository: where it is one in the Hugging Face cache.
    """

    kind: str
    name: str
    path: Path
    size: int
    changed: float
    repository: bool = False


def kept_files(here: Path, cache: Path | None = None) -> list[Kept]:
    """Everything, in the order of KINDS, then by name.

    here: the folder whose subfolders may be models. cache: the program's own, by default the
    user's. What cannot be read is left out.
    """
    cache = cache or platformdirs.user_cache_path("dflash-chat")
    found = [*_repositories(), *_folders(here), *_measured(cache)]
    default = kept_at(cache)
    found += [_of("model", DEFAULT_MODEL, default)] if default.is_file() else []
    found += [_of("unfinished", DEFAULT_MODEL, each) for each in cache.glob("download-*")]
    for kind in ("prefixes", "features", "emulator"):
        found += [_of(kind, kind, each) for each in (cache / kind,) if each.is_dir()]
    order = list(KINDS)
    return sorted(found, key=lambda each: (order.index(each.kind), each.name.lower(), each.path))


def _of(kind: str, name: str, path: Path) -> Kept:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    sizes = []
    for file in files:
        with suppress(OSError):  # another program may be clearing up, too
            sizes.append(file.lstat().st_size)
    with suppress(OSError):
        return Kept(kind, name, path, sum(sizes), path.stat().st_mtime)
    return Kept(kind, name, path, 0, 0.0)


def _measured(cache: Path) -> Iterator[Kept]:
    for kind, folder in (("calibration", "timing"), ("kernels", "kernels")):
        for file in (cache / folder).glob("*.json"):
            yield _of(kind, model_of(file), file)


def _folders(here: Path) -> Iterator[Kept]:
    """Converted pairs and other models in `here` and in its folder `models`."""
    for parent in (here, here / "models"):
        with suppress(OSError):
            for folder in filter(is_pair_folder, parent.iterdir()):
                yield _of("converted", str(folder), folder)
    for source in local_folders(here):
        yield _of(YOURS, source.name, source.here)


def _scan() -> HFCacheInfo | None:
    try:
        return scan_cache_dir(cache_folder())
    except (CacheNotFound, OSError, ValueError):
        return None


def _repositories() -> Iterator[Kept]:
    """What this program could load of the Hugging Face cache, and broken-off downloads in it."""
    if (scanned := _scan()) is None:
        return
    for repo in scanned.repos:
        if repo.repo_type == "model" and repo.revisions:
            order = sorted(repo.revisions, key=lambda revision: -revision.last_modified)
            kinds = [_kind(Source(repo.repo_id, each.snapshot_path)) for each in order]
            whole = [kind for kind in kinds if kind not in ("", "unfinished")]
            kind = next(iter([*whole, *filter(None, kinds)]), "")
            size, changed = repo.size_on_disk, repo.last_modified
            if kind:
                yield Kept(kind, repo.repo_id, repo.repo_path, size, changed, True)
    for part in scanned.incomplete_files:
        if (name := part.file_path.parent.parent.name).startswith("models--"):
            yield _of(
                "unfinished", name.removeprefix("models--").replace("--", "/"), part.file_path
            )


def _kind(source: Source) -> str:
    """Of a repository; "" for what has no weights that this program reads."""
    try:
        source.option = "drafter" if format_of(source.read_json(CONFIG)) else "model"
        if not any(fnmatch(file, source.weights) or file == INDEX for file in source.files):
            return ""  # another program's
    except DFlashError:
        return ""
    return source.option if is_whole(source) else "unfinished"


def find_kept(names: list[str], kept: list[Kept]) -> list[Kept]:
    """What of `kept` goes by these names or is of these kinds; DFlashError for a name of nothing.

    names: as `Kept.name`, in any case, or of KINDS, also with an s at their end.
    """
    found: dict[Path, Kept] = {}
    for name in names:
        wanted = name.lower().rstrip("/")
        kinds = {wanted, wanted.removesuffix("s")} & (KINDS.keys() - {YOURS})
        some = [each for each in kept if each.kind in kinds or each.name.lower() == wanted]
        if not some and not kinds:
            kinds_named = ", ".join(kind for kind in KINDS if kind != YOURS)
            raise DFlashError(
                f"nothing here goes by the name {name[:200]!r}",
                f"take one from the list of dflash-chat models, or a kind: {kinds_named}",
            )
        found |= {each.path: each for each in some}
    return list(found.values())


def being_written(kept: Kept) -> bool:
    """Whether some program downloads into it; of what is not whole, also until a moment ago."""
    if not kept.repository and kept.path.suffix != _PART:
        return is_locked(kept.path)
    repository = kept.path if kept.repository else kept.path.parent.parent
    locks = repository.parent / ".locks" / repository.name
    if any(map(is_locked, locks.glob("*.lock"))):
        return True
    blobs = repository / "blobs"
    with suppress(OSError):
        newest = max(each.stat().st_mtime for each in (blobs, *blobs.glob(f"*{_PART}")))
        return kept.kind == "unfinished" and abs(time.time() - newest) < _MOMENT
    return False


def remove_kept(kept: Kept) -> None:
    """Remove it from the disk for good; DFlashError where that cannot be done."""
    if kept.kind == YOURS:
        raise DFlashError(f"{kept.path} is a folder of your own", "remove it yourself")
    if being_written(kept):
        what = f"{kept.name} is being downloaded, or was until a moment ago"
        raise DFlashError(what, "wait until that has ended, then try again in a minute")
    try:
        if kept.repository:
            _remove_repository(kept)
        elif kept.path.is_symlink() or kept.path.is_file():
            kept.path.unlink()
        elif kept.kind != "converted" or (kept.path / FILE).is_file():
            shutil.rmtree(kept.path)
    except FileNotFoundError:
        return  # another program was quicker
    except OSError as error:
        what = f"{kept.path} cannot be removed ({error.strerror or error})"
        raise DFlashError(what, "make it writable, or remove it yourself") from None


def _remove_repository(kept: Kept) -> None:
    """All revisions of one repository; forks in the same cache have revisions of the same names."""
    if (scanned := _scan()) is not None:
        for repo in (each for each in scanned.repos if each.repo_path == kept.path):
            alone = replace(scanned, repos=frozenset({repo}))
            alone.delete_revisions(*(each.commit_hash for each in repo.revisions)).execute()
    if os.path.lexists(kept.path):  # huggingface_hub only logs what it could not remove
        raise PermissionError(13, "something in it cannot be removed")
