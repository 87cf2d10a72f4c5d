"""A folder that is complete or absent, whatever ends its writing."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
        raise DFlashError(
            f"{what} needs {amount(needed + MARGIN)}, but only {amount(free)} are free in {folder}",
            "free some space or choose another disk",
        )


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
        raise DFlashError(
            f"{destination} cannot be written ({error.strerror or error})",
            "free some space, or choose another DST; nothing was left behind",
        ) from error


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
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def head(tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> bytes:
    """The length of a file's header, and the header: type, shape and place of every tensor.

    tensors: type, shape and bytes of each, in the order in which their numbers follow.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    begin = 0
    for name, (dtype, shape, size) in tensors.items():
        place = [begin, begin + size]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": place}
        begin += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
