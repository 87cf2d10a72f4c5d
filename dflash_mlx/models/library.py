"""What lies on this disk: models to choose from, and what can be removed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

import platformdirs
from huggingface_hub import CachedRepoInfo, HFCacheInfo, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import format_of
from dflash_mlx.models.check import check_drafter, check_pair, describe_target
from dflash_mlx.models.choice import with_own_head
from dflash_mlx.models.default_model import FILE_NAME
from dflash_mlx.models.downloads import (
    FEWEST_BITS,
    TO_DOWNLOAD,
    AvailableModel,
    cache_folder,
    loaded_bytes,
    needed,
    needed_by,
    stored_bytes,
    weights_of,
)
from dflash_mlx.models.names import (
    DEFAULT_MODEL,
    UNLISTED,
    Entry,
    Names,
    entries,
    find_names,
    parent_of,
    registered,
    shipped_folder,
)
from dflash_mlx.models.source import CONFIG, DRAFTER, INDEX, MODEL, Source, is_whole
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.system.files import is_locked
from dflash_mlx.system.machine import model_of
from dflash_mlx.verifier.reading import language_model

KINDS = {
    "model": "models to talk to",
    "drafter": "draft models",
    "unfinished": "unfinished downloads",
    "folder": "model folders, in this folder; yours, so never removed from here",
    "calibration": "how long a model's passes take on this machine, measured again when needed",
    "kernels": "which kernels are faster on this machine, measured again when needed",
    "prefixes": "conversations as models have read them, read again when needed",
    "lookup": "earlier conversations that drafts may come from, kept again as you talk on",
    "features": "hidden states for training draft models, computed again when needed",
    "adapters": "what draft models have learned from your conversations; then they draft as before",
    "emulator": "compiled kernels of the emulator, compiled again when needed",
}
GROUPS = ("on this disk", "fits this machine", "too large for this machine")
_READABLE = 3.0  # tokens per second; a model that is slower without drafts is not recommended
_LM_STUDIO = (".cache/lm-studio/models", ".lmstudio/models")  # before 2025, and since
UNFINISHED, YOURS = "unfinished", "folder"  # of KINDS
_OURS = (  # of this program's cache: kind, name, and files or folders
    ("model", DEFAULT_MODEL, FILE_NAME),
    (UNFINISHED, DEFAULT_MODEL, "download-*"),
    ("calibration", "", "timing/*.json"),  # their names are in the files
    ("kernels", "", "kernels/*.json"),
    *((kind, kind, kind) for kind in ("prefixes", "lookup", "features", "adapters", "emulator")),
)
_MOMENT = 60.0  # seconds; between two files of a download nothing is locked
_PART = ".incomplete"  # how huggingface_hub's names of files under way end


def available_models(here: Path) -> list[AvailableModel]:
    """Everything that can be chosen. here: the folder whose subfolders may be models."""
    folders = [*local_folders(here), *_lm_studio(here), *cached_folders()]
    drafters = [folder for folder in folders if folder.option == DRAFTER]
    models = [folder for folder in folders if folder.option == MODEL]
    names = {folder.name for folder in folders}  # a small model that drafts is a target as well
    found = [on_this_machine(model, drafters, models) for model in models]
    here_already = {registered(folder.name) for folder in models}
    public = [
        _public(entry, names)
        for entry in entries()
        if entry not in here_already and shipped_folder(entry.drafter) is None
    ]
    built_in = PairConfig()
    needs = needed_by(find_names(built_in))
    return [AvailableModel(built_in, needs, place="built in", drafts="here"), *found, *public]


def grouped(
    models: Sequence[AvailableModel], installed: int, read_speed: float
) -> tuple[dict[str, list[AvailableModel]], AvailableModel | None]:
    """Models by GROUPS, those to download by size, and the one to recommend.

    installed: bytes of memory of the machine; read_speed: bytes per second, 0 for unknown.
    """
    fit = [m for m in models if m.fits(installed) and 0 < m.entry.best_from * 1e9 <= installed]
    quick = [m for m in fit if not read_speed or m.speed(read_speed) >= _READABLE]
    best = max(quick, key=lambda model: model.entry.best_from, default=None)
    groups: dict[str, list[AvailableModel]] = {group: [] for group in GROUPS}
    for model in sorted(models, key=lambda m: (not m.here, m is not best, not m.here and m.needs)):
        groups[GROUPS[0 if model.here else 1 if model.fits(installed) else 2]].append(model)
    return groups, best


def _public(entry: Entry, here: Collection[str]) -> AvailableModel:
    download = stored_bytes(weights_of(entry.name, entry.billions), FEWEST_BITS)
    needs = loaded_bytes(download, FEWEST_BITS, on_cpu())
    told = TO_DOWNLOAD, entry.drafter, "here" if entry.drafter in here else TO_DOWNLOAD, entry
    return AvailableModel(PairConfig(entry.name), needs, download, "", *told)


def on_this_machine(
    model: Source, drafters: Sequence[Source], others: Sequence[Source] = ()
) -> AvailableModel:
    """The model with the registry's drafter, or else the first downloaded one that fits it.

    One in a folder may be somebody's trial, so it is taken only by its name.

    others: models, small ones of which the registry has as drafters.
    """
    needs = needed(model)
    place = "local folder" if model.name == str(model.folder) else "Hugging Face cache"
    if (entry := registered(model.name) or parent_of(model)) is not None:
        config, drafter = PairConfig(model.name), entry.drafter
        there = next((d for d in (*drafters, *others) if d.name == drafter), None)
        if there is None and (folder := shipped_folder(drafter)) is not None:
            there = Source.of(folder)
        drafts = "here" if there else TO_DOWNLOAD
    else:
        there = next((d for d in drafters if d.name != str(d.folder) and _fits(d, model)), None)
        config = PairConfig(model.name, there.name if there else None)
        has_head = with_own_head(Names(model.name, model.name), model).drafter is not None
        drafter, drafts = (there.name, "here") if there else ("", "lookup")
        drafts = "own head" if has_head and not there else drafts
    needs += needed(there) if there and needs else 0
    return AvailableModel(config, needs, 0, "", place, drafter, drafts, entry or UNLISTED)


def local_folders(here: Path) -> list[Source]:
    """Model folders in `here` and in its folder `models`."""
    return _models_in(here, here / "models")


def _lm_studio(here: Path) -> list[Source]:
    """What this program can load of LM Studio's models, folders in those of their owners, once."""
    home = Path(os.path.expanduser("~"))
    owners = {os.path.realpath(o): o for o in _folders_in(*(home / place for place in _LM_STUDIO))}
    owners.pop(os.path.realpath(here), None)  # whose folders are listed already
    return _models_in(*owners.values())


def _models_in(*parents: Path) -> list[Source]:
    return [source for source in map(Source.of, _folders_in(*parents)) if _kind(source)]


def _folders_in(*parents: Path) -> list[Path]:
    """Also one that may not be entered, or that is a link to such; `Path.is_dir` would raise."""
    found: list[Path] = []
    for parent in parents:
        with suppress(OSError):
            found += sorted(child for child in parent.iterdir() if os.path.isdir(child))
    return found


def cached_folders() -> list[Source]:
    """Complete models in the Hugging Face cache."""
    newest = (found[0] for _, found in _revisions())
    return [source for kind, source in newest if kind not in ("", UNFINISHED)]


def near_names(typed: str) -> list[str]:
    """Names like the one that was typed, the best first; [] for one that is known itself."""
    public = (target for entry in entries() for target in entry.targets)
    known = [DEFAULT_MODEL, *public, *(f.name for f in cached_folders())]
    known += [folder.name for folder in local_folders(Path())]
    by_lower = {name.lower(): name for name in known}
    near = [] if typed in known else get_close_matches(typed.lower(), by_lower, n=2, cutoff=0.7)
    return [by_lower[name] for name in near]


def _fits(drafter: Source, model: Source) -> bool:
    target = describe_target(language_model(model.read_json(CONFIG)), model.name)
    return not check_pair(target, check_drafter(drafter)).errors


@dataclass(frozen=True)
class CacheEntry:
    """One thing on the disk."""

    kind: str  # of KINDS
    name: str  # a model's, or what the folder is called
    path: Path  # a file or a folder
    size: int  # in bytes
    changed: float  # in seconds since 1970
    repository: bool = False  # of the Hugging Face cache


def cache_entries(here: Path, cache: Path | None = None) -> list[CacheEntry]:
    """Everything, in the order of KINDS, then by name.

    here: the folder whose subfolders may be models. cache: the program's own, or else the user's.
    """
    cache = cache or platformdirs.user_cache_path("dflash-chat")
    found = list(_repositories())
    for kind, name, pattern in _OURS:
        found += [_of(kind, name or model_of(each), each) for each in cache.glob(pattern)]
    found += [_of(YOURS, source.name, source.here) for source in local_folders(here)]
    order = list(KINDS)
    return sorted(found, key=lambda each: (order.index(each.kind), each.name.lower(), each.path))


def _of(kind: str, name: str, path: Path) -> CacheEntry:
    size, changed = 0, 0.0
    with suppress(OSError):  # another program may be clearing up, too
        changed = path.stat().st_mtime
        files = [path] if path.is_file() else filter(Path.is_file, path.rglob("*"))
        size = sum(file.lstat().st_size for file in files)
    return CacheEntry(kind, name, path, size, changed)


def _scan() -> HFCacheInfo:
    try:
        return scan_cache_dir(cache_folder())
    except (CacheNotFound, OSError, ValueError):
        return HFCacheInfo(0, frozenset(), frozenset(), [])


def _revisions() -> Iterator[tuple[CachedRepoInfo, list[tuple[str, Source]]]]:
    """What this program could load of the Hugging Face cache, with the kinds of its revisions."""
    for repo in sorted(_scan().repos, key=lambda repo: repo.repo_id):
        order = sorted(repo.revisions, key=lambda revision: -revision.last_modified)
        sources = [Source(repo.repo_id, each.snapshot_path) for each in order]
        found = [(_kind(source), source) for source in sources]
        if repo.repo_type == MODEL and any(kind for kind, _ in found):
            yield repo, found


def _repositories() -> Iterator[CacheEntry]:
    for repo, found in _revisions():
        whole = (kind for kind, _ in found if kind not in ("", UNFINISHED))
        kind, size, changed = next(whole, UNFINISHED), repo.size_on_disk, repo.last_modified
        yield CacheEntry(kind, repo.repo_id, repo.repo_path, size, changed, True)
    for part in _scan().incomplete_files:
        if (name := part.file_path.parent.parent.name).startswith("models--"):
            name = name.removeprefix("models--").replace("--", "/")
            yield _of(UNFINISHED, name, part.file_path)


def _kind(source: Source) -> str:
    """Of a folder, of KINDS; "" for what has no weights that this program reads."""
    with suppress(DFlashError):  # no model, or a damaged one
        source.option = DRAFTER if format_of(source.read_json(CONFIG)) else MODEL
        if any(fnmatch(file, source.weights) or file == INDEX for file in source.files):
            return source.option if is_whole(source) else UNFINISHED
    return ""


def find_entries(names: list[str], kept: list[CacheEntry]) -> list[CacheEntry]:
    """What of `kept` has these names or kinds, or their plurals; DFlashError for other names."""
    found: dict[Path, CacheEntry] = {}
    for name in names:
        wanted = name.lower().rstrip("/")
        kinds = {wanted, wanted.removesuffix("s")} & (KINDS.keys() - {YOURS})
        some = [each for each in kept if each.kind in kinds or each.name.lower() == wanted]
        if not some and not kinds:
            kinds_named = ", ".join(kind for kind in KINDS if kind != YOURS)
            step = f"take one from the list of dflash-chat models, or a kind: {kinds_named}"
            raise DFlashError(f"nothing is called {name[:200]!r}", step)
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
        return kept.kind == UNFINISHED and abs(time.time() - newest) < _MOMENT
    return False


def remove_entry(kept: CacheEntry) -> None:
    """Remove it from the disk for good; DFlashError where that cannot be done."""
    if kept.kind == YOURS:
        raise DFlashError(f"{kept.path} is a folder of your own", "remove it yourself")
    if being_written(kept):
        what = f"{kept.name} is being downloaded, or was a moment ago"
        raise DFlashError(what, "wait until it has finished, then try again in a minute")
    try:
        if kept.repository:
            _remove_repository(kept)
        elif kept.path.is_symlink() or kept.path.is_file():
            kept.path.unlink()
        else:
            shutil.rmtree(kept.path)
    except FileNotFoundError:
        return  # another program was quicker
    except OSError as error:
        what = f"{kept.path} cannot be removed ({error.strerror or error})"
        raise DFlashError(what, "make it writable, or remove it yourself") from None


def _remove_repository(kept: CacheEntry) -> None:
    """All revisions of one repository; forks in the same cache have revisions of the same names."""
    scanned = _scan()
    for repo in (each for each in scanned.repos if each.repo_path == kept.path):
        alone = replace(scanned, repos=frozenset({repo}))
        alone.delete_revisions(*(each.commit_hash for each in repo.revisions)).execute()
    if os.path.lexists(kept.path):  # huggingface_hub only logs what it could not remove
        raise PermissionError(13, "something in it cannot be removed")
