"""Texts in a file: one record after the other, each with its digest.

A record is appended in one write, under the lock of the folder, so that several programs share a
file, and one that is killed leaves at most a part of its last record. A file that is not whole is
set aside, and what stands before the damage is kept.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path

import numpy as np

from dflash_mlx.drafters.continuations.suffixes import CODE, Text
from dflash_mlx.system.files import locked, remove_abandoned, replacing

_MAGIC = b"dflash-chat texts 1 "
_HEAD = struct.Struct(">Id16s")  # bytes of the body, Unix seconds, digest of both and the body
ANOTHERS = "is of another model or tokenizer, so what was said before is not read from it; move it"


class TextFile:
    """The texts of one model and one user.

    owner: what the tokens mean, see `owner_of`. All methods raise OSError, and no more than that.
    """

    def __init__(self, file: Path, owner: str) -> None:
        self.file = file
        self._first = _MAGIC + hashlib.sha256(owner.encode()).hexdigest()[:32].encode() + b"\n"

    def read(self, limit: int) -> tuple[list[Text], str]:
        """The newest texts of up to `limit` tokens together, oldest first, and what is wrong.

        The file then holds no more than these.
        """
        if not self.file.exists():
            return [], ""
        with self._locked():
            remove_abandoned(self.file.parent)
            data = self.file.read_bytes()
            if data.startswith(_MAGIC) and not data.startswith(self._first):
                raise PermissionError(f"{self.file} {ANOTHERS} away")
            texts, whole = _texts(data, self._first)
            kept = newest(texts, limit)
            problem = "" if whole else self._set_aside(len(texts))
            if not whole or len(kept) < len(texts):
                self._write([self._first, *map(_record, kept)])
            return kept, problem

    def append(self, texts: Sequence[Text]) -> None:
        with self._locked():
            if not self.file.exists():
                self._write([self._first])
            with open(self.file, "ab", buffering=0) as output:
                size = output.tell()
                data = b"".join(map(_record, texts))
                try:
                    if output.write(data) != len(data):
                        raise OSError("the disk is full")
                except OSError:
                    output.truncate(size)
                    raise

    def remove(self) -> None:
        if self.file.parent.exists():
            with self._locked():
                self.file.unlink(missing_ok=True)
                self._aside.unlink(missing_ok=True)

    @property
    def _aside(self) -> Path:
        return self.file.with_suffix(".damaged")

    def _set_aside(self, kept: int) -> str:
        os.replace(self.file, self._aside)
        return f"{self.file} was damaged: it is now {self._aside.name}, and {kept} texts are kept"

    def _write(self, parts: Sequence[bytes]) -> None:
        with replacing(self.file) as partial:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as output:
                output.writelines(parts)
                output.flush()
                os.fsync(output.fileno())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        folder = self.file.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder, wait=True):
            yield


def newest(texts: Sequence[Text], limit: int) -> list[Text]:
    """The last ones that have up to `limit` tokens together."""
    left, first = limit, len(texts)
    while first and len(texts[first - 1].tokens) <= left:
        first -= 1
        left -= len(texts[first].tokens)
    return [*texts[first:]]


def _record(text: Text) -> bytes:
    body = zlib.compress(text.tokens.tobytes(), 1)
    return _HEAD.pack(len(body), text.said, _digest(body, text.said)) + body


def _digest(body: bytes, said: float) -> bytes:
    head = struct.pack(">Id", len(body), said)
    return hashlib.blake2b(head + body, digest_size=16).digest()


def _texts(data: bytes, first: bytes) -> tuple[list[Text], bool]:
    """The texts up to the first that is not whole, and whether there is none such."""
    texts: list[Text] = []
    at = len(first) if data.startswith(first) else len(data) + 1
    with suppress(struct.error, zlib.error, ValueError):
        while at < len(data):
            size, said, digest = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            body = data[at : at + size]
            if len(body) < size or digest != _digest(body, said) or not isfinite(said):
                break
            texts.append(Text(np.frombuffer(zlib.decompress(body), CODE), said))
            at += size
        else:
            return texts, at == len(data)
    return texts, False
