"""The head of a .safetensors file, checked before MLX, which is less strict, reads the file.

The `safetensors` library has the last word. Checked here as well is what it accepts and MLX does
not read rightly (a name twice, a dimension over 31 bits, a dtype that MLX lacks), and everything
whose sentence should name both values.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from safetensors import SafetensorError, safe_open

from dflash_mlx.core.findings import Finding, Refused

MAX_HEADER = 100_000_000  # bytes; the library's own limit
MAX_DIMENSION = 2**31 - 1  # MLX keeps a dimension in 32 bits with a sign
MAX_DIMENSIONS = 32
READ_BY_MLX = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip
DOWNLOAD_AGAIN = "download it again, or choose another model"


class TensorHeader(NamedTuple):
    """What the head of a file says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, int]

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return self.offsets[1] - self.offsets[0]


class _Damage(ValueError):
    """What is wrong, in which field, and both values."""

    def __init__(self, what: str, field: str = "", found: Any = "", expected: Any = "") -> None:
        super().__init__(what)
        self.values = {"field": field, "found": str(found)[:200], "expected": str(expected)[:200]}


def read_header(
    file: Path, next_step: str = DOWNLOAD_AGAIN, place: str = ""
) -> dict[str, TensorHeader]:
    """All tensors of a .safetensors file, from its head alone.

    place: what to call the file, if not by its path. Raises Refused, a DFlashError, for a file
    that is no whole, consistent safetensors file or that MLX cannot read. Reads and allocates no
    more than a multiple of the head's true size.
    """
    place = place or str(file)
    try:
        if not file.is_file():
            raise _Damage("it is no file")
        text, data_bytes = _head(file)
        tensors = parse_header(text, data_bytes)
        with safe_open(file, framework="numpy"):
            return tensors
    except _Damage as damage:
        finding = Finding("error", _sentence(place, damage), next_step, place, **damage.values)
        raise Refused(finding) from None
    except (SafetensorError, OSError) as error:
        finding = Finding("error", _sentence(place, error), next_step, place)
        raise Refused(finding) from None


def _sentence(place: str, reason: Exception) -> str:
    return f"{place} is damaged ({reason})"


def _head(file: Path) -> tuple[bytes, int]:
    """The header's text, and how many bytes of data follow it."""
    total = file.stat().st_size
    with open(file, "rb") as contents:
        size = int.from_bytes(contents.read(8), "little")
        if total < 8:
            raise _Damage(f"it has {total} bytes, its size field alone takes 8", "", total, 8)
        limit = min(MAX_HEADER, total - 8)
        if size > limit:
            what = f"its header should have {size} bytes, there can be {limit}"
            raise _Damage(what, "size of the header", size, limit)
        return contents.read(size), total - 8 - size


def parse_header(text: bytes, data_bytes: int) -> dict[str, TensorHeader]:
    """The tensors in a header's text, which describe `data_bytes` bytes without gap or overlap.

    Raises ValueError for anything else.
    """
    try:
        entries: Any = json.loads(text.decode("utf-8"), object_pairs_hook=_once)
    except _Damage:
        raise
    except UnicodeDecodeError as error:
        raise _Damage(f"its header is not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise _Damage(f"its header is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise _Damage(f"its header is a JSON {type(entries).__name__}, not an object")
    entries.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry) for name, entry in entries.items()}
    _check_layout(tensors, data_bytes)
    return tensors


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise _Damage(f"its header has {name[:80]!r} twice", name[:80], "twice", "once")
        result[name] = value
    return result


def _tensor(name: str, entry: Any) -> TensorHeader:
    if not isinstance(entry, dict):
        raise _Damage(f"its tensor {name[:80]!r} is {reprlib.repr(entry)}", name[:80])
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in READ_BY_MLX:
        raise _unlike(name, "dtype", dtype, f"one of {', '.join(READ_BY_MLX)}")
    if not _are_whole(shape, MAX_DIMENSION) or len(shape) > MAX_DIMENSIONS:
        wanted = f"up to {MAX_DIMENSIONS} numbers from 0 to {MAX_DIMENSION}"
        raise _unlike(name, "shape", shape, wanted)
    if not _are_whole(offsets, 2**63) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _unlike(name, "data_offsets", offsets, "a begin and an end")
    tensor = TensorHeader(dtype, tuple(shape), (offsets[0], offsets[1]))
    needed = tensor.size * READ_BY_MLX[dtype] // 8
    if tensor.nbytes != needed:
        wanted = f"of {needed} bytes, which {dtype} of shape {shape} takes"
        raise _unlike(name, "data_offsets", offsets, wanted)
    return tensor


def _unlike(name: str, field: str, found: Any, expected: str) -> _Damage:
    shown = reprlib.repr(found)
    what = f"{field} of its tensor {name[:80]!r} is {shown}, not {expected}"
    return _Damage(what, f"{name[:80]}.{field}", shown, expected)


def _are_whole(values: Any, limit: int) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(v) is int and 0 <= v <= limit for v in values)


def _check_layout(tensors: Mapping[str, TensorHeader], data_bytes: int) -> None:
    """Raise ValueError unless the tensors fill `data_bytes` bytes, each once."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offsets):
        begin = tensor.offsets[0]
        if begin != end:
            fault = "overlaps the one before it" if begin < end else "leaves a gap"
            what = f"its tensor {name[:80]!r} {fault}: it begins at byte {begin}, not at {end}"
            raise _Damage(what, f"{name[:80]}.data_offsets", begin, end)
        end = tensor.offsets[1]
    if end != data_bytes:
        fault = "is truncated" if end > data_bytes else "has bytes that are no tensor's"
        what = f"it {fault}: its tensors take {end} bytes, it has {data_bytes}"
        raise _Damage(what, "data_offsets", data_bytes, end)
