"""Writing a folder that is complete or absent, with one tensor at a time in memory."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import make_shards

from dflash_mlx.core.amounts import amount
from dflash_mlx.core.errors import DFlashError

MARGIN = 16_000_000  # bytes left free beside what is written
SHARD_GIGABYTES = 5  # as mlx-lm's

_TYPES = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16",
    mx.uint32: "U32", mx.int32: "I32", mx.uint64: "U64", mx.int64: "I64",
    mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32",
}  # fmt: skip


def resolve_destination(name: str) -> Path:
    """The folder to be made; DFlashError unless it is absent or empty and its parent is there."""
    elsewhere = "name a folder that does not exist yet as DST"
    try:
        destination = Path(name).expanduser().resolve()
        if destination.exists() and not destination.is_dir():
            raise DFlashError(f"{destination} is a file", elsewhere)
        if destination.is_dir() and (found := next(destination.iterdir(), None)) is not None:
            raise DFlashError(f"{destination} is not empty, it holds {found.name}", elsewhere)
        parent_is_there = destination.parent.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such home, a zero byte
        raise DFlashError(f"{name[:80]!r} cannot be DST ({error})", elsewhere) from None
    if not parent_is_there:
        raise DFlashError(f"there is no folder {destination.parent}", "create it, or change DST")
    return destination


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raise DFlashError unless `needed` bytes, for `what`, fit on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if free < needed + MARGIN:
        raise DFlashError(
            f"{what} needs {amount(needed + MARGIN)}, but only {amount(free)} are free in {folder}",
            "free some space or choose another disk",
        )


@contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """A folder beside `destination` that takes its place once the block has ended well.

    Otherwise it is removed. What a killed conversion to the same place has left is removed first.
    Raises DFlashError where another conversion to it is running, or it cannot be written.
    """
    folder = destination.with_name(f".{destination.name}.partial")
    try:
        with _locked(folder, destination):
            try:
                for left in folder.iterdir():
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                yield folder
                for path in (*folder.rglob("*"), folder):
                    _sync(path)
                os.rename(folder, destination)
                _sync(destination.parent)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    except OSError as error:
        raise DFlashError(
            f"{destination} cannot be written ({error.strerror or error})",
            "free some space, or choose another DST; nothing was left behind",
        ) from error


@contextmanager
def _locked(folder: Path, destination: Path) -> Iterator[None]:
    """`folder`, made if need be, for this process alone, as long as it lives."""
    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"{destination} is being written by another conversion"
            raise DFlashError(what, "wait until that has ended, or choose another DST") from None
        yield
    finally:
        os.close(lock)


def _sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        shard = shards.pop(0)
        with open(folder / name, "wb") as output:
            output.write(head({n: (_TYPES[a.dtype], a.shape, a.nbytes) for n, a in shard.items()}))
            for key in list(shard):
                data = _bytes(shard.pop(key))
                output.write(data)
                bar.update(data.nbytes)
                del data
                mx.clear_cache()
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def head(tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> bytes:
    """The length of a file's header, and the header: type, shape and place of every tensor.

    tensors: type, shape and bytes of each, in the order in which their numbers follow.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
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
