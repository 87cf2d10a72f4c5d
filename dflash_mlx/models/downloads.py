"""What choosing a model would take: memory, bytes to download; and its quantisations on the hub.

A `Download` fetches a model with its draft models on a thread of its own. It shows how far it is,
can be stopped, and goes on where it was stopped: whole files stay in the Hugging Face cache, the
one that was under way begins anew.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.text import amount
from dflash_mlx.models import default_model
from dflash_mlx.models.default_model import DEFAULT_TARGET, kept_at
from dflash_mlx.models.load import check_named
from dflash_mlx.models.memory import bits_of, memory_needed, needed, needed_by
from dflash_mlx.models.names import DEFAULT_MODEL, find_names, find_source, inherited
from dflash_mlx.models.registry import same_weights, without_quantisation
from dflash_mlx.models.source import MODEL, NoBar, disk_of_cache, published
from dflash_mlx.system.files import existing

QUANTISED_BY = "mlx-community"  # who publishes MLX quantisations of nearly everything
_MOST = 12  # quantisations to offer


@dataclass(frozen=True)
class DownloadPlan:
    """A model that could be chosen."""

    config: PairConfig  # to load it
    needs: int = 0  # bytes of memory with its draft models, 0 where unknown
    download: int = 0  # bytes that are not here yet
    problem: str = ""  # why it cannot be had, a sentence, "" where it can

    @property
    def name(self) -> str:
        return self.config.model or DEFAULT_MODEL

    @property
    def here(self) -> bool:
        return not self.download and not self.problem

    def terms(self, there: int) -> str:
        """What is left to download, and the memory that it needs. there: bytes of memory."""
        if self.problem:
            return self.problem
        come = "on this machine" if self.here else f"{amount(self.download)} to download"
        return f"{come}; {memory_needed(self.needs, there)}" if self.needs else come


def download_plans(config: PairConfig, everything: bool = False) -> Iterator[DownloadPlan]:
    """The model that `config` names, then its quantisations on the hub, those of few bits first.

    Each is asked for when it is its turn; nothing is downloaded. Of a model on this machine there
    is no other offer, unless `everything` is wanted. Raises DFlashError for names that no model can
    have.
    """
    names = find_names(config)
    if names.model is None:  # the built-in one, which pip brings
        missing = 0 if kept_at().is_file() else DEFAULT_TARGET.size
        yield DownloadPlan(config, needed_by(names), missing)
        return
    extra = DownloadPlan(config)
    for part in names.parts[1:]:
        with suppress(DFlashError):  # loading does without those that cannot be had
            extra = _with(extra, config, part)
    first = _offer(config, extra)
    yield first
    if (first.here and not everything) or existing(first.name) is not None:
        return
    for name in quantisations(first.name):
        yield _offer(replace(config, model=name), extra)


def _offer(config: PairConfig, drafters: DownloadPlan) -> DownloadPlan:
    try:
        return _with(drafters, config, find_names(config).parts[0])
    except DFlashError as error:
        return DownloadPlan(config, problem=str(error))


def _with(others: DownloadPlan, config: PairConfig, part: tuple[str, str]) -> DownloadPlan:
    """What others take and one more; DFlashError where the hub does not say."""
    source = find_source(*part, update=False)
    return DownloadPlan(config, others.needs + needed(source), others.download + source.missing())


def quantisations(name: str) -> list[str]:
    """Ids of a model's MLX quantisations, those of few bits first; [] where the hub says nothing.

    They are found by their names: the same in all but owner, case and quantisation.
    """
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
        """Draft models first, as they are small; loading does without those that cannot be had.

        Whether all fits is known from the heads of the weight files, before any is fetched.
        """
        names = inherited(find_names(self.config))
        if names.model is None:
            default_model.fetch()
            return
        check_named(self.config).raise_first()
        files = []
        for part in reversed(names.parts):
            try:
                source = find_source(*part, update=False)
                files.append((source, source.to_come()))
            except DFlashError:
                if part[1] == MODEL:
                    raise
        self.total = sum(sum(wanted.values()) for _, wanted in files)
        check_space(self.total)
        for source, wanted in files:
            for file in wanted:
                self.advance(0)
                source.fetch_file(file, _bar(self))
            source.fetch()  # all is here: this notes that it is whole


def check_space(wanted: int) -> None:
    """Raise DFlashError where the disk has no room for `wanted` bytes in the Hugging Face cache."""
    folder = disk_of_cache()
    if (free := shutil.disk_usage(folder).free) < wanted:
        raise DFlashError(
            f"the download takes {amount(wanted)}, and {folder} has {amount(free)} free",
            "choose a smaller or a quantised model, or remove others with dflash-chat clean",
        )


def _bar(download: Download) -> type:
    """What huggingface_hub takes for a class of progress bars, telling `download` of bytes."""

    class Bar(NoBar):
        def update(self, count: float | None = 1) -> None:
            download.advance(count or 0)

        def update_transfer(self, _: float | None = 1) -> None:
            """Bytes on the network, of which Xet needs fewer than it writes."""

        def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None:
            pass

    return Bar
