"""Which models can be chosen, and whether this machine has the memory for them.

There are the built-in pair, local folders, the Hugging Face cache and the registry.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from dflash_mlx.core.amounts import amount
from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import Collector
from dflash_mlx.drafters.methods import format_of
from dflash_mlx.models.check import (
    check_drafter,
    check_pair,
    describe_target,
    language_model,
)
from dflash_mlx.models.default_model import DEFAULT_TARGET
from dflash_mlx.models.lineage import parent_of
from dflash_mlx.models.names import (
    DEFAULT_MODEL,
    Names,
    find_names,
    find_source,
    shipped_folder,
)
from dflash_mlx.models.pair_folder import DRAFTER, SECOND_DRAFTER, is_pair_folder
from dflash_mlx.models.registry import Entry, entries, registered
from dflash_mlx.models.sizes import bits_of, loaded_bytes, stored_bytes, weights_of
from dflash_mlx.models.source import CONFIG, MODEL, Source
from dflash_mlx.models.weight_files import HEADROOM, check_weights, is_whole
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.system.machine import describe_machine

TO_DOWNLOAD = "to download"
FEWEST_BITS = 4  # of the quantisation that sizes are given for, where nothing is chosen yet
_DEFAULT_BITS = 5  # per weight of the embedded model's file, which becomes float32 on a CPU


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
    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except (CacheNotFound, OSError, ValueError):
        return []
    newest = (
        (repo.repo_id, max(repo.revisions, key=lambda r: r.last_modified).snapshot_path)
        for repo in sorted(repos, key=lambda repo: repo.repo_id)
        if repo.revisions
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


def available_memory() -> int:
    """Bytes that can be had: what Linux calls available, elsewhere all that is installed."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return int(describe_machine()["memory_bytes"])


def memory_needed(needs: int, there: int, about: str = "") -> str:
    """What a model needs, and whether that is there. about: before an amount that is a guess."""
    fits = "fits" if needs <= there else "does not fit"
    return f"needs {about}{amount(needs)}, {fits}"


def check_memory(config: PairConfig, machines: int = 1) -> None:
    """Raise DFlashError for a pair that does not fit; nothing is downloaded.

    machines: that share the target.
    """
    names = find_names(config)
    needs, there = needed_by(names, machines), available_memory()
    if needs > there:
        raise DFlashError(
            f"{names.shown} needs about {amount(needs)} of memory, and {amount(there)} are there",
            "choose a smaller or a quantised model, or close other programs",
        )


def needed_by(names: Names, machines: int = 1) -> int:
    """Of a target with its drafters, without downloading; what is not known counts nothing.

    Of what is not here the hub lists the sizes, and its name tells the bits of a weight. machines:
    that share the target.
    """
    parts = (names.model, MODEL), (names.drafter, DRAFTER), (names.second_drafter, SECOND_DRAFTER)
    total = 0
    if names.model is None:
        whole = DEFAULT_TARGET.size * HEADROOM * (32 / _DEFAULT_BITS if on_cpu() else 1)
        total = int(whole / machines)
    for name, option in parts:
        with suppress(DFlashError):  # loading says what is wrong
            if name is not None:
                part = needed(find_source(name, option, update=False))
                total += part // machines if option == MODEL else part
    return total


def needed(source: Source) -> int:
    """Bytes that a model takes when loaded, 0 for a folder that does not tell.

    By the heads of a folder's weight files, by the sizes of a repository's.
    """
    if source.folder is None:
        stored = sum(s for file, s in source.files.items() if fnmatch(file, source.weights))
        return loaded_bytes(stored, bits_of(source.name), on_cpu())
    with suppress(DFlashError):
        raw = source.read_json(CONFIG)
        return check_weights(source, raw, Collector(), "").memory(on_cpu())
    return 0
