"""A folder that is complete or absent, whatever ends its writing."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_mlx.core.amounts import amount
from dflash_mlx.core.errors import DFlashError

MARGIN = 16_000_000  # bytes left free beside what is written


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
        has = f"but only {amount(free)} are free in {folder}"
        what = f"{what} needs {amount(needed + MARGIN)}, {has}"
        raise DFlashError(what, "free some space or choose another disk")


@contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """A folder beside `destination` that takes its place once the block has ended well.

    Otherwise it is removed. What a killed conversion to the same place has left is removed first.
    Raises DFlashError where another conversion to it is running, or it cannot be written.
    """
    folder = destination.with_name(f".{destination.name}.partial")
    try:
        with _locked(folder, destination):
            try:
                for left in folder.iterdir():
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                yield folder
                for path in (*folder.rglob("*"), folder):
                    _sync(path)
                os.rename(folder, destination)
                _sync(destination.parent)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    except OSError as error:
        step = "free some space, or choose another DST; nothing was left behind"
        what = f"{destination} cannot be written ({error.strerror or error})"
        raise DFlashError(what, step) from error


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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
