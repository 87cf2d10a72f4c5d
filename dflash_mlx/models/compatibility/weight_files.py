"""A model's weight files as their heads tell them: which there are, and what they hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from dflash_mlx.core.findings import Collector, Finding
from dflash_mlx.models.compatibility.model_source import ModelSource, read_json
from dflash_mlx.system.safetensors_header import DOWNLOAD_AGAIN, TensorHeader

HEADROOM = 1.15  # caches and temporary arrays, as a share of the weights
INDEX = "model.safetensors.index.json"

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_FLOATING = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Weights:
    """All tensors of a model by name; where a name is in two files, one of the two.

    group_size: weights that share a scale, where they are quantised.
    """

    tensors: Mapping[str, TensorHeader]
    group_size: int = 64

    @property
    def stored_bytes(self) -> int:
        """Of all tensors, as they are stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def parameters(self) -> int:
        """Weights, quantised ones counted one by one, without their scales and biases."""
        return sum(self._weights(name) for name in self.tensors)

    @property
    def dtype(self) -> str:
        """The floating type with the most bytes, or the stored one where none is floating."""
        bytes_of: Counter[str] = Counter()
        for tensor in self.tensors.values():
            bytes_of[tensor.dtype] += tensor.nbytes
        floating = [dtype for dtype, _ in bytes_of.most_common() if dtype in _FLOATING]
        return _FLOATING[floating[0]] if floating else next(iter(bytes_of), "unknown")

    def memory(self, on_cpu: bool) -> int:
        """Bytes to hold them loaded, with room for caches. on_cpu: as float32, its fast path."""
        return int((4 * self.parameters if on_cpu else self.stored_bytes) * HEADROOM)

    def _weights(self, name: str) -> int:
        module, _, part = name.rpartition(".")
        packed, scales = (self.tensors.get(f"{module}.{p}") for p in ("weight", "scales"))
        if packed is None or scales is None or packed.dtype != "U32":
            return self.tensors[name].size
        return scales.size * self.group_size if part == "weight" else 0


def check_weights(
    source: ModelSource, pattern: str, found: Collector, next_step: str = DOWNLOAD_AGAIN
) -> Weights:
    """The tensors in the files that match `pattern`; what is wrong with them goes to `found`."""
    there = found.attempt(lambda: source.files)
    if there is None:
        return Weights({})
    files = [name for name in there if fnmatch(name, pattern)]
    if not files:
        found.add([_no_weights(source, pattern, next_step)])
        return Weights({})
    found.add(_missing_shards(source, files, next_step))
    headers = {f: found.attempt(source.header, f, next_step) or {} for f in files}
    if INDEX in there and fnmatch(INDEX, f"{pattern}*"):
        index = found.attempt(read_json, source, INDEX) or {}
        found.add(_against_index(source, index, headers, next_step))
    found.add(_twice(source, headers, next_step))
    return Weights({n: tensor for tensors in headers.values() for n, tensor in tensors.items()})


def missing_files(source: ModelSource, files: list[str], pattern: str) -> Iterator[Finding]:
    """Weight files that are not there, though the names of `files` or the index ask for them.

    pattern: of the weight files that are wanted. Raises Refused for an index that is unreadable.
    """
    yield from _missing_shards(source, files, DOWNLOAD_AGAIN)
    if INDEX in source.files and fnmatch(INDEX, f"{pattern}*"):
        yield from _against_index(source, read_json(source, INDEX), {}, DOWNLOAD_AGAIN)


def _no_weights(source: ModelSource, pattern: str, next_step: str) -> Finding:
    pickled = [name for name in source.files if any(fnmatch(name, p) for p in _PICKLED)]
    if pickled:
        what = f"{source.name} holds pickled weights only ({pickled[0]}), which can run code"
        step = "choose a folder or a revision with .safetensors files"
        return Finding("error", what, step, source.place(pickled[0]), "", pickled[0], pattern)
    others = [name for name in source.files if name.endswith(".safetensors")]
    instead = f", only {others[0]}" if others else ""
    what = f"No safetensors found in {source.name}: there is no {pattern}{instead}"
    return Finding("error", what, next_step, source.name, "", "none", pattern)


def _missing_shards(source: ModelSource, files: list[str], next_step: str) -> Iterator[Finding]:
    """Of files named one of several, those that are not there."""
    for name in files:
        if match := _SHARD.fullmatch(name):
            stem, _, count = match.groups()
            names = (f"{stem}-{i:05}-of-{count}.safetensors" for i in range(1, int(count) + 1))
            if missing := next((name for name in names if name not in source.files), None):
                yield _lacks(source, name, missing, next_step)


def _lacks(source: ModelSource, says: str, missing: str, next_step: str) -> Finding:
    what = f"{source.name} lacks {missing}, which {says} belongs with"
    return Finding("error", what, next_step, source.place(missing), "", "missing", missing)


def _against_index(
    source: ModelSource,
    index: Mapping[str, Any],
    headers: Mapping[str, Mapping[str, TensorHeader]],
    next_step: str,
) -> Iterator[Finding]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        if index:
            what = f"{source.place(INDEX)} has no weight_map"
            yield Finding("error", what, next_step, source.place(INDEX), "weight_map")
        return
    missing_files = set()
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or file not in source.files:
            if str(file) not in missing_files:
                missing_files.add(str(file))
                yield _lacks(source, INDEX, str(file)[:200], next_step)
        elif file in headers and headers[file] and tensor not in headers[file]:
            what = f"{source.place(INDEX)} has tensor {tensor} in {file}, which lacks it"
            yield Finding("error", what, next_step, source.place(file), tensor, "missing", file)
            return


def _twice(
    source: ModelSource, headers: Mapping[str, Mapping[str, TensorHeader]], next_step: str
) -> Iterator[Finding]:
    where: dict[str, str] = {}
    for file, tensors in headers.items():
        if both := where.keys() & tensors.keys():
            name = min(both)
            what = f"tensor {name} of {source.name} is in {where[name]} and in {file}"
            yield Finding("error", what, next_step, source.place(file), name, file, where[name])
            return
        where.update(dict.fromkeys(tensors, file))
