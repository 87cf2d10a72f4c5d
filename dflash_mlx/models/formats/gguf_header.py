"""The head of a GGUF file, checked before MLX, whose reader trusts it, opens the file.

Layout: magic, version, number of tensors and of metadata entries, the entries, a description of
each tensor, and, aligned, the data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, Keys
from gguf.gguf_reader import ReaderField

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import in_one_line
from dflash_mlx.system.safetensors_header import MAX_DIMENSION

MAX_DIMENSIONS = 4  # GGML's own limit
MAX_ELEMENTS = 2**22  # of an array in the metadata; vocabularies have up to 2**18
ARCHITECTURE = "llama"
READABLE = ("F32", "F16", "Q4_0", "Q4_1", "Q8_0")  # types of tensors

Arrays = dict[str, mx.array]
Metadata = dict[str, Any]


def read_file(file: Path) -> tuple[Arrays, Metadata]:
    """Tensors as MLX names them, and metadata as plain Python values.

    Raises DFlashError for a file that is no whole, consistent one, or that MLX does not read.
    """
    try:
        if not file.is_file():
            raise ValueError("it is no file")
        with open(file, "rb") as opened:
            if (magic := opened.read(4)) != b"GGUF":
                raise ValueError(f"it begins with {magic!r}, not with b'GGUF'")
        _Head(file)
        loaded: Any = mx.load(str(file), format="gguf", return_metadata=True)
        tensors, metadata = loaded
        plain = {k: v.tolist() if isinstance(v, mx.array) else v for k, v in metadata.items()}
        return tensors, plain
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        is_sound = isinstance(error, NotImplementedError)
        other = f"choose a GGUF file of type {', '.join(READABLE)}"
        raise DFlashError(
            f"{file.name} cannot be read as a GGUF file ({in_one_line(error)})",
            other if is_sound else "download or copy it again",
        ) from None


class _Head(GGUFReader):
    """The gguf package's reader, made to end where the file does, and to judge what MLX trusts.

    By itself it reads empty values for ever past the end, and makes an array of every token, which
    takes seconds.
    """

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        size, left = int(count) * np.dtype(dtype).itemsize, len(self.data) - offset
        if size > left:
            raise ValueError(f"at byte {offset} {size} bytes are wanted, {max(left, 0)} are left")
        return super()._get(offset, dtype, count, override_order)

    def _build_fields(self, offs: int, count: int) -> int:
        if self.byte_order != "I":
            raise ValueError("it is big-endian, little-endian files can be read")
        end = super()._build_fields(offs, count)
        if field := self.fields.get(Keys.General.ALIGNMENT):
            value = field.contents()
            if type(value) is not int or value < 1 or value & (value - 1):
                raise ValueError(f"its alignment is {repr(value)[:80]}, not a power of two")
        return end

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """Steps over arrays."""
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(self._get(orig_offs, np.uint32)[0])
        count, end = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
        if kind is GGUFValueType.ARRAY or count > MAX_ELEMENTS:
            raise ValueError(f"it has an array of {count} {kind.name}, up to {MAX_ELEMENTS} can be")
        if kind is GGUFValueType.STRING:
            contents = self.data.data
            for _ in range(count):
                end += 8 + int.from_bytes(contents[end : end + 8], "little")
        else:
            end += count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        self._get(orig_offs, np.uint8, end - orig_offs)
        return end - orig_offs, [], [], [GGUFValueType.ARRAY]

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        """Instead of making arrays of the tensors, look where they are."""
        (name, count), *_ = Counter(field.name for field in fields).most_common(1) or [("", 0)]
        if count > 1:
            raise ValueError(f"it has the tensor {name[:80]!r} {count} times")
        places = sorted(_place(field, int(self.alignment)) for field in fields)
        for (_, end, first), (begin, _, second) in pairwise(places):
            if begin < end:
                raise ValueError(f"{second!r} begins at byte {begin}, inside {first!r}")
        end, left = places[-1][1] if places else 0, max(len(self.data) - int(start_offs), 0)
        if end > left:
            raise ValueError(f"its tensors end at byte {end} of the data, it has {left}")


def _place(field: ReaderField, alignment: int) -> tuple[int, int, str]:
    """Where a tensor begins and ends, and its name; its shape has the fastest dimension first."""
    name, shape = field.name[:80], field.parts[3].tolist()
    number, begin = (int(part[0]) for part in field.parts[4:])
    if not 1 <= len(shape) <= MAX_DIMENSIONS or not all(1 <= n <= MAX_DIMENSION for n in shape):
        raise ValueError(f"the shape of {name!r} is {shape}, 1 to {MAX_DIMENSIONS} numbers can be")
    kind = GGMLQuantizationType(number)
    if kind.name not in READABLE:
        raise NotImplementedError(f"{name!r} is of type {kind.name}, which MLX does not read")
    block, size = GGML_QUANT_SIZES[kind]
    if shape[0] % block:
        raise ValueError(f"{name!r} has rows of {shape[0]}, {kind.name} has blocks of {block}")
    if begin % alignment:
        raise ValueError(f"{name!r} begins at byte {begin}, aligned to {alignment}")
    return begin, begin + math.prod(shape) // block * size, name


_KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    int: (
        f"one whole number from 1 to {MAX_DIMENSION}",
        lambda value: type(value) is int and 1 <= value <= MAX_DIMENSION,
    ),
    float: (
        "one finite number above 0",
        lambda value: type(value) in (int, float) and 0 < value < math.inf,
    ),
    str: ("a text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    list: ("a list", lambda value: isinstance(value, list)),
}


def value_of(metadata: Metadata, key: str, kind: type, default: Any = None) -> Any:
    """A value of a kind of _KINDS; ValueError names the key. Without a default it must be there."""
    name = key.format(arch=ARCHITECTURE)
    if default is None and name not in metadata:
        raise ValueError(f"the metadata {name} is missing")
    value, (wanted, fits) = metadata.get(name, default), _KINDS[kind]
    if not fits(value):
        raise ValueError(f"{name} is {repr(value)[:80]}, not {wanted}")
    return value


def array(metadata: Metadata, key: str, kind: type = str) -> list[Any]:
    """The elements of a list, all of a kind; raises as `value_of`."""
    value: list[Any] = value_of(metadata, key, list)
    if wrong := [v for v in value if type(v) is not kind]:
        raise ValueError(f"{key} has {repr(wrong[0])[:80]}, which is no {kind.__name__}")
    return value


def token_ids(metadata: Metadata, *keys: str) -> dict[str, int]:
    """Those of these keys that are there, each a token of the vocabulary."""
    count = len(array(metadata, Keys.Tokenizer.LIST))
    found = {key: metadata[key] for key in keys if key in metadata}
    for key, value in found.items():
        if type(value) is not int:
            raise ValueError(f"{key} is {repr(value)[:80]}, not one token")
        if not 0 <= value < count:
            raise ValueError(f"its special token {value} is outside its {count} tokens ({key})")
    return found
