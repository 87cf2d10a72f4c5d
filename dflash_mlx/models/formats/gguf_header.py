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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, Keys

from dflash_mlx.core.errors import DFlashError
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

READABLE = ("F32", "F16", "Q4_0", "Q4_1", "Q8_0")  # types of tensors

Metadata = dict[str, Any]


def check_gguf(file: Path) -> None:
    """Raise DFlashError for a file that is no whole, consistent one, or that MLX does not read."""
    try:
        if not file.is_file():
            raise ValueError("it is no file")
        if not file.stat().st_size:
            raise ValueError("it has 0 bytes")  # which cannot be mapped
        with (
            open(file, "rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as contents,
        ):
            _check(_Cursor(contents, file.name))
    except (ValueError, OSError) as error:
        what = f"{file.name} cannot be read as a GGUF file ({error})"
        raise DFlashError(what, "download or copy it again") from None


class _Cursor:
    """Reads values one after the other, and never past the end. at: what it reads, for errors."""

    def __init__(self, contents: mmap.mmap, file: str) -> None:
        self.contents, self.file = contents, file
        self.position = 0
        self.at = "its first fields"

    def skip(self, size: int) -> int:
        """Move on by `size` bytes; returns where they begin."""
        begin, left = self.position, len(self.contents) - self.position
        if size > left:
            raise ValueError(f"it ends in {self.at}: {size} bytes are wanted, {left} are left")
        self.position += size
        return begin

    def value(self, code: str) -> Any:
        """A number of a struct module's type; without a type, a text with its length before it."""
        begin = self.skip(struct.calcsize(code or "Q"))
        number = struct.unpack_from(f"<{code or 'Q'}", self.contents, begin)[0]
        if code:
            return number
        begin = self.skip(number)
        return self.contents[begin : begin + number].decode("utf-8")

    def kind(self, kinds: Any) -> Any:
        """A member of an enumeration."""
        number = self.value("I")
        try:
            return kinds(number)
        except ValueError:
            raise ValueError(f"the type of {self.at} is {number}, which is none") from None

    def each(self, count: int, what: str, read: Callable[[], Any]) -> dict[str, Any]:
        """What `read` makes of each of `count` entries, by the name that stands before it."""
        result: dict[str, Any] = {}
        for _ in range(count):
            self.at = f"the name of a {what}"
            name = self.value("")
            self.at = f"the {what} {name[:80]!r}"
            if name in result:
                raise ValueError(f"{self.at} is there twice")
            result[name] = read()
        return result


def _check(cursor: _Cursor) -> None:
    begin = cursor.skip(4)
    if (magic := cursor.contents[begin:4]) != b"GGUF":
        raise ValueError(f"it begins with {magic!r}, not with b'GGUF'")
    if (version := cursor.value("I")) not in VERSIONS:
        raise ValueError(f"its version is {version}, supported are {VERSIONS}")
    count, entries = cursor.value("Q"), cursor.value("Q")
    metadata = cursor.each(entries, "metadata", lambda: _entry(cursor))
    alignment = metadata.get(Keys.General.ALIGNMENT, ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its alignment is {alignment!r}, not a power of two")
    places = cursor.each(count, "tensor", lambda: _place(cursor, alignment))
    left, end = len(cursor.contents) - -(-cursor.position // alignment) * alignment, 0
    for name, (begin, stop) in sorted(places.items(), key=lambda item: item[1]):
        if begin < end:
            raise ValueError(f"{name[:80]!r} begins at byte {begin}, inside another tensor")
        end = stop
    if end > left:
        raise ValueError(f"its tensors end at byte {end} of the data, it has {max(left, 0)}")


def _entry(cursor: _Cursor) -> Any:
    """A value of the metadata; None for an array."""
    if (kind := cursor.kind(GGUFValueType)) is not GGUFValueType.ARRAY:
        return cursor.value(_TYPES[kind])
    kind, count = cursor.kind(GGUFValueType), cursor.value("Q")
    if kind is GGUFValueType.ARRAY or count > MAX_ELEMENTS:
        raise ValueError(f"{cursor.at} is an array of {count} {kind.name}, up to {MAX_ELEMENTS}")
    if kind is not GGUFValueType.STRING:
        cursor.skip(count * struct.calcsize(_TYPES[kind]))
        return None
    for _ in range(count):
        cursor.value("")
    return None


def _place(cursor: _Cursor, alignment: int) -> tuple[int, int]:
    """Where a tensor begins and ends; its shape has the fastest dimension first."""
    if not 1 <= (dimensions := cursor.value("I")) <= MAX_DIMENSIONS:
        raise ValueError(f"{cursor.at} has {dimensions} dimensions, 1 to {MAX_DIMENSIONS} can be")
    shape = [cursor.value("Q") for _ in range(dimensions)]
    if not all(1 <= n <= MAX_DIMENSION for n in shape):
        raise ValueError(f"the shape of {cursor.at} is {shape}")
    kind, begin = cursor.kind(GGMLQuantizationType), cursor.value("Q")
    if kind.name not in READABLE:
        what = f"in {cursor.file}, {cursor.at} is of type {kind.name}, which MLX does not read"
        raise DFlashError(what, f"choose a GGUF file of type {', '.join(READABLE)}")
    block, size = GGML_QUANT_SIZES[kind]
    if shape[0] % block:
        raise ValueError(f"{cursor.at} has rows of {shape[0]}, {kind.name} has blocks of {block}")
    if begin % alignment:
        raise ValueError(f"{cursor.at} begins at byte {begin}, aligned to {alignment}")
    return begin, begin + math.prod(shape) // block * size


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
