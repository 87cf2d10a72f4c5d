"""The head of a GGUF file, checked before MLX, whose reader trusts it, opens the file.

Layout: magic, version, number of tensors and of metadata entries, the entries, a description of
each tensor, and, aligned, the data. Everything is little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, Keys

from dflash_mlx.core.findings import Finding, Refused

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSION = 2**31 - 1  # as MLX keeps them
MAX_DIMENSIONS = 4  # GGML's own limit
MAX_ELEMENTS = 2**22  # of an array in the metadata; vocabularies have up to 2**18
ALIGNMENT = 32  # unless the metadata says otherwise

_SCALARS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h", GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f", GGUFValueType.BOOL: "?", GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q", GGUFValueType.FLOAT64: "d",
}  # fmt: skip
_NEXT_STEP = "download or copy it again"


class GgufTensor(NamedTuple):
    """A tensor's description; shape with the fastest dimension first, as in the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata, of whose arrays only the lengths are kept, and all tensors."""

    metadata: dict[str, Any]
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
        raise Refused(Finding("error", what, _NEXT_STEP, str(file))) from None


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

    def number(self, code: str, what: str) -> Any:
        """A number of a struct module's type."""
        begin = self.skip(struct.calcsize(code), what)
        return struct.unpack_from(f"<{code}", self.contents, begin)[0]

    def text(self, what: str) -> str:
        """A string with its length before it."""
        size = self.number("Q", f"the length of {what}")
        begin = self.skip(size, what)
        return self.contents[begin : begin + size].decode("utf-8")


def _read(cursor: _Cursor) -> GgufHeader:
    magic = cursor.contents[: cursor.skip(4, "the magic") + 4]
    if magic != MAGIC:
        raise ValueError(f"it begins with {magic!r}, not with {MAGIC!r}")
    if (version := cursor.number("I", "the version")) not in VERSIONS:
        raise ValueError(f"its version is {version}, supported are {VERSIONS}")
    tensors, entries = (cursor.number("Q", "a count") for _ in range(2))
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
    name = cursor.text("the name of a metadata entry")
    kind = _value_type(cursor.number("I", f"the type of {name[:80]!r}"), name)
    if kind is not GGUFValueType.ARRAY:
        return name, _value(cursor, kind, name)
    kind = _value_type(cursor.number("I", f"the type of {name[:80]!r}"), name)
    count = cursor.number("Q", f"the length of {name[:80]!r}")
    if kind is GGUFValueType.ARRAY or count > MAX_ELEMENTS:
        raise ValueError(f"{name[:80]!r} is an array of {count} {kind.name}, up to {MAX_ELEMENTS}")
    if kind is GGUFValueType.STRING:
        for _ in range(count):
            cursor.text(f"a string of {name[:80]!r}")
    else:
        cursor.skip(count * struct.calcsize(_SCALARS[kind]), f"the array {name[:80]!r}")
    return name, range(count)


def _value_type(number: int, name: str) -> GGUFValueType:
    try:
        return GGUFValueType(number)
    except ValueError:
        raise ValueError(f"the type of {name[:80]!r} is {number}, which is none") from None


def _value(cursor: _Cursor, kind: GGUFValueType, name: str) -> Any:
    if kind is GGUFValueType.STRING:
        return cursor.text(f"the value of {name[:80]!r}")
    return cursor.number(_SCALARS[kind], f"the value of {name[:80]!r}")


def _tensor(cursor: _Cursor, alignment: int) -> tuple[str, GgufTensor]:
    name = cursor.text("the name of a tensor")
    dimensions = cursor.number("I", f"the rank of {name[:80]!r}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"{name[:80]!r} has {dimensions} dimensions, 1 to {MAX_DIMENSIONS} can be")
    shape = tuple(cursor.number("Q", f"the shape of {name[:80]!r}") for _ in range(dimensions))
    if not all(1 <= n <= MAX_DIMENSION for n in shape):
        raise ValueError(f"the shape of {name[:80]!r} is {list(shape)}")
    number = cursor.number("I", f"the type of {name[:80]!r}")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ValueError(f"the type of {name[:80]!r} is {number}, which is none") from None
    block, size = GGML_QUANT_SIZES[kind]
    if shape[0] % block:
        raise ValueError(f"{name[:80]!r} has rows of {shape[0]}, {kind.name} has blocks of {block}")
    offset = cursor.number("Q", f"the offset of {name[:80]!r}")
    if offset % alignment:
        raise ValueError(f"{name[:80]!r} begins at byte {offset}, aligned to {alignment}")
    return name, GgufTensor(kind, shape, offset, math.prod(shape) // block * size)


def _check_layout(tensors: dict[str, GgufTensor], data_bytes: int) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise ValueError(f"{name[:80]!r} begins at byte {tensor.offset}, inside another tensor")
        end = tensor.offset + tensor.nbytes
    if end > data_bytes:
        raise ValueError(f"its tensors end at byte {end} of the data, it has {max(data_bytes, 0)}")
