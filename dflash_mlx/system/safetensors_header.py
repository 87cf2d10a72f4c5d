"""The head of a .safetensors file, checked before MLX, which is less strict, reads the file.

The `safetensors` library judges first. Checked behind it is what it accepts and MLX does not read
rightly: a dimension over 31 bits, a dtype that MLX lacks.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from dflash_mlx.core.errors import DFlashError, in_one_line

MAX_HEADER = 100_000_000  # bytes; the library's own limit
MAX_DIMENSION = 2**31 - 1  # MLX keeps a dimension in 32 bits with a sign
READ_BY_MLX = {  # with their bytes
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "C64": 8,
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

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * READ_BY_MLX[self.dtype]


def read_header(file: Path, next_step: str = DOWNLOAD_AGAIN) -> dict[str, TensorHeader]:
    """All tensors of a .safetensors file, from its head alone.

    Raises DFlashError for a file that is no whole, consistent safetensors file or that MLX cannot
    read. Reads and allocates no more than a multiple of the head's true size.
    """
    try:
        if not file.is_file():
            raise ValueError("it is not a file")
        with safe_open(file, framework="numpy") as opened:
            parts = {name: opened.get_slice(name) for name in sorted(opened.keys())}
            return {n: _tensor(n, part.get_dtype(), part.get_shape()) for n, part in parts.items()}
    except (OSError, ValueError, SafetensorError) as error:
        what = in_one_line(error)
        for theirs, ours in _WORDS.items():
            what = what.replace(theirs, ours)
        if isinstance(error, SafetensorError):
            what += f", in a file of {file.stat().st_size} bytes"
        raise DFlashError(f"{file} is damaged ({what})", next_step) from None


def judge(tensors: Mapping[str, Any], size: int) -> dict[str, TensorHeader]:
    """All tensors of a file on the hub, by its head as huggingface_hub tells it.

    size: bytes of the file. What is left of it beside the tensors is only bounded here. Raises
    TypeError or ValueError for what `read_header` refuses.
    """
    found = {n: _tensor(n, tensor.dtype, tensor.shape) for n, tensor in sorted(tensors.items())}
    for name, tensor in found.items():
        begin, end = tensors[name].data_offsets
        if end - begin != tensor.nbytes:
            raise ValueError(f"{name[:80]!r} has {end - begin} bytes for {tensor.shape}")
    if not 8 < size - sum(tensor.nbytes for tensor in found.values()) <= 8 + MAX_HEADER:
        raise ValueError(f"it is truncated, or longer than it says, with {size} bytes")
    return found


def _tensor(name: str, dtype: str, shape: list[int]) -> TensorHeader:
    where = f"of its tensor {name[:80]!r} is"
    if dtype not in READ_BY_MLX:
        raise ValueError(f"dtype {where} {dtype!r}, not one of {', '.join(READ_BY_MLX)}")
    if max(shape, default=0) > MAX_DIMENSION or len(shape) > _MAX_DIMENSIONS:
        wanted = f"up to {_MAX_DIMENSIONS} numbers up to {MAX_DIMENSION}"
        raise ValueError(f"shape {where} {reprlib.repr(shape)}, not {wanted}")
    return TensorHeader(dtype, tuple(shape))
