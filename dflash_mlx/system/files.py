"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A name to write to, which takes the place of `file` once all is written."""
    partial = file.with_name(f".new-{os.getpid()}-{file.name}")
    try:
        yield partial
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Remove what killed programs have left in `folder`; nobody may be writing into it."""
    for file in folder.glob(".new-*"):
        file.unlink(missing_ok=True)


def remove_abandoned(folder: Path) -> None:
    """`remove_partial`, but for what programs that still run may be writing."""
    for file in folder.glob(".new-*"):
        try:
            os.kill(int(file.name.split("-")[1]), 0)
        except ProcessLookupError:
            file.unlink(missing_ok=True)
        except (OSError, ValueError, OverflowError):  # another user's; or none of ours
            continue


def replace_text(file: Path, text: str) -> None:
    """Write `text` to `file` at once, down to the disk; OSError leaves what is there.

    Who may read a file that is there already stays as it is.
    """
    with replacing(file) as partial, open(partial, "w", encoding="utf-8") as output:
        if file.exists():
            shutil.copymode(file, partial)
        output.write(text)
        output.flush()
        os.fsync(output.fileno())


def replace_safetensors(
    file: Path, arrays: dict[str, mx.array], metadata: dict[str, str], private: bool = False
) -> None:
    """Write `arrays` to `file` at once, or leave what is there; OSError when the disk is full.

    private: whether nobody but its owner may read it, from its first byte on.
    """
    with replacing(file) as partial:
        if private:
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL, 0o600))
        try:
            mx.save_safetensors(str(partial), arrays, metadata)
        except RuntimeError as error:
            raise OSError(f"{file} cannot be written ({error})") from None
        if partial.stat().st_size < sum(array.nbytes for array in arrays.values()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))


def keep_text(file: Path, text: str) -> bool:
    """Write `text` to `file` of a cache folder: whether it could be kept."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, text)
    except OSError:
        return False
    return True


def kept_json(file: Path) -> Any:
    """What `keep_text` kept; OSError or ValueError where there is nothing, or it is damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{file} is nested too deeply") from None


def write_report(file: Path, text: str) -> None:
    """Write `text` to a file that the user named; DFlashError where that cannot be done."""
    try:
        replace_text(file, text)
    except OSError as error:
        reason = error.strerror or error
        raise DFlashError(f"{file} cannot be written ({reason})", "name another file") from None


@contextmanager
def locked(folder: Path, wait: bool) -> Iterator[None]:
    """Hold the lock (flock) of a folder; without `wait`, BlockingIOError where another has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:  # not every disk has locks
            pass
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether a program, this one included, holds a lock (flock) on a file or a folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:  # a file system without such locks says something else
        return error.errno in (errno.EAGAIN, errno.EACCES)
    finally:
        os.close(descriptor)
