"""A destination folder that is complete or absent, whatever happens on the way."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_mlx.core.errors import DFlashError

MARGIN = 16_000_000  # bytes left free beside what is written

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def resolve_destination(name: str) -> Path:
    """The folder to be made; DFlashError unless it is absent or empty and its parent is there."""
    elsewhere = "name a folder that does not exist yet as DST"
    try:
        destination = Path(name).expanduser().resolve()
        if destination.exists() and not destination.is_dir():
            raise DFlashError(f"{destination} is a file", elsewhere)
        if destination.is_dir() and (found := next(destination.iterdir(), None)) is not None:
            raise DFlashError(f"{destination} is not empty, it holds {found.name}", elsewhere)
        parent_is_there = destination.parent.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such home, a zero byte
        raise DFlashError(f"{name[:80]!r} cannot be DST ({error})", elsewhere) from None
    if not parent_is_there:
        raise DFlashError(f"there is no folder {destination.parent}", "create it, or change DST")
    return destination


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raise DFlashError unless `needed` bytes, for `what`, fit on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if free < needed + MARGIN:
        raise DFlashError(
            f"{what} needs {gigabytes(needed + MARGIN)}, but only {gigabytes(free)} are free in "
            f"{folder}",
            "free some space or choose another disk",
        )


@contextmanager
def staged(destination: Path, needed: int) -> Iterator[Path]:
    """A folder beside `destination` that takes its place once the block has ended well.

    Otherwise it is removed. What a killed conversion to the same place has left is removed first.
    Raises DFlashError where another conversion to it is running, and where `needed` bytes are not
    free, or can no longer be written.
    """
    folder = destination.with_name(f".{destination.name}.partial")
    try:
        with _locked(folder, destination):
            try:
                _empty(folder)
                check_space(destination.parent, needed, str(destination))
                yield folder
                _sync(folder)
                os.rename(folder, destination)
                _sync_one(destination.parent)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    except OSError as error:
        if error.errno in _FULL:
            check_space(destination.parent, needed, str(destination))
        raise DFlashError(
            f"{destination} cannot be written ({error.strerror or error})",
            "free some space, or choose another DST; nothing was left behind",
        ) from error


def gigabytes(size: int) -> str:
    """A number of bytes for people."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} bytes"


@contextmanager
def _locked(folder: Path, destination: Path) -> Iterator[None]:
    """`folder`, made if need be, for this process alone, as long as it lives."""
    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"{destination} is being written by another conversion"
            raise DFlashError(what, "wait until that has ended, or choose another DST") from None
        yield
    finally:
        os.close(lock)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _sync(folder: Path) -> None:
    """Wait until the disk has a folder and all that is in it."""
    for parent, _, files in os.walk(folder):
        for name in (*files, "."):
            _sync_one(Path(parent, name))


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
