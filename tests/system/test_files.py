"""Heads of safetensors and GGUF files, every sentence of what is refused, and writing texts."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import save_file

from dflash_mlx import DFlashError
from dflash_mlx.models.gguf_target import read_file
from dflash_mlx.system.files import keep_text, replace_text, write_report
from dflash_mlx.system.safetensors_header import READ_BY_MLX, read_header

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "F16", "shape": [2, 2], "data_offsets": [8, 16]}


def write(folder: Path, header: Any, data: int = 16, size: int | None = None) -> Path:
    """A file with this header, a text or a document, and so many bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if size is None else size
    file = folder / "x.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + text + bytes(data))
    return file


# What is read


def test_every_tensor_is_read_with_type_shape_and_place(tmp_path):
    tensors = {"a": np.zeros((3, 5), np.float32), "b": np.zeros((7, 0), np.int64)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert {name: (t.dtype, t.shape, t.nbytes, t.size) for name, t in found.items()} == {
        "a": ("F32", (3, 5), 60, 15),
        "b": ("I64", (7, 0), 0, 0),
    }


@pytest.mark.parametrize("dtype", READ_BY_MLX)
def test_mlx_reads_every_type_that_is_let_through(tmp_path, dtype):
    size = READ_BY_MLX[dtype] * 3
    file = write(tmp_path, {"a": {"dtype": dtype, "shape": [3], "data_offsets": [0, size]}}, size)
    assert read_header(file)["a"].dtype == dtype
    loaded: Any = mx.load(str(file))
    assert loaded["a"].shape == (3,)


# What is refused: by the safetensors library, some of it, and by us

LONG = {"dtype": "F32", "shape": [0, 1 << 31], "data_offsets": [0, 0]}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "size field over the file": ({}, {"size": 1 << 40}, "26 bytes"),
    "no JSON": (b"{", {}, "line 1"),
    "another dtype": ({"a": {**A, "shape": [1], "dtype": "F64"}}, {"data": 8}, "'a' is 'F64'"),
    "a dimension over 31 bits": ({"a": LONG}, {"data": 0}, "'a' is [0, 2147483648], not up to"),
    "too many dimensions": ({"a": {**A, "shape": [1] * 33}}, {}, "shape"),
    "an overlap": ({"a": A, "b": {**B, "data_offsets": [4, 12]}}, {"data": 12}, "`b`"),
    "truncated": ({"a": A, "b": B}, {"data": 15}, "is truncated"),
    "longer": ({"a": A, "b": B}, {"data": 17}, "longer than it says"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_header_that_is_refused_names_the_file_and_the_value(tmp_path, case):
    header, changes, value = REFUSED[case]
    file = write(tmp_path, header, **changes)
    with pytest.raises(DFlashError) as failure:
        read_header(file, "do so")
    assert str(failure.value).startswith(f"{file} is damaged (")
    assert value in failure.value.what
    assert failure.value.next_step == "do so"


@pytest.mark.parametrize("read", [read_header, read_file])
def test_what_is_no_file_is_said_at_once(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "none", "."):
        with pytest.raises(DFlashError, match="it is not a file"):
            read(tmp_path / name)


def test_reading_a_header_takes_no_more_than_a_multiple_of_it(tmp_path):
    many = tmp_path / "many.safetensors"
    save_file({str(i): np.zeros(1, np.uint8) for i in range(5000)}, many)
    claims = write(tmp_path, {"a": A}, 0, size=1 << 32)
    os.truncate(claims, 1 << 33)  # a hole of 8 GiB, so that so large a header could be there
    tracemalloc.start()
    with pytest.raises(DFlashError, match="header too large"):
        read_header(claims)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    assert len(read_header(many)) == 5000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * many.stat().st_size


# GGUF

ARRAY, STRING, UINT32 = 9, 8, 4


def header(entries: bytes = b"", count: int = 0, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + entries


def named(name: str, *rest: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + b"".join(rest)


def tensor(shape: tuple[int, ...] = (2,), kind: int = 0, offset: int = 0, name: str = "t") -> bytes:
    return named(name, struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset))


def entry(kind: int, value: bytes, name: str = "k") -> bytes:
    return named(name, struct.pack("<I", kind), value)


def array(kind: int, count: int) -> bytes:
    return header(entry(ARRAY, struct.pack("<IQ", kind, count)), 1)


GGUF_REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "b''"),
    "another magic": (b"GGML" + bytes(40), "b'GGML'"),
    "another version": (header(version=1), "version 1"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "more entries than bytes": (header(count=1 << 60), "8 bytes are needed, 0 are left"),
    "more tensors than bytes": (header(tensors=1 << 60), "8 bytes are needed, 0 are left"),
    "a name beyond the end": (header(struct.pack("<Q", 1 << 62), 1), f"{1 << 62} bytes"),
    "an unknown type": (header(entry(77, b""), 1), "77"),
    "a long array": (array(UINT32, 1 << 60), f"array of {1 << 60} UINT32"),
    "an array beyond the end": (array(UINT32, 100), "412 bytes are needed, 12 are left"),
    "an array of arrays": (array(ARRAY, 1), "1 ARRAY"),
    "a name twice": (header(entry(UINT32, bytes(4)) * 2, 2), "Duplicate k"),
    "text that is none": (header(entry(STRING, struct.pack("<Q", 1) + b"\xff"), 1), "utf-8"),
    "alignment 0": (header(entry(UINT32, bytes(4), "general.alignment"), 1), "alignment"),
    "alignment 24": (header(entry(UINT32, b"\x18\0\0\0", "general.alignment"), 1), "is 24"),
    "no dimensions": (header(tensor(()), tensors=1), "'t' is []"),
    "too many dimensions": (header(tensor((1,) * 9), tensors=1), "'t' is [1, 1, "),
    "a huge dimension": (header(tensor((1 << 40,)), tensors=1), f"'t' is [{1 << 40}]"),
    "an unknown kind": (header(tensor(kind=999), tensors=1), "999"),
    "broken blocks": (header(tensor((33,), 2), tensors=1), "rows of 33, Q4_0 has blocks of 32"),
    "askew": (header(tensor(offset=4), tensors=1), "byte 4, aligned to 32"),
    "a tensor twice": (header(tensor() * 2, tensors=2), "'t' 2 times"),
    "an overlap": (
        header(tensor((64,)) + tensor(offset=32, name="u"), tensors=2) + bytes(400),
        "'u' begins at byte 32, inside 't'",
    ),
    "truncated": (header(tensor((64,)), tensors=1), "byte 256 of the data, it has 0"),
}


@pytest.mark.parametrize("case", GGUF_REFUSED)
def test_a_gguf_file_that_is_refused_says_why(tmp_path, case):
    contents, sentence = GGUF_REFUSED[case]
    file = tmp_path / "x.gguf"
    file.write_bytes(contents)
    with pytest.raises(DFlashError) as failure:
        read_file(file)
    assert str(failure.value).startswith("x.gguf cannot be read as a GGUF file (")
    assert sentence in failure.value.what
    assert failure.value.next_step == "download or copy it again"


def test_another_alignment_is_kept_to(tmp_path):
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_tensor("a", np.zeros(3, np.float32))
    writer.add_tensor("b", np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read_file(tmp_path / "x.gguf")
    loaded: Any = mx.load(str(tmp_path / "x.gguf"))
    assert loaded["b"].tolist() == [1, 1, 1]


# Texts


def test_text_takes_the_place_of_what_was_there_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "Ä.json"
    file.write_text("before")
    replace_text(file, "ü")
    assert file.read_text(encoding="utf-8") == "ü"
    kept = tmp_path / "timing" / "times.json"
    keep_text(kept, "{}")
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(os, "replace", Mock(side_effect=full))
    with pytest.raises(DFlashError, match="report.json cannot be written .*No space"):
        write_report(tmp_path / "report.json", "{}")
    keep_text(kept, "what a cache folder cannot keep is done without")
    assert sorted(tmp_path.rglob("*")) == sorted([kept.parent, kept, file])
    assert kept.read_text() == "{}"
