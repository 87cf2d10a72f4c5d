"""What lies on this disk: models to choose from, and what can be removed.

The Hugging Face cache is read and cleared through huggingface_hub, since other programs share it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

import platformdirs
from huggingface_hub import HFCacheInfo, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import format_of
from dflash_mlx.models.check import check_drafter, check_pair, describe_target, language_model
from dflash_mlx.models.default_model import kept_at
from dflash_mlx.models.memory import (
    FEWEST_BITS,
    loaded_bytes,
    needed,
    needed_by,
    stored_bytes,
    weights_of,
)
from dflash_mlx.models.names import (
    DEFAULT_MODEL,
    PAIR_FILE,
    find_names,
    is_pair_folder,
    parent_of,
    shipped_folder,
)
from dflash_mlx.models.registry import Entry, entries, registered
from dflash_mlx.models.source import CONFIG, DRAFTER, INDEX, MODEL, Source, cache_folder
from dflash_mlx.models.weight_files import is_whole
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.system.files import is_locked
from dflash_mlx.system.machine import model_of

TO_DOWNLOAD = "to download"
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
class AvailableModel:
    """A model to choose.

    place: where it comes from. needs: bytes of memory with its drafters, 0 where unknown. drafter:
    in words. notes: the registry's. download: bytes of what is not here, going by its name, with 4
    bits a weight; then `needs` is that of the target alone, likewise. verified: whether this
    program was tried with the registry's drafter, if that is the one.
    """

    name: str
    config: PairConfig
    place: str
    needs: int = 0
    drafter: str = ""
    notes: str = ""
    download: int = 0
    verified: bool = True

    @property
    def here(self) -> bool:
        """Whether it can be loaded without a network."""
        return self.place != TO_DOWNLOAD


def available_models(here: Path) -> list[AvailableModel]:
    """Everything that can be chosen. here: the folder whose subfolders may be models."""
    folders = [*local_folders(here), *cached_folders()]
    drafters = [folder for folder in folders if folder.option == DRAFTER]
    models = [folder for folder in folders if folder.option == MODEL]
    names = {drafter.name for drafter in drafters}
    found = [on_this_machine(model, drafters) for model in models]
    here_already = {registered(folder.name) for folder in models}
    public = [
        _public(entry, names)
        for entry in entries()
        if entry not in here_already and shipped_folder(entry.drafter) is None
    ]
    converted = [str(folder) for folder in _subfolders(here) if is_pair_folder(folder)]
    pairs = [_pair(name, PairConfig(name), "converted pair") for name in converted]
    return [_pair(DEFAULT_MODEL, PairConfig(), "built in"), *pairs, *found, *public]


def _public(entry: Entry, here: Collection[str]) -> AvailableModel:
    """A pair of the registry that is not on this machine. here: the names of drafters that are."""
    weights = weights_of(entry.name, entry.billions)
    download = stored_bytes(weights, FEWEST_BITS)
    return AvailableModel(
        entry.name,
        PairConfig(entry.name),
        TO_DOWNLOAD,
        loaded_bytes(download, FEWEST_BITS, on_cpu()),
        f"drafter {entry.drafter}{' (on this machine)' * (entry.drafter in here)}",
        entry.notes,
        download,
        entry.verified,
    )


def _pair(name: str, config: PairConfig, place: str) -> AvailableModel:
    """A target whose drafters come with it."""
    needs = 0
    with suppress(DFlashError):  # damaged: choosing it says how
        needs = needed_by(find_names(config))
    return AvailableModel(name, config, place, needs)


def on_this_machine(model: Source, drafters: Sequence[Source]) -> AvailableModel:
    """The model with the registry's drafter, or else the first of `drafters` that fits it."""
    needs, notes, verified = needed(model), "", True
    place = "local folder" if model.name == str(model.folder) else "Hugging Face cache"
    if (entry := registered(model.name) or parent_of(model)) is not None:
        config, drafter, notes = PairConfig(model.name), entry.drafter, entry.notes
        verified = entry.verified
        there = next((d for d in drafters if d.name == drafter), None)
        if there is None and (folder := shipped_folder(drafter)) is not None:
            there = Source.of(folder)
        words = f"drafter {drafter}" + ("" if there else ", to download")
    else:
        there = next((d for d in drafters if _fits(d, model)), None)
        config = PairConfig(model.name, there.name if there else None)
        words = f"drafter {there.name}" if there else "no drafter"
    needs += needed(there) if there and needs else 0
    return AvailableModel(model.name, config, place, needs, words, notes, verified=verified)


def local_folders(here: Path) -> list[Source]:
    """Model folders in `here` and in its folder `models`."""
    return _folders((str(folder), folder) for folder in _subfolders(here))


def _subfolders(here: Path) -> list[Path]:
    """Also one that may not be entered, or that is a link to such; `Path.is_dir` would raise."""
    found: list[Path] = []
    for parent in (here, here / "models"):
        with suppress(OSError):
            found += sorted(child for child in parent.iterdir() if os.path.isdir(child))
    return found


def cached_folders() -> list[Source]:
    """Complete models in the Hugging Face cache."""
    scanned = _scan()
    newest = (
        (repo.repo_id, max(repo.revisions, key=lambda r: r.last_modified).snapshot_path)
        for repo in sorted(scanned.repos if scanned else (), key=lambda repo: repo.repo_id)
        if repo.repo_type == "model" and repo.revisions
    )
    return [folder for folder in _folders(newest) if is_whole(folder)]


def near_names(typed: str) -> list[str]:
    """Names like the one that was typed, the best first."""
    public = (target for entry in entries() for target in entry.targets)
    known = [DEFAULT_MODEL, *public, *(f.name for f in cached_folders())]
    known += [folder.name for folder in local_folders(Path())]
    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(typed.lower(), by_lower, n=2, cutoff=0.7)
    return [by_lower[name] for name in near if by_lower[name] != typed]


def _folders(named: Iterable[tuple[str, Path]]) -> list[Source]:
    """The models among these, by what they are called."""
    found = []
    for name, path in named:
        source = Source(name, path)
        with suppress(DFlashError):  # no model, or a damaged one
            source.option = DRAFTER if format_of(source.read_json(CONFIG)) else MODEL
            if any(file.endswith(".safetensors") for file in source.files):
                found.append(source)
    return found


def _fits(drafter: Source, model: Source) -> bool:
    target = describe_target(language_model(model.read_json(CONFIG)), model.name)
    return not check_pair(target, check_drafter(drafter)).errors


@dataclass(frozen=True)
class CacheEntry:
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


def cache_entries(here: Path, cache: Path | None = None) -> list[CacheEntry]:
    """Everything, in the order of KINDS, then by name.

    here: the folder whose subfolders may be models. cache: the program's own, by default the
    user's. What cannot be read is left out.
    """
    cache = cache or platformdirs.user_cache_path("dflash-chat")
    found = [*_repositories(), *_in_folders(here), *_measured(cache)]
    default = kept_at(cache)
    found += [_of("model", DEFAULT_MODEL, default)] if default.is_file() else []
    found += [_of("unfinished", DEFAULT_MODEL, each) for each in cache.glob("download-*")]
    for kind in ("prefixes", "features", "emulator"):
        found += [_of(kind, kind, each) for each in (cache / kind,) if each.is_dir()]
    order = list(KINDS)
    return sorted(found, key=lambda each: (order.index(each.kind), each.name.lower(), each.path))


def _of(kind: str, name: str, path: Path) -> CacheEntry:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    sizes = []
    for file in files:
        with suppress(OSError):  # another program may be clearing up, too
            sizes.append(file.lstat().st_size)
    with suppress(OSError):
        return CacheEntry(kind, name, path, sum(sizes), path.stat().st_mtime)
    return CacheEntry(kind, name, path, 0, 0.0)


def _measured(cache: Path) -> Iterator[CacheEntry]:
    for kind, folder in (("calibration", "timing"), ("kernels", "kernels")):
        for file in (cache / folder).glob("*.json"):
            yield _of(kind, model_of(file), file)


def _in_folders(here: Path) -> Iterator[CacheEntry]:
    """Converted pairs and other models in `here` and in its folder `models`."""
    for folder in filter(is_pair_folder, _subfolders(here)):
        yield _of("converted", str(folder), folder)
    for source in local_folders(here):
        yield _of(YOURS, source.name, source.here)


def _scan() -> HFCacheInfo | None:
    try:
        return scan_cache_dir(cache_folder())
    except (CacheNotFound, OSError, ValueError):
        return None


def _repositories() -> Iterator[CacheEntry]:
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
                yield CacheEntry(kind, repo.repo_id, repo.repo_path, size, changed, True)
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


def find_entries(names: list[str], kept: list[CacheEntry]) -> list[CacheEntry]:
    """What of `kept` goes by these names or is of these kinds; DFlashError for a name of nothing.

    names: as `CacheEntry.name`, in any case, or of KINDS, also with an s at their end.
    """
    found: dict[Path, CacheEntry] = {}
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


def being_written(kept: CacheEntry) -> bool:
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


def remove_entry(kept: CacheEntry) -> None:
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
        elif kept.kind != "converted" or (kept.path / PAIR_FILE).is_file():
            shutil.rmtree(kept.path)
    except FileNotFoundError:
        return  # another program was quicker
    except OSError as error:
        what = f"{kept.path} cannot be removed ({error.strerror or error})"
        raise DFlashError(what, "make it writable, or remove it yourself") from None


def _remove_repository(kept: CacheEntry) -> None:
    """All revisions of one repository; forks in the same cache have revisions of the same names."""
    if (scanned := _scan()) is not None:
        for repo in (each for each in scanned.repos if each.repo_path == kept.path):
            alone = replace(scanned, repos=frozenset({repo}))
            alone.delete_revisions(*(each.commit_hash for each in repo.revisions)).execute()
    if os.path.lexists(kept.path):  # huggingface_hub only logs what it could not remove
        raise PermissionError(13, "something in it cannot be removed")
