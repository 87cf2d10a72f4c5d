"""What choosing a model takes, its quantisations on the hub, and downloads that can be stopped.

A stopped download goes on later: whole files stay in the Hugging Face cache.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import constants

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import Collector, DFlashError
from dflash_mlx.core.text import amount
from dflash_mlx.models import default_model
from dflash_mlx.models.bars import telling
from dflash_mlx.models.load import check_named
from dflash_mlx.models.names import (
    DEFAULT_MODEL,
    UNLISTED,
    Entry,
    Names,
    existing,
    find_names,
    find_source,
    inherited,
    same_weights,
    without_quantisation,
)
from dflash_mlx.models.source import CONFIG, HEADROOM, MODEL, Source, check_weights, published
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.system.machine import available_memory, installed_memory

TO_DOWNLOAD = "to download"
FEWEST_BITS = 4  # of the quantisation that sizes are given for, where nothing is chosen yet
_DEFAULT_BITS = 4.5  # of a weight in the embedded model's file, without its scales
_SCALES = 0.5  # bits that quantisation adds to each weight: a scale and an offset of 16 bits for 64
_BITS = re.compile(
    r"[-_](?:(\d+(?:\.\d+)?)-?(?:bits?|bpw)|(?:(?:mx|nv)?fp|b?float|bf|int|o?q|mixed[-_])(\d+)e?)(?![a-z0-9])",
    re.IGNORECASE,
)
_ACTIVE = re.compile(r"-a(\d+(?:\.\d+)?)b\b", re.IGNORECASE)  # billions of experts for a token
_BILLIONS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(b|m)(?![a-z0-9])", re.IGNORECASE)
_FOR_MODELS = 2 / 3  # of the memory, as macOS lets a GPU have; the rest is for all else
QUANTISED_BY = "mlx-community"  # who publishes MLX quantisations of nearly everything
_MOST = 12  # quantisations to offer
_ROOM = "choose a smaller or a quantised model, or remove others with dflash-chat clean"


# Memory and disk, by the heads of weight files or by a name like Qwen3-4B-4bit


def bits_of(name: str) -> float:
    """Bits of a weight as it is stored, without scales; 16 where the name does not say."""
    found = _BITS.search(_last(name))
    return float(found[1] or found[2]) if found else 16.0


def weights_of(name: str, billions: float = 0) -> float:
    """How many weights a model has, 0 where neither its name nor `billions` tells."""
    found = _BILLIONS.search(_last(name))
    if billions or not found:
        return billions * 1e9
    return float(found[1]) * (1e9 if found[2] in "bB" else 1e6)


def stored_bytes(weights: float, bits: float) -> int:
    """Bytes of as many weights on disk, with their scales."""
    return int(weights * (bits + _SCALES * (bits < 16)) / 8)


def loaded_bytes(stored: float, bits: float, on_cpu: bool) -> int:
    """Bytes of memory for weights of `bits`, with room for caches. on_cpu: as float32 there."""
    wider = 32 / (bits + _SCALES * (bits < 16)) if on_cpu else 1
    return int(stored * wider * HEADROOM)


def _last(name: str) -> str:
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1]


def memory_here() -> str:
    """What this machine has, as its maker counts, and what of that other programs leave."""
    installed, free = installed_memory(), available_memory()
    now = f", {amount(free)} free now" if free < installed else ""  # macOS frees what it needs
    wider = ", no GPU, so weights become float32" if on_cpu() else ""
    return f"{installed / 2**30:.0f} GB of memory{now}{wider}"


def check_memory(config: PairConfig, machines: int = 1) -> None:
    """Raise DFlashError for a pair that does not fit, its target shared by so many machines."""
    names = find_names(config)
    needs, there = needed_by(names, machines), available_memory()
    if needs > there:
        wider, kind = (" as float32, without a GPU", "") if on_cpu() else ("", " or a quantised")
        has = f"needs about {amount(needs)} of memory{wider}, and {amount(there)} are available"
        step = f"choose a smaller{kind} model, or close other programs"
        raise DFlashError(f"{names.shown} {has}", step)


def needed_by(names: Names, machines: int = 1) -> int:
    """Bytes for a machine's share of a target, and for the drafters, as far as they are known."""
    total = 0
    if names.model is None:
        total = loaded_bytes(default_model.SIZE, _DEFAULT_BITS, on_cpu()) // machines
    for name, option in names.parts:
        if name == names.model and option != MODEL:
            continue  # a head in the target's folder, which is counted with that
        with suppress(DFlashError):  # loading says what is wrong
            part = needed(find_source(name, option, update=False))
            total += part // machines if option == MODEL else part
    return total


def needed(source: Source) -> int:
    """Bytes that a model takes when loaded, 0 for a folder that does not tell."""
    if source.folder is None:
        stored = sum(s for file, s in source.files.items() if source.is_weights(file))
        return loaded_bytes(stored, bits_of(source.name), on_cpu())
    with suppress(DFlashError):
        raw = source.read_json(CONFIG)
        return check_weights(source, raw, Collector(), "").memory(on_cpu())
    return 0


# The disk


def cache_folder() -> Path:
    """Of the Hugging Face cache, as it is set now; it need not exist."""
    return Path(constants.HF_HUB_CACHE).expanduser()


def disk_of_cache() -> Path:
    """The folder of the Hugging Face cache, or the nearest one above it that is there."""
    folder = cache_folder()
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


def check_space(folder: Path, wanted: int, what: str, next_step: str) -> None:
    """Raise DFlashError unless `wanted` bytes, for `what`, fit on the disk of `folder`."""
    if (free := shutil.disk_usage(folder).free) < wanted:
        problem = f"{what} needs {amount(wanted)}, and {folder} has {amount(free)} free"
        raise DFlashError(problem, next_step)


# Offers


@dataclass(frozen=True)
class AvailableModel:
    """A model that could be chosen."""

    config: PairConfig  # to load it
    needs: int = 0  # bytes of memory with its draft models, 0 where unknown
    download: int = 0  # bytes that are not here yet
    problem: str = ""  # why it cannot be had, a sentence, "" where it can
    place: str = ""  # where it comes from; from TO_DOWNLOAD on both sizes go by its name
    drafter: str = ""  # its name, "" for none
    drafts: str = ""  # where that is, or what drafts without one, in a word or two
    entry: Entry = UNLISTED  # the registry's

    @property
    def name(self) -> str:
        return self.config.model or DEFAULT_MODEL

    @property
    def short(self) -> str:
        """The name without owner or folder."""
        return _last(self.name)

    @property
    def here(self) -> bool:
        return not self.download and not self.problem and self.place != TO_DOWNLOAD

    @property
    def bits(self) -> float:
        """Of a weight, as its name says."""
        return bits_of(self.name)

    def fits(self, installed: int) -> bool:
        """Whether a machine with so many bytes of memory can hold it beside all else."""
        return self.needs <= installed * _FOR_MODELS

    def speed(self, read_speed: float) -> float:
        """Tokens per second without drafts where so many bytes are read per second, 0 unknown."""
        weights, found = weights_of(self.name, self.entry.billions), _ACTIVE.search(self.short)
        active = 1e9 * (float(found[1]) if found else self.entry.active)
        read = self.needs * (active / weights if active and weights else 1) / HEADROOM
        return read_speed / read if read else 0

    def cells(self, installed: int, read_speed: float) -> tuple[str, str, str, str]:
        """What is to download, memory, drafts and speed, for a table."""
        download, memory = (amount(n) if n else "" for n in (self.download, self.needs))
        memory += " !" * (not self.fits(installed))
        speed = f"~{self.speed(read_speed):.1f}" if self.needs and read_speed else ""
        return f"{download:>8}", f"{memory:>8}", self.drafts, f"{speed:>6}"

    def terms(self, installed: int) -> str:
        """What is left to download, and the memory that it needs."""
        if self.problem:
            return self.problem
        come = "on this machine" if self.here else f"{amount(self.download)} to download"
        fits = "fits" if self.fits(installed) else "is too large for this machine"
        eyes = ", sees where its files have the tower" * self.entry.sees
        return f"{come}; needs {amount(self.needs)}, {fits}{eyes}" if self.needs else come


def download_plans(config: PairConfig, everything: bool = False) -> Iterator[AvailableModel]:
    """The model that `config` names, then its quantisations on the hub, those of few bits first.

    A model on this machine is the only one, unless `everything` is wanted.
    """
    names = find_names(config)
    if names.model is None:  # the built-in one, which pip brings
        missing = 0 if default_model.kept_at().is_file() else default_model.SIZE
        yield AvailableModel(config, needed_by(names), missing)
        return
    extra = AvailableModel(config)
    for part in names.parts[1:]:
        with suppress(DFlashError):  # loading does without those that cannot be had
            extra = _with(extra, config, part)
    first = _offer(config, extra)
    yield first
    if (first.here and not everything) or existing(first.name) is not None:
        return
    for name in quantisations(first.name):
        yield _offer(replace(config, model=name), extra)


def _offer(config: PairConfig, drafters: AvailableModel) -> AvailableModel:
    try:
        return _with(drafters, config, find_names(config).parts[0])
    except DFlashError as error:
        said = f"{error.what}; {error.next_step}".replace(f" with --{MODEL}", "")
        return AvailableModel(config, problem=said)


def _with(others: AvailableModel, config: PairConfig, part: tuple[str, str]) -> AvailableModel:
    source = find_source(*part, update=False)
    return AvailableModel(config, others.needs + needed(source), others.download + source.missing())


def quantisations(name: str) -> list[str]:
    """Ids of a model's MLX quantisations, by their names, those of few bits first."""
    ids = published(QUANTISED_BY, without_quantisation(name))
    others = [other for other in ids if same_weights(other, name) and other != name]
    return sorted(others, key=lambda other: (bits_of(other), len(other), other))[:_MOST]


class _Stopped(BaseException):
    """Leaves a transfer from inside; no `except Exception` of a library takes it for a failure."""


class Download:
    """A model on its way into the Hugging Face cache; what is on this machine takes no time."""

    def __init__(self, config: PairConfig) -> None:
        self.config = config
        self.total = self.done = 0  # bytes of what was missing; 0 until the hub has said so
        self.error: Exception | None = None  # why it failed, once it has ended
        self.ended = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="download", daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        return self.ended.is_set() and self.error is None and not self.stopped

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """End it at the next bytes that come; returns at once."""
        self._stop.set()
        with suppress(ImportError, RuntimeError):  # Xet's own threads, which nothing else ends
            from huggingface_hub.utils._xet import abort_xet_session

            abort_xet_session()

    def advance(self, count: float) -> None:
        """So many bytes more have come; leaves the transfer where the download is stopped."""
        if self._stop.is_set() and threading.current_thread() is self._thread:
            raise _Stopped
        self.done += int(count)

    def _run(self) -> None:
        try:
            self._fetch()
        except _Stopped:
            pass
        except Exception as error:  # the edge of a thread; stopping breaks Xet's transfers off
            self.error = None if self.stopped else error
        finally:
            self.ended.set()

    def _fetch(self) -> None:
        names = inherited(find_names(self.config))
        if names.model is None:
            default_model.fetch()
            return
        check_named(self.config).raise_first()
        files = []
        for part in reversed(names.parts):  # draft models first, as they are small
            try:
                source = find_source(*part, update=False)
                files.append((source, source.to_come()))
            except DFlashError:
                if part[1] == MODEL:  # loading does without other parts
                    raise
        self.total = sum(sum(wanted.values()) for _, wanted in files)
        check_space(disk_of_cache(), self.total, "the download", _ROOM)
        for source, wanted in files:
            for file in wanted:
                self.advance(0)
                source.fetch_file(file, telling(self.advance))
            source.fetch()  # all is here: this notes that it is whole
