"""What MLX would read from a GGUF file, with zeros that are never made in place of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from gguf import GGMLQuantizationType as Type

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.formats.gguf_header import GgufTensor, read_gguf_header
from dflash_mlx.models.formats.gguf_target import GROUP, READABLE

_PLAIN = {Type.F32: mx.float32, Type.F16: mx.float16}
_PACKED_BITS = {Type.Q4_0: 4, Type.Q4_1: 4, Type.Q8_0: 8}


def read_head(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Tensors and metadata as `gguf_target.read_file` returns them, from the file's head alone.

    Of arrays in the metadata, only the length is right.
    """
    header = read_gguf_header(path)
    arrays: dict[str, mx.array] = {}
    for name, tensor in header.tensors.items():
        arrays.update(_as_mlx(name, tensor))
    return arrays, header.metadata


def _as_mlx(name: str, tensor: GgufTensor) -> dict[str, mx.array]:
    """One tensor as MLX unpacks it: as it is, or 32-bit words with a scale and bias per group."""
    *rows, columns = reversed(tensor.shape)
    if tensor.kind in _PLAIN:
        return {name: mx.zeros((*rows, columns), _PLAIN[tensor.kind])}
    if tensor.kind not in _PACKED_BITS:
        raise DFlashError(
            f"the tensor {name} is of type {tensor.kind.name}, which MLX does not read",
            f"choose a GGUF file of type {READABLE}",
        )
    stem, groups = name.removesuffix(".weight"), (*rows, columns // GROUP)
    return {
        name: mx.zeros((*rows, columns * _PACKED_BITS[tensor.kind] // 32), mx.uint32),
        f"{stem}.scales": mx.zeros(groups, mx.float16),
        f"{stem}.biases": mx.zeros(groups, mx.float16),
    }
