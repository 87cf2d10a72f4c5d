"""What the target thinks of every training sequence, computed once and kept on disk.

A folder is named by what it holds, so that it never holds anything else: a .safetensors file per
sequence of T tokens, with `features` [T, m*d] (the bits of bfloat16), `choices` [T, 2 * CHOICES]
(the target's most likely next tokens after every token, with their probabilities) and, in its
metadata, a CRC-32 of each. A file is complete before it takes its name, so an interrupted build
goes on where it stopped.
"""

from __future__ import annotations

import fcntl
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.ranks import launched
from dflash_mlx.system import cpu_math
from dflash_mlx.system.files import remove_partial, replace_safetensors
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target

CHOICES = 8  # next tokens that are kept
CHOICE = np.dtype([("token", "<u4"), ("probability", "<f4")])

_VERSION = 3  # of the files
_ROWS = 64  # of logits that are sorted at once
_BYTES = 2  # of a bfloat16
_CHUNK = 512  # tokens per target pass
_BUILD_AGAIN = "delete that folder and start again; the features will be computed anew"


class FeatureCache:
    """Features and most likely next tokens of sequences on disk.

    place: a folder, made when it is not there, whose name goes on with a digest of sequences,
    target and layers. sequences: token ids. aux_layers: target layers (0-based), m of them. limit:
    most bytes of features; sequences from the first that does not fit on are left out. Raises
    DFlashError when that are all.
    """

    def __init__(
        self,
        place: Path,
        sequences: Sequence[Sequence[int]],
        target: Target,
        aux_layers: tuple[int, ...],
        limit: int,
    ) -> None:
        self._target, self._aux_layers = target, aux_layers
        ends = np.cumsum([len(tokens) for tokens in sequences], dtype=np.int64)
        bytes_each = len(aux_layers) * hidden_width(target) * _BYTES
        self._sequences = sequences[: int((ends * bytes_each <= limit).sum())]
        if not len(self):
            raise DFlashError(
                f"{limit} bytes have no room for the features of the first sequence",
                "give more with --cache-gb",
            )
        identity = repr(
            (_VERSION, target_fingerprint(target), aux_layers, list(map(list, sequences)))
        )
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        self.folder = place.with_name(f"{place.name}-{digest}")

    def __len__(self) -> int:
        """Sequences that fit."""
        return len(self._sequences)

    @property
    def missing(self) -> list[int]:
        """Sequences whose features are not on disk."""
        return [i for i in range(len(self)) if not self._file(i).exists()]

    def fill(self) -> Iterator[int]:
        """Compute what is missing; yields the tokens of every sequence that is done.

        Raises OSError when the disk is full; what is finished stays usable. Raises DFlashError
        while another process is at it; those of one start wait for each other.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("wb") as locked:
            try:
                wait = 0 if launched() else fcntl.LOCK_NB
                fcntl.flock(locked, fcntl.LOCK_EX | wait)
            except OSError:
                raise DFlashError(
                    f"another process is computing the features in {self.folder}", "wait for it"
                ) from None
            remove_partial(self.folder)
            self._target.tap(self._aux_layers)
            mode = self._target.kernels.mode
            if cpu_math.applies():  # so that NumPy computes attention; no gradient flows here
                self._target.use_kernels("auto")
            try:
                for i in self.missing:
                    kept = self._compute(self._sequences[i])
                    sums = {name: _checksum(np.array(array)) for name, array in kept.items()}
                    replace_safetensors(self._file(i), kept, sums)
                    yield len(self._sequences[i])
            finally:
                self._target.use_kernels(mode)

    def features(self, i: int) -> mx.array:
        """Features [T, m*d] (bfloat16) of sequence i; DFlashError when they are damaged."""
        return mx.array(self._read(i, "features")).view(mx.bfloat16)

    def choices(self, i: int) -> npt.NDArray[Any]:
        """The target's most likely next tokens after every token of sequence i, likeliest first.

        [T, CHOICES] of CHOICE; the probabilities are those of the whole vocabulary. DFlashError
        when they are damaged.
        """
        return self._read(i, "choices").view(CHOICE)

    def _read(self, i: int, name: str) -> npt.NDArray[Any]:
        try:
            with safe_open(self._file(i), framework="numpy") as file:
                data, expected = file.get_tensor(name), file.metadata()[name]
        except (OSError, SafetensorError, KeyError, TypeError):
            data = expected = None
        if data is None or _checksum(data) != expected:
            raise DFlashError(f"{self.folder} is damaged at sequence {i}", _BUILD_AGAIN)
        return data  # type: ignore[no-any-return]

    def _compute(self, tokens: Sequence[int]) -> dict[str, mx.array]:
        """What is kept of one sequence."""
        cache = self._target.new_cache()
        features, choices = [], []
        for start in range(0, len(tokens), _CHUNK):
            piece = mx.array(list(tokens[start : start + _CHUNK]))
            block = Block(piece.size)
            logits, aux_layers = self._target.forward(piece, cache, block, self._aux_layers)
            assert aux_layers is not None
            features.append(aux_layers.astype(mx.bfloat16).view(mx.uint16))
            mx.eval(features[-1], cache.arrays)
            choices.append(likeliest(np.array(logits.astype(mx.float32))))
            cache.commit(range(piece.size))
        words = np.concatenate(choices).view(np.uint32)
        return {"features": mx.concatenate(features), "choices": mx.array(words)}

    def _file(self, i: int) -> Path:
        return self.folder / f"{i}.safetensors"


def _checksum(array: npt.NDArray[Any]) -> str:
    return str(zlib.crc32(array.data))


def hidden_width(target: Target) -> int:
    """Width d of the target's hidden states."""
    return int(target.embedding()(mx.array([0])).shape[-1])


def vocabulary_size(target: Target) -> int:
    """Logits that the target gives, V."""
    return int(target.head()(mx.zeros((1, hidden_width(target)))).shape[-1])


def target_fingerprint(target: Target) -> str:
    """Tells targets apart by the first and last row of every weight, which all training changes."""
    digest = hashlib.sha256()
    for name, array in target.parameters():
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        ends = mx.stack([array[0], array[-1]]) if array.ndim > 1 else array
        digest.update(np.array(ends.astype(mx.float32)).tobytes())
    return digest.hexdigest()


def likeliest(logits: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """[T, CHOICES] of CHOICE for logits [T, V], likeliest first, the first the greedy choice.

    Of equal ones the lowest token comes first; which of them stay at the far end is open. Of a
    vocabulary smaller than CHOICES, the last ones are token 0 with probability 0.
    """
    result = np.zeros((len(logits), CHOICES), CHOICE)
    for start in range(0, len(logits), _ROWS):
        part, kept = logits[start : start + _ROWS], result[start : start + _ROWS]
        count, rows = min(CHOICES, part.shape[-1]), np.arange(len(part))[:, None]
        best = part.argmax(axis=-1)
        chosen = np.argpartition(part, -count, axis=-1)[:, -count:]
        missing = (chosen != best[:, None]).all(axis=-1)  # where all that are kept equal it
        chosen[missing, 0] = best[missing]
        chosen = chosen[rows, np.lexsort((chosen, -part[rows, chosen]))]
        powers = np.exp(part - part[rows, best[:, None]])
        kept["token"][:, :count] = chosen
        kept["probability"][:, :count] = powers[rows, chosen] / powers.sum(axis=-1, keepdims=True)
    return result
