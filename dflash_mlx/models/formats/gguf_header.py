"""The head of a GGUF file, checked before MLX, whose reader trusts it, opens the file.

Layout: magic, version, number of tensors and of metadata entries, the entries, a description of
each tensor, and, aligned, the data. Everything is little-endian. The reader of the `gguf` package
is not used: past the end of a file it reads empty values for ever, and it makes an array of every
token, which takes seconds.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, Keys

from dflash_mlx.core.findings import Finding, Refused
from dflash_mlx.system.safetensors_header import MAX_DIMENSION

VERSIONS = (2, 3)
MAX_DIMENSIONS = 4  # GGML's own limit
MAX_ELEMENTS = 2**22  # of an array in the metadata; vocabularies have up to 2**18
ALIGNMENT = 32  # unless the metadata says otherwise
ARCHITECTURE = "llama"

_TYPES = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h", GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f", GGUFValueType.BOOL: "?", GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q", GGUFValueType.FLOAT64: "d", GGUFValueType.STRING: "",
}  # fmt: skip

Metadata = dict[str, Any]


class GgufTensor(NamedTuple):
    """A tensor's description; shape with the fastest dimension first, as in the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata, of whose arrays only the lengths are kept, and all tensors."""

    metadata: Metadata
    tensors: dict[str, GgufTensor]


def read_gguf_header(file: Path) -> GgufHeader:
    """The head of a GGUF file; Refused for one that is no whole, consistent GGUF file."""
    try:
        if not file.is_file():
            raise ValueError("it is no file")
        if file.stat().st_size < 24:
            raise ValueError(f"it has {file.stat().st_size} bytes, its first fields take 24")
        with (
            open(file, "rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as contents,
        ):
            return _read(_Cursor(contents))
    except (ValueError, OSError) as error:
        what = f"{file.name} cannot be read as a GGUF file ({error})"
        raise Refused(Finding("error", what, "download or copy it again", str(file))) from None


class _Cursor:
    """Reads values one after the other, and never past the end."""

    def __init__(self, contents: mmap.mmap) -> None:
        self.contents = contents
        self.size = len(contents)
        self.position = 0

    def skip(self, size: int, what: str) -> int:
        """Move on by `size` bytes; returns where they begin."""
        begin, left = self.position, self.size - self.position
        if size > left:
            raise ValueError(f"{what} takes {size} bytes, {left} are left")
        self.position += size
        return begin

    def value(self, code: str, what: str) -> Any:
        """A number of a struct module's type; without a type, a text with its length before it."""
        begin = self.skip(struct.calcsize(code or "Q"), what)
        number = struct.unpack_from(f"<{code or 'Q'}", self.contents, begin)[0]
        if code:
            return number
        begin = self.skip(number, what)
        return self.contents[begin : begin + number].decode("utf-8")


def _read(cursor: _Cursor) -> GgufHeader:
    magic = cursor.contents[: cursor.skip(4, "the magic") + 4]
    if magic != b"GGUF":
        raise ValueError(f"it begins with {magic!r}, not with b'GGUF'")
    if (version := cursor.value("I", "the version")) not in VERSIONS:
        raise ValueError(f"its version is {version}, supported are {VERSIONS}")
    tensors, entries = (cursor.value("Q", "a count") for _ in range(2))
    metadata = _once((_entry(cursor) for _ in range(entries)), "metadata")
    alignment = metadata.get(Keys.General.ALIGNMENT, ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its alignment is {alignment!r}, not a power of two")
    found = _once((_tensor(cursor, alignment) for _ in range(tensors)), "tensor")
    data = -(-cursor.position // alignment) * alignment
    _check_layout(found, cursor.size - data)
    return GgufHeader(metadata, found)


def _once(pairs: Iterable[tuple[str, Any]], what: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the {what} {name[:80]!r} is there twice")
        result[name] = value
    return result


def _entry(cursor: _Cursor) -> tuple[str, Any]:
    name = cursor.value("", "the name of a metadata entry")
    shown, is_array = repr(name[:80]), False
    kind = _kind(GGUFValueType, cursor, shown)
    if kind is GGUFValueType.ARRAY:
        kind, is_array = _kind(GGUFValueType, cursor, shown), True
    if not is_array:
        return name, cursor.value(_TYPES[kind], f"the value of {shown}")
    count = cursor.value("Q", f"the length of {shown}")
    if kind is GGUFValueType.ARRAY or count > MAX_ELEMENTS:
        raise ValueError(f"{shown} is an array of {count} {kind.name}, up to {MAX_ELEMENTS}")
    if kind is GGUFValueType.STRING:
        for _ in range(count):
            cursor.value("", f"a string of {shown}")
    else:
        cursor.skip(count * struct.calcsize(_TYPES[kind]), f"the array {shown}")
    return name, range(count)


def _kind(kinds: Any, cursor: _Cursor, shown: str) -> Any:
    number = cursor.value("I", f"the type of {shown}")
    try:
        return kinds(number)
    except ValueError:
        raise ValueError(f"the type of {shown} is {number}, which is none") from None


def _tensor(cursor: _Cursor, alignment: int) -> tuple[str, GgufTensor]:
    name = cursor.value("", "the name of a tensor")
    shown = repr(name[:80])
    dimensions = cursor.value("I", f"the rank of {shown}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"{shown} has {dimensions} dimensions, 1 to {MAX_DIMENSIONS} can be")
    shape = tuple(cursor.value("Q", f"the shape of {shown}") for _ in range(dimensions))
    if not all(1 <= n <= MAX_DIMENSION for n in shape):
        raise ValueError(f"the shape of {shown} is {list(shape)}")
    kind = _kind(GGMLQuantizationType, cursor, shown)
    block, size = GGML_QUANT_SIZES[kind]
    if shape[0] % block:
        raise ValueError(f"{shown} has rows of {shape[0]}, {kind.name} has blocks of {block}")
    offset = cursor.value("Q", f"the offset of {shown}")
    if offset % alignment:
        raise ValueError(f"{shown} begins at byte {offset}, aligned to {alignment}")
    return name, GgufTensor(kind, shape, offset, math.prod(shape) // block * size)


def _check_layout(tensors: dict[str, GgufTensor], data_bytes: int) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise ValueError(f"{name[:80]!r} begins at byte {tensor.offset}, inside another tensor")
        end = tensor.offset + tensor.nbytes
    if end > data_bytes:
        raise ValueError(f"its tensors end at byte {end} of the data, it has {max(data_bytes, 0)}")


# Values of the metadata, each checked for its kind and range; ValueError names the key.


def whole(metadata: Metadata, key: str, default: int | None = None) -> int:
    """A whole number from 1 on (from 0 on where that is the default), which must fit 31 bits."""
    lowest = 0 if default == 0 else 1
    wanted = f"one whole number from {lowest} to {MAX_DIMENSION}"

    def fits(value: Any) -> bool:
        return type(value) is int and lowest <= value <= MAX_DIMENSION

    return cast(int, _value(metadata, key, fits, wanted, default))


def real(metadata: Metadata, key: str, default: float | None = None) -> float:
    """A finite number above 0."""

    def fits(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and math.isfinite(value) and value > 0

    return float(_value(metadata, key, fits, "one finite number above 0", default))


def text(metadata: Metadata, key: str, default: str | None = None) -> str:
    """A string."""
    return cast(str, _value(metadata, key, lambda v: isinstance(v, str), "a text", default))


def flag(metadata: Metadata, key: str) -> bool:
    """True or false, false where it is absent."""
    return cast(bool, _value(metadata, key, lambda v: isinstance(v, bool), "true or false", False))


def array(metadata: Metadata, key: str, kind: type = str) -> Sequence[Any]:
    """The elements of a list; of a file of which only the head is read, as many numbers."""
    found = _value(metadata, key, lambda v: isinstance(v, range | list), "a list", None)
    if isinstance(found, list) and (wrong := [v for v in found if type(v) is not kind]):
        raise ValueError(f"{key} has {repr(wrong[0])[:80]}, which is no {kind.__name__}")
    return cast(Sequence[Any], found)


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


def _value(
    metadata: Metadata, key: str, fits: Callable[[Any], bool], wanted: str, default: Any
) -> Any:
    """The value of the key with the architecture in it; without a default it must be there."""
    name = key.format(arch=ARCHITECTURE)
    if default is None and name not in metadata:
        raise ValueError(f"the metadata {name} is missing")
    value = metadata.get(name, default)
    if not fits(value):
        raise ValueError(f"{name} is {repr(value)[:80]}, not {wanted}")
    return value
