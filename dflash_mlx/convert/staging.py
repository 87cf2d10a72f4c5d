"""A destination folder that is complete or absent, whatever happens on the way."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import tempfile
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

    Otherwise it is removed. What killed conversions to the same place have left is removed first.
    Raises DFlashError where `needed` bytes are not free, or can no longer be written.
    """
    _remove_stale(destination)
    check_space(destination.parent, needed, str(destination))
    try:
        folder, lock = _make_folder(destination)
        try:
            yield folder
            _sync(folder)
            os.rename(folder, destination)
            _sync_folder(destination.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
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


def _prefix(destination: Path) -> str:
    return f".{destination.name}.partial-"


def _make_folder(destination: Path) -> tuple[Path, int]:
    """A new folder and the lock on it, which the system drops when this process ends."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(destination), dir=destination.parent))
        if (lock := _lock(folder)) is not None:
            folder.chmod(0o777 & ~_umask())
            return folder, lock


def _lock(folder: Path) -> int | None:
    """A descriptor that holds `folder`; None where another process does, or has removed it."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.exists():
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None


def _remove_stale(destination: Path) -> None:
    for folder in destination.parent.glob(glob.escape(_prefix(destination)) + "*"):
        if folder.is_dir() and (lock := _lock(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync(folder: Path) -> None:
    """Wait until the disk has all files of `folder`."""
    for parent, _, files in os.walk(folder):
        for name in files:
            with open(Path(parent, name), "rb") as file:
                os.fsync(file.fileno())
        _sync_folder(Path(parent))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
