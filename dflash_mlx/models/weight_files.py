"""A model's weight files as their heads tell them: which there are, and what they hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from dflash_mlx.core.errors import Collector, DFlashError, Finding
from dflash_mlx.models.registry import instead_of
from dflash_mlx.models.source import CONFIG, INDEX, Source
from dflash_mlx.system.safetensors_header import TensorHeader

HEADROOM = 1.15  # caches and temporary arrays, as a share of the weights

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
BY_LAYER = "intermediate_size"  # gemma3n has a list of them, one for each layer
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
# Sizes of something that is stored, so that the files have at least one bit for each unit.
_STORED = re.compile(
    r"(?!.*(window|chunk|block|group|batch))(.*_(size|dim|dims|layers|heads|rank|experts)|n_\w+|d_\w+|dim)"
)
_FLOATING = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Headers = dict[str, TensorHeader]


@dataclass(frozen=True)
class Weights:
    """All tensors of a model by name; where a name is in two files, one of the two."""

    tensors: Mapping[str, TensorHeader]
    quantisation: str = ""  # in words, "" for none
    group_size: int = 64  # weights that share a scale, where they are quantised

    @property
    def stored_bytes(self) -> int:
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
    source: Source, raw: Mapping[str, Any], found: Collector, next_step: str
) -> Weights:
    """The tensors in a model's weight files; what does not fit them, or `raw`, goes to `found`."""
    there = found.attempt(lambda: source.files)
    if there is None:
        return Weights({})
    files = [name for name in there if fnmatch(name, source.weights)]
    if not files:
        found.add([_no_weights(source, next_step)])
        return Weights({})
    headers = {f: found.attempt(source.header, f, next_step) or {} for f in files}
    wrong = (Finding("error", what, next_step) for what in _misplaced(source, headers))
    found.attempt(found.add, wrong)
    tensors = {name: tensor for held in headers.values() for name, tensor in held.items()}
    weights = Weights(tensors, *quantisation(raw))
    found.add(too_large(source, raw, weights))
    return weights


def quantisation(raw: Mapping[str, Any]) -> tuple[str, int]:
    """How weights are quantised, in words, "" for not at all; and the size of a group."""
    found = raw.get("quantization") or raw.get("quantization_config")
    if not isinstance(found, dict):
        return "", 64
    bits, group = found.get("bits"), found.get("group_size")
    if type(bits) is not int or type(group) is not int:
        return str(found.get("quant_method", found.get("mode", "in a way of its own")))[:40], 64
    mode = "" if found.get("mode", "affine") == "affine" else f", {str(found['mode'])[:20]}"
    return f"{bits} bits in groups of {group}{mode}", group


def too_large(source: Source, raw: Mapping[str, Any], weights: Weights) -> Iterator[Finding]:
    """Sizes that the weight files cannot hold, so that building the model would not end well."""
    bits, tensors = 8 * weights.stored_bytes, len(weights.tensors)
    for field, value in _stored_sizes(raw) if tensors else ():
        limit, unit = (tensors, "tensors") if field in _LAYERS else (bits, "bits")
        if value > limit:
            wanted = f"possible with {limit} {unit} of weights"
            yield wrong_number(source, field, value, wanted)


def _stored_sizes(raw: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for field, value in raw.items():
        if isinstance(value, dict):
            yield from _stored_sizes(value)
        elif field == BY_LAYER and isinstance(value, list):
            yield from ((field, v) for v in value if isinstance(v, int | float))
        elif isinstance(value, int | float) and _STORED.fullmatch(field):
            yield field, value


def wrong_number(source: Source, field: str, value: Any, wanted: str) -> Finding:
    """That a field of a config.json is not what was wanted."""
    what = f"{field} in {source.place(CONFIG)} is {repr(value)[:80]}, not {wanted}"
    return Finding("error", what, "choose another model")


def is_whole(source: Source) -> bool:
    """Whether config.json is there, and of the weight files all shards and all of the index."""
    try:
        source.read_json(CONFIG)
        files = {name: Headers() for name in source.files if fnmatch(name, source.weights)}
        return bool(files) and not any(_misplaced(source, files))
    except DFlashError:
        return False


def _no_weights(source: Source, next_step: str) -> Finding:
    pickled = [name for name in source.files if any(fnmatch(name, p) for p in _PICKLED)]
    if pickled:
        what = f"{source.name} has no .safetensors files, and files like {pickled[0]} can run code"
        step = "choose a folder or a revision with .safetensors files"
        if (other := instead_of(source.name)) is not None:
            step = f"choose {other}, which is for the same model and has .safetensors files"
        return Finding("error", what, step)
    others = [name for name in source.files if name.endswith(".safetensors")]
    instead = f", only {others[0]}" if others else ""
    what = f"No safetensors found in {source.name}: there is no {source.weights}{instead}"
    return Finding("error", what, next_step)


def _misplaced(source: Source, headers: Mapping[str, Headers]) -> Iterator[str]:
    """Files that names or the index ask for and are not there; tensors in no file or in two."""
    where: dict[str, str] = {}
    for file, tensors in headers.items():
        if match := _SHARD.fullmatch(file):
            stem, _, count = match.groups()
            names = (f"{stem}-{i:05}-of-{count}.safetensors" for i in range(1, int(count) + 1))
            if missing := next((name for name in names if name not in source.files), None):
                yield f"{source.name} lacks {missing}, which {file} belongs with"
        if both := where.keys() & tensors.keys():
            yield f"tensor {min(both)} of {source.name} is in {where[min(both)]} and in {file}"
        where.update(dict.fromkeys(tensors, file))
    if INDEX in source.files and fnmatch(INDEX, f"{source.weights}*"):
        yield from _against_index(source, headers)


def _against_index(source: Source, headers: Mapping[str, Headers]) -> Iterator[str]:
    weight_map = source.read_json(INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        yield f"{source.place(INDEX)} has no weight_map"
        return
    for file in dict.fromkeys(map(str, weight_map.values())):
        if file not in source.files:
            yield f"{source.name} lacks {file[:200]}, which {INDEX} belongs with"
    for tensor, file in weight_map.items():
        if (held := headers.get(str(file))) and tensor not in held:
            yield f"{source.place(INDEX)} has tensor {tensor} in {file}, which lacks it"
            return
