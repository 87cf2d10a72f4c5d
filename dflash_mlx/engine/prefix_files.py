"""States in a folder, so that a conversation goes on after a restart and reads nothing again.

A file holds a state's arrays, its tokens among them, and in its metadata who wrote it, digests of
all that is in it, and the versions it is of. Whatever does not agree is removed and was never
there: no file, however damaged, gives another answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from safetensors import SafetensorError, safe_open

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.prompt import Piece, Prompt
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.state import State
from dflash_mlx.system.files import remove_abandoned, replace_safetensors
from dflash_mlx.system.machine import describe_versions, model_key
from dflash_mlx.system.safetensors_header import read_header
from dflash_mlx.verifier.model import Target

_FORMAT = 2  # of what states save; another number makes files of before useless
WORTH = 256  # tokens that are faster read from a disk than by the model
SPARE = 10**9  # bytes of the disk that are left to others
_SUFFIX = ".safetensors"
_TOKENS = "0"  # the name of the tokens, which states save first
_DAMAGED = (OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError, DFlashError)

Keys = npt.NDArray[np.int64]  # of tokens, see `Prompt.key_at`


@dataclass(frozen=True)
class CacheKey:
    """What wrote a state; one can go on with another's where the two are equal."""

    target: Target
    aux_layers: tuple[int, ...]  # target layers that the drafter's context was told of
    settings: Hashable  # of all caches
    networks: tuple[nn.Module, ...] = field(compare=False)  # of the context
    # Of the networks, since modules are dictionaries and compare by their weights. Whoever keeps a
    # key keeps the networks, so no other network gets these ids.
    ids: tuple[int, ...]

    @classmethod
    def of(cls, target: Target, drafter: Drafter, state: State) -> CacheKey:
        networks, settings = state.context.kind
        kinds = state.cache.kind, settings
        return cls(target, drafter.aux_layers, kinds, networks, tuple(map(id, networks)))

    def fingerprint(self) -> str:
        """A digest of weights, settings, machine and versions; those who share it share files."""
        target = self.target
        parameters = target.parameters()
        return model_key(
            target.name,
            parameters,
            _FORMAT,
            weights_digest(parameters),
            type(target.model).__module__,
            getattr(target.model, "args", None),  # what is in no weight, such as scales of rope
            self.aux_layers,
            self.settings,
            [weights_digest(_named(network)) for network in self.networks],
        )


def _named(network: nn.Module) -> list[tuple[str, mx.array]]:
    return tree_flatten(network.parameters())  # type: ignore[return-value]


def weights_digest(parameters: Iterable[tuple[str, mx.array]]) -> str:
    """Of names and of all numbers: the sums of each matrix' rows and columns, bit by bit.

    Reads the weights twice, which takes as long as two tokens of plain decoding.
    """
    digest, sums = hashlib.sha256(), []
    for name, array in parameters:
        matrix = array.reshape(-1, array.shape[-1] if array.ndim else 1)
        wide = matrix.shape[1] * matrix.itemsize % 4 == 0
        bits = matrix.view(mx.uint32 if wide else mx.uint8).astype(mx.uint32)
        sums += [bits.sum(axis=0), bits.sum(axis=1)]
        digest.update(f"{name} {array.shape} {array.dtype} ".encode())
    mx.eval(sums)
    for part in sums:
        digest.update(np.array(part).tobytes())
    return digest.hexdigest()


class PrefixFiles:
    """A folder of states, the last used ones; it is made, for its owner alone, when one is kept."""

    def __init__(self, folder: Path, limit: int, worth: int = WORTH) -> None:
        self.folder = folder
        self.limit = limit  # bytes that all of them may take; 0: none is written or read
        self.worth = worth  # tokens from which on a state is written or read
        self.problem = ""  # a sentence about why states are not kept
        self._known: dict[str, Keys] = {}  # of the tokens of files by their names
        self._keys: dict[CacheKey, str] = {}
        self._versions = json.dumps(describe_versions())
        with suppress(OSError):
            remove_abandoned(folder)
        for _ in self._usable():
            pass

    def find(
        self, cache_key: CacheKey, prompt: Prompt, least: int, empty: Callable[[], State]
    ) -> State | None:
        """A state that can go on with more than `least` tokens of `prompt`; None for none.

        empty: makes one to read into. A file that is not whole, or not what its name says, goes.
        """
        if not self.limit:
            return None
        keys, key = np.array(prompt.keys[:-1], np.int64), self._key(cache_key)
        known = [(file, _shared(self._known[file.name], keys)) for file in self._usable(key)]
        for file, shared in sorted(known, key=lambda pair: -pair[1]):
            if shared < least + self.worth:
                return None
            state = empty()
            try:
                _read(file, key, state)
                if state.match_length(prompt) > least:
                    os.utime(file)
                    return state
            except _DAMAGED:
                self._remove(file)
        return None

    def write(self, cache_key: CacheKey, state: State) -> bool:
        """Keep a state in place of those that it covers; whether it is there now."""
        if state.position < self.worth or not self.limit:
            return False
        try:
            return self._write(cache_key, state)
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            self._refuse(f"{self.folder} cannot be written ({reason})")
            return False

    def forget(self, target: Target) -> None:
        """Keep the files of a target that is not in memory any more."""
        self._keys = {known: key for known, key in self._keys.items() if known.target is not target}

    def clear(self) -> None:
        for file in self._files():
            self._remove(file)

    def _write(self, cache_key: CacheKey, state: State) -> bool:
        arrays, about = state.saved()
        size = sum(array.nbytes for array in arrays)
        if size > self.limit:
            return False
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        if shutil.disk_usage(self.folder).free < size + SPARE:
            self._refuse(f"the disk of {self.folder} is nearly full")
            return False
        key, keys = self._key(cache_key), np.array(state.keys, np.int64)
        named = {str(i): array for i, array in enumerate(arrays)}
        metadata = {
            "model": cache_key.target.name,
            "versions": self._versions,
            "key": key,
            "about": json.dumps(about),
        }
        metadata["digest"] = _digest(metadata, named)
        file = self.folder / f"{key}-{hashlib.sha256(keys.tobytes()).hexdigest()[:16]}{_SUFFIX}"
        replace_safetensors(file, named, metadata, private=True)
        self._known[file.name] = keys
        for other in self._usable(key):
            its = self._known[other.name]
            if other != file and _shared(its, keys) == len(its) == state.nearest(len(its)):
                self._remove(other)
        self._evict()
        return True

    def _usable(self, key: str = "") -> Iterator[Path]:
        """The files of a key, or all; those that are damaged or of other versions go."""
        for file in self._files(f"{key}-*" if key else "[!.]*"):
            try:
                if file.name not in self._known:
                    self._known[file.name] = _keys_of(file, self._versions)
                yield file
            except _DAMAGED:
                self._remove(file)

    def _key(self, cache_key: CacheKey) -> str:
        if cache_key not in self._keys:
            self._keys[cache_key] = cache_key.fingerprint()
        return self._keys[cache_key]

    def _files(self, name: str = "[!.]*") -> list[Path]:
        """Those that are whole, not what is being written."""
        with suppress(OSError):
            return sorted(self.folder.glob(name + _SUFFIX))
        return []

    def _evict(self) -> None:
        found = []
        for file in self._files():
            with suppress(OSError):  # another program may be evicting, too
                found.append((file.stat().st_mtime, file.stat().st_size, file))
        found.sort(reverse=True)
        total = 0
        for _, size, file in found:
            total += size
            if total > self.limit:
                self._remove(file)

    def _remove(self, file: Path) -> None:
        self._known.pop(file.name, None)
        with suppress(OSError):
            file.unlink()

    def _refuse(self, why: str) -> None:
        self.problem = self.problem or f"{why}, so conversations are read again after a restart"


def _keys_of(file: Path, versions: str) -> Keys:
    """Of the tokens in a file, as far as can be told without its digest. Raises one of _DAMAGED."""
    with safe_open(file, framework="numpy") as opened:
        if opened.metadata()["versions"] != versions:
            raise ValueError("other versions")
        tokens = opened.get_tensor(_TOKENS)
        pieces = json.loads(opened.metadata()["about"])[0][1]  # see `State.saved`
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise ValueError("no tokens")
    prompt = Prompt(tuple(tokens.tolist()), tuple(Piece(*piece) for piece in pieces))
    return np.array(prompt.keys, np.int64)


def _shared(keys: Keys, others: Keys) -> int:
    size = min(keys.size, others.size)
    differ = np.flatnonzero(keys[:size] != others[:size])
    return int(differ[0]) if differ.size else size


def _read(file: Path, key: str, state: State) -> None:
    """Read a file into an empty state. Raises one of _DAMAGED."""
    read_header(file)
    loaded: Any = mx.load(str(file), return_metadata=True)
    arrays, metadata = loaded
    if metadata["key"] != key or metadata["digest"] != _digest(metadata, arrays):
        raise ValueError("another state, or a damaged one")
    state.restore(([arrays[str(i)] for i in range(len(arrays))], json.loads(metadata["about"])))


def _digest(metadata: dict[str, str], arrays: dict[str, mx.array]) -> str:
    said = [metadata[name] for name in ("model", "versions", "key", "about")]
    digest = hashlib.sha256(repr(said).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(repr((name, array.shape, str(array.dtype))).encode())
        numbers = mx.contiguous(array).reshape(-1).view(mx.uint8)
        digest.update(np.array(numbers, copy=False).data)
    return digest.hexdigest()
