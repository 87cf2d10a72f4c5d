"""The file that a corpus grows in: whole lines only, one process at a time, any kill survived."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.train.corpus.rows import CorpusHeader, CorpusRow, parse

_ANOTHER = "name another file with --out"


class CorpusFile:
    """A corpus file, open for appending and locked until it is closed.

    header, rows: what it held when it was opened. Nothing is written before `begin`. Raises
    DFlashError for a file that is no corpus, cannot be written or belongs to another process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix == ".gz":
            raise DFlashError(f"{path} would be compressed", "write plain JSON and gzip it later")
        try:
            self._file = path.open("ab+", buffering=0)
        except OSError as error:
            raise DFlashError(f"{path} cannot be written ({error.strerror})", _ANOTHER) from None
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise DFlashError(
                    f"another process is writing {path}", f"wait for it, or {_ANOTHER}"
                ) from None
            self._file.seek(0)
            contents = self._file.read()
            if not CorpusHeader.begins_with(contents):
                raise DFlashError(f"{path} exists and does not begin as a corpus does", _ANOTHER)
            self._size = contents.rfind(b"\n") + 1  # without an incomplete last line
            self.header, self.rows = parse(path, contents[: self._size])
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> CorpusFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have the file; one that holds nothing is removed."""
        if os.fstat(self._file.fileno()).st_size == 0:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def begin(self, header: CorpusHeader) -> None:
        """Write the header of a new file, or check that `header` continues this one.

        What a killed process left behind the last whole line is cut off. Raises DFlashError where
        the file was made by another model or with other settings.
        """
        if self.header not in (None, header):
            raise DFlashError(
                f"{self.path} was made with {_difference(self.header, header)}",
                f"run with the settings it was made with, or {_ANOTHER}",
            )
        self._file.truncate(self._size)
        if self.header is None:
            self.append(header)

    def append(self, line: CorpusHeader | CorpusRow) -> None:
        """Write a row at once; where that fails the file is left as it was."""
        data, written = line.as_line().encode() + b"\n", 0
        try:
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        except BaseException:
            self._file.truncate(self._size)
            raise
        self._size += written


def _difference(old: CorpusHeader, new: CorpusHeader) -> str:
    """The first thing in which the headers differ, for a message."""
    before, after = ({**vars(header), **header.settings} for header in (old, new))
    names = (before.keys() | after.keys()) - {"settings"}
    name = next(name for name in sorted(names) if before.get(name) != after.get(name))
    return f"{name} {before.get(name)!r}, not {after.get(name)!r}"
