"""What the target thinks of every training sequence, computed once and kept on disk.

A folder holds `index.json` (what was computed), `features.bin` (bfloat16, one row of m*d numbers
per token, sequence after sequence), `choices.bin` (the target's most likely next tokens after every
token, with their probabilities) and `checksums.bin` (one CRC-32 of each per finished sequence).
Sequences are appended, so an interrupted build goes on where it stopped.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system import cpu_math
from dflash_mlx.system.files import remove_partial, replace_text
from dflash_mlx.target.block import Block
from dflash_mlx.target.model import Target
from dflash_mlx.train.likeliest import CHOICE, CHOICES, likeliest
from dflash_mlx.train.start import hidden_width

_VERSION = 2
_BYTES = 2  # of a bfloat16
_CHOICES_BYTES = CHOICES * CHOICE.itemsize
_CHECKSUMS = 8  # of a sequence's features and of its choices
_CHUNK = 512  # tokens per target pass
_BUILD_AGAIN = "delete that folder and start again; the features will be computed anew"


class FeatureCache:
    """Features and most likely next tokens of sequences on disk.

    folder: made when it is not there. sequences: token ids. taps: target layers (0-based), m of
    them. limit: most bytes of `features.bin`; sequences from the first that does not fit on are
    left out. Raises DFlashError when that are all, and for a folder that holds the features of
    something else.
    """

    def __init__(
        self,
        folder: Path,
        sequences: Sequence[Sequence[int]],
        target: Target,
        taps: tuple[int, ...],
        limit: int,
    ) -> None:
        self._folder, self._target, self._taps = folder, target, taps
        self.width = len(taps) * hidden_width(target)
        room = limit // (self.width * _BYTES)
        ends = np.cumsum([len(tokens) for tokens in sequences], dtype=np.int64)
        self._starts = [0, *ends[ends <= room].tolist()]
        self._sequences = sequences
        if not len(self):
            raise DFlashError(
                f"{limit} bytes have no room for the features of the first sequence",
                "give more with --cache-gb",
            )
        self._open_folder()

    def __len__(self) -> int:
        """Sequences that fit."""
        return len(self._starts) - 1

    @property
    def finished(self) -> int:
        """Sequences whose features are on disk."""
        return min(_size(self._file("checksums")) // _CHECKSUMS, len(self))

    def fill(self) -> Iterable[int]:
        """Compute what is missing; yields the tokens of every sequence that is done.

        Raises OSError when the disk is full; what is finished stays usable. Raises DFlashError
        while another process is at it.
        """
        with (self._folder / "index.json").open("rb") as locked:
            try:
                fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise DFlashError(
                    f"another process is computing the features in {self._folder}", "wait for it"
                ) from None
            yield from self._fill()

    def _fill(self) -> Iterable[int]:
        self._target.tap(self._taps)
        done = self.finished
        start = self._starts[done]
        _truncate(self._file("features"), start * self.width * _BYTES)
        _truncate(self._file("choices"), start * _CHOICES_BYTES)
        _truncate(self._file("checksums"), done * _CHECKSUMS)
        with (
            self._file("features").open("ab") as features,
            self._file("choices").open("ab") as choices,
            self._file("checksums").open("ab") as checksums,
        ):
            for tokens in self._sequences[done : len(self)]:
                parts = self._compute(tokens)
                for file, data in zip((features, choices), parts, strict=True):
                    file.write(data)
                    file.flush()
                checksums.write(np.array([zlib.crc32(data) for data in parts], "<u4").tobytes())
                checksums.flush()
                yield len(tokens)

    def features(self, i: int) -> mx.array:
        """Features [T, m*d] (bfloat16) of sequence i; DFlashError when they are damaged."""
        start, end = self._starts[i], self._starts[i + 1]
        count, offset = (end - start) * self.width, start * self.width * _BYTES
        data = self._read("features", np.uint16, count, offset)
        self._check(i, 0, data.data.cast("B"))
        return mx.array(data).view(mx.bfloat16).reshape(-1, self.width)

    def choices(self, i: int) -> npt.NDArray[Any]:
        """The target's most likely next tokens after every token of sequence i, likeliest first.

        [T, CHOICES] of CHOICE; the probabilities are those of the whole vocabulary.
        """
        start, end = self._starts[i], self._starts[i + 1]
        data = self._read("choices", CHOICE, (end - start) * CHOICES, start * _CHOICES_BYTES)
        self._check(i, 1, data.data.cast("B"))
        return data.reshape(-1, CHOICES)

    def _check(self, i: int, which: int, data: Any) -> None:
        expected = self._read("checksums", np.uint32, 2, i * _CHECKSUMS)
        if expected.size < 2 or zlib.crc32(data) != expected[which]:
            raise self._damaged(i)

    def _read(self, name: str, dtype: Any, count: int, offset: int) -> npt.NDArray[Any]:
        """Numbers from a file; fewer where it is shorter, none where it is missing.

        Neither mapped nor read ahead: sequences come in random order, so what a disk reads around
        them, megabytes at a time, is seldom used.
        """
        try:
            with self._file(name).open("rb") as file:
                if sys.platform == "linux":
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                return np.fromfile(file, dtype, count, offset=offset)
        except OSError:
            return np.empty(0, dtype)

    def _damaged(self, i: int) -> DFlashError:
        return DFlashError(f"{self._folder} is damaged at sequence {i}", _BUILD_AGAIN)

    def _compute(self, tokens: Sequence[int]) -> tuple[bytes, bytes]:
        """Features and choices of one sequence as they are kept."""
        cache = self._target.new_cache()
        features, choices = [], []
        with cpu_math.vectorised():
            for start in range(0, len(tokens), _CHUNK):
                piece = mx.array(list(tokens[start : start + _CHUNK]))
                logits, taps = self._target.forward(piece, cache, Block(piece.size), self._taps)
                assert taps is not None
                features.append(taps.astype(mx.bfloat16).view(mx.uint16))
                mx.eval(features[-1], cache.arrays)
                choices.append(likeliest(np.array(logits.astype(mx.float32))))
                cache.commit(range(piece.size))
        return np.array(mx.concatenate(features)).tobytes(), np.concatenate(choices).tobytes()

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.bin"

    def _open_folder(self) -> None:
        index_file, index = self._folder / "index.json", self._index()
        try:
            found = json.loads(index_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            found = self._new_folder(index_file, index)
        except (ValueError, OSError) as error:
            raise DFlashError(f"{index_file} cannot be read ({error})", _BUILD_AGAIN) from None
        if isinstance(found, dict) and found.get("version", _VERSION) != _VERSION:
            raise DFlashError(
                f"{self._folder} holds features of version {found['version']}, not {_VERSION}",
                f"{_BUILD_AGAIN}; or choose another folder with --cache",
            )
        if found != index:
            raise DFlashError(
                f"{self._folder} holds features of another corpus, target or set of layers",
                "delete that folder, or choose another one with --cache",
            )

    def _new_folder(self, index_file: Path, index: dict[str, Any]) -> dict[str, Any]:
        remove_partial(self._folder)
        if self._folder.exists() and any(self._folder.iterdir()):
            raise DFlashError(
                f"{self._folder} is not empty and holds no features",
                "choose another folder with --cache",
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_text(index_file, json.dumps(index, indent=1))
        return index

    def _index(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for tokens in self._sequences:
            digest.update(np.array(tokens, dtype=np.int64).tobytes())
        return {
            "format": "dflash-features",
            "version": _VERSION,
            "target": fingerprint(self._target),
            "target_layer_ids": list(self._taps),
            "width": self.width,
            "sequences": len(self._sequences),
            "tokens": sum(len(tokens) for tokens in self._sequences),
            "corpus": digest.hexdigest(),
        }


def fingerprint(target: Target) -> str:
    """Tells targets apart by the first and last row of every weight, which all training changes."""
    digest = hashlib.sha256()
    for name, array in target.parameters():
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        ends = mx.stack([array[0], array[-1]]) if array.ndim > 1 else array
        digest.update(np.array(ends.astype(mx.float32)).tobytes())
    return digest.hexdigest()


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _truncate(file: Path, size: int) -> None:
    with file.open("ab") as opened:
        if _size(file) < size:
            raise DFlashError(f"{file} is shorter than its index says", _BUILD_AGAIN)
        opened.truncate(size)
