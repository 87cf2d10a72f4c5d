"""Converted targets, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.convert.__main__ import main


def convert(source: Path, destination: Path, *options: str | Path) -> Path:
    main([str(source), str(destination), *map(str, options)])
    return destination


def tensors(folder: Path) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for file in folder.glob("*.safetensors"):
        found |= mx.load(str(file))  # type: ignore[arg-type]
    return found


def assert_same_tensors(first: dict[str, mx.array], second: dict[str, mx.array]) -> None:
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.dtype == second[name].dtype, name
        assert bool(mx.array_equal(array, second[name])), name


def config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())
