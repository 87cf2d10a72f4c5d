"""The head of a .safetensors file, checked before MLX, which is less strict, reads the file.

The `safetensors` library judges first. Checked behind it is what it accepts and MLX does not read
rightly (a dimension over 31 bits, a dtype that MLX lacks), and a name that is there twice.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from dflash_mlx.core.errors import DFlashError, in_one_line

MAX_HEADER = 100_000_000  # bytes; the library's own limit
MAX_DIMENSION = 2**31 - 1  # MLX keeps a dimension in 32 bits with a sign
READ_BY_MLX = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip
DOWNLOAD_AGAIN = "download it again, or choose another model"

_MAX_DIMENSIONS = 32
_WORDS = {  # of the library's sentences
    "Error while deserializing header: ": "",
    "incomplete metadata, file not fully covered": "it is truncated, or longer than it says",
}


class TensorHeader(NamedTuple):
    """What the head of a file says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, int]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.offsets[1] - self.offsets[0]


def read_header(file: Path, next_step: str = DOWNLOAD_AGAIN) -> dict[str, TensorHeader]:
    """All tensors of a .safetensors file, from its head alone.

    Raises DFlashError for a file that is no whole, consistent safetensors file or that MLX cannot
    read. Reads and allocates no more than a multiple of the head's true size.
    """
    try:
        entries: dict[str, Any] = json.loads(_text(file), object_pairs_hook=_once)
        entries.pop("__metadata__", None)
        return {name: _tensor(name, entry) for name, entry in entries.items()}
    except (OSError, ValueError, RecursionError) as error:
        raise DFlashError(f"{file} is damaged ({in_one_line(error)})", next_step) from None


def judge(
    entries: Mapping[str, Any], size: int, next_step: str, place: str
) -> dict[str, TensorHeader]:
    """All tensors of a file on the hub, by the entries of its head; raises as `read_header` does.

    size: bytes of the file. What is left of it beside the tensors is only bounded here.
    """
    try:
        found = {name: _tensor(name, entry) for name, entry in entries.items()}
        for name, tensor in found.items():
            if 8 * tensor.nbytes != READ_BY_MLX[tensor.dtype] * tensor.size:
                raise ValueError(f"{name[:80]!r} has {tensor.nbytes} bytes for {tensor.shape}")
        if not 8 < size - sum(tensor.nbytes for tensor in found.values()) <= 8 + MAX_HEADER:
            raise ValueError(f"it is truncated, or longer than it says, with {size} bytes")
        return found
    except (KeyError, TypeError, ValueError) as error:
        raise DFlashError(f"{place} is damaged ({in_one_line(error)})", next_step) from None


def _text(file: Path) -> bytes:
    if not file.is_file():
        raise ValueError("it is no file")
    try:
        with safe_open(file, framework="numpy"), open(file, "rb") as contents:
            return contents.read(int.from_bytes(contents.read(8), "little"))
    except SafetensorError as error:
        what = in_one_line(error)
        for theirs, ours in _WORDS.items():
            what = what.replace(theirs, ours)
        raise ValueError(f"{what}, in a file of {file.stat().st_size} bytes") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"its header has {name[:80]!r} twice")
        result[name] = value
    return result


def _tensor(name: str, entry: dict[str, Any]) -> TensorHeader:
    """Of an entry that the library has let through: its kinds and offsets are right."""
    dtype, shape = entry["dtype"], entry["shape"]
    where = f"of its tensor {name[:80]!r} is"
    if dtype not in READ_BY_MLX:
        raise ValueError(f"dtype {where} {dtype!r}, not one of {', '.join(READ_BY_MLX)}")
    if max(shape, default=0) > MAX_DIMENSION or len(shape) > _MAX_DIMENSIONS:
        wanted = f"up to {_MAX_DIMENSIONS} numbers up to {MAX_DIMENSION}"
        raise ValueError(f"shape {where} {reprlib.repr(shape)}, not {wanted}")
    if len(offsets := tuple(entry["data_offsets"])) != 2:  # the hub's client lets any through
        raise ValueError(f"data_offsets {where} {reprlib.repr(offsets)}, not two numbers")
    return TensorHeader(dtype, tuple(shape), offsets)
