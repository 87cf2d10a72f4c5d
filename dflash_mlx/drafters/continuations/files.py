"""Texts in a file: one record after the other, each with its digest.

A record is appended in one write, under the lock of the folder, so that several programs share a
file, and one that is killed leaves at most a part of its last record.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dflash_mlx.drafters.continuations.suffixes import CODE, Text
from dflash_mlx.system.files import locked, remove_abandoned, replacing

_MAGIC = b"dflash-chat texts 1 "
_HEAD = struct.Struct(">Id")  # bytes of the body, Unix seconds
_DIGEST = 16  # bytes, of both and the body
_ANOTHERS = "is of another model or tokenizer, so what was said before is not read; move it away"


class TextFile:
    """The texts of one model and one user; OSError where the disk says no.

    owner: what the tokens mean, see `owner_of`.
    """

    def __init__(self, file: Path, owner: str) -> None:
        self.file, self._damaged = file, file.with_suffix(".damaged")
        self._first = _MAGIC + hashlib.sha256(owner.encode()).hexdigest()[:32].encode() + b"\n"

    def read(self, limit: int) -> tuple[list[Text], str]:
        """The newest texts of up to `limit` tokens together, oldest first, and what is wrong.

        The file then holds no more than these; one that is not whole is set aside.
        """
        if not self.file.exists():
            return [], ""
        with self._locked():
            remove_abandoned(self.file.parent)
            data, problem = self.file.read_bytes(), ""
            if data.startswith(_MAGIC) and not data.startswith(self._first):
                raise PermissionError(f"{self.file} {_ANOTHERS}")
            texts, whole = _texts(data, self._first)
            kept = newest(texts, limit)
            if not whole:
                os.replace(self.file, self._damaged)
                problem = f"{self.file} was damaged: it is now {self._damaged.name}, and "
                problem += f"{len(texts)} texts before the damage are kept"
            if problem or len(kept) < len(texts):
                self._write(kept)
            return kept, problem

    def append(self, texts: Sequence[Text]) -> None:
        with self._locked():
            if not self.file.exists():
                self._write([])
            with open(self.file, "ab", buffering=0) as output:
                size, data = output.tell(), b"".join(map(_record, texts))
                try:
                    if output.write(data) != len(data):
                        raise OSError("the disk is full")
                except OSError:
                    output.truncate(size)
                    raise

    def remove(self) -> None:
        with self._locked():
            self.file.unlink(missing_ok=True)
            self._damaged.unlink(missing_ok=True)

    def _write(self, texts: Sequence[Text]) -> None:
        with replacing(self.file) as partial:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as output:
                output.writelines([self._first, *map(_record, texts)])
                output.flush()
                os.fsync(output.fileno())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self.file.parent, wait=True):
            yield


def newest(texts: Sequence[Text], limit: int) -> list[Text]:
    """The last ones that have up to `limit` tokens together."""
    first = len(texts)
    while first and (limit := limit - len(texts[first - 1].tokens)) >= 0:
        first -= 1
    return [*texts[first:]]


def _record(text: Text) -> bytes:
    return _with_digest(zlib.compress(text.tokens.tobytes(), 1), text.said)


def _with_digest(body: bytes, said: float) -> bytes:
    head = _HEAD.pack(len(body), said)
    return head + hashlib.blake2b(head + body, digest_size=_DIGEST).digest() + body


def _texts(data: bytes, first: bytes) -> tuple[list[Text], bool]:
    """The texts up to the first that is not whole, and whether all are."""
    texts: list[Text] = []
    at, begin = len(first) if data.startswith(first) else len(data) + 1, _HEAD.size + _DIGEST
    while at + begin <= len(data):
        size, said = _HEAD.unpack_from(data, at)
        body = data[at + begin : at + begin + size]
        if data[at : at + begin + size] != _with_digest(body, said):
            break
        texts.append(Text(np.frombuffer(zlib.decompress(body), CODE), said))
        at += begin + size
    return texts, at == len(data)
