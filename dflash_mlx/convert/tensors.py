"""Writing lazy arrays as safetensors files, so that one tensor at a time is in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import make_shards

SHARD_GIGABYTES = 5  # as mlx-lm's
METADATA = {"format": "mlx"}

_TYPES = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16",
    mx.uint32: "U32", mx.int32: "I32", mx.uint64: "U64", mx.int64: "I64",
    mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32",
}  # fmt: skip


def write_shards(
    folder: Path, weights: dict[str, mx.array], bar: Any, gigabytes: int = SHARD_GIGABYTES
) -> None:
    """Write `weights` and their index into `folder`, under the file names that mlx-lm reads.

    weights: emptied, so that each array's memory is free as soon as it is written. bar: a tqdm bar
    of bytes. gigabytes: of one file at most; 0 gives every tensor a file. Raises OSError where the
    disk is full, RuntimeError where a source cannot be read.
    """
    total = sum(array.nbytes for array in weights.values())
    shards = make_shards(weights, gigabytes)
    weights.clear()
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(names) > 1 else ["model.safetensors"]
    places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    for name in names:
        write_file(folder / name, shards.pop(0), bar)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def write_file(file: Path, arrays: dict[str, mx.array], bar: Any) -> None:
    """Write one safetensors file; empties `arrays`."""
    with open(file, "wb") as output:
        output.write(head({n: (_TYPES[a.dtype], a.shape, a.nbytes) for n, a in arrays.items()}))
        for name in list(arrays):
            data = _bytes(arrays.pop(name))
            output.write(data)
            bar.update(data.nbytes)
            del data
            mx.clear_cache()


def head(tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> bytes:
    """The length of a file's header, and the header: type, shape and place of every tensor.

    tensors: type, shape and bytes of each, in the order in which their numbers follow.
    """
    header: dict[str, Any] = {"__metadata__": METADATA}
    begin = 0
    for name, (dtype, shape, size) in tensors.items():
        place = [begin, begin + size]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": place}
        begin += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(array: mx.array) -> memoryview:
    """An array's numbers in row-major order, evaluated."""
    flat = array.reshape(-1).view(mx.uint8)
    mx.eval(flat)
    return memoryview(flat)  # type: ignore[arg-type]
