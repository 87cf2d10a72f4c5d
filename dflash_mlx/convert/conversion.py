"""A model on its way from a source to a folder, its weights not yet read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.models.target_config import quantisation

RUNTIME = 450_000_000  # bytes that Python, MLX and the tokenizer take themselves


@dataclass
class Conversion:
    """What is to be written: lazy arrays by name, and what lies beside them.

    weights: evaluated one at a time; emptied when written. config: as in its config.json.
    write_beside: puts the tokenizer into a folder, about `rest` bytes. largest: bytes of the
    largest tensor before and after together. held: bytes that are in memory all the time.
    """

    name: str
    description: str
    weights: dict[str, mx.array]
    config: dict[str, Any]
    largest: int
    write_beside: Callable[[Path], None] = lambda _: None
    held: int = 0
    rest: int = 0

    def write_rest(self, folder: Path) -> None:
        """Write all but the weights."""
        from mlx_lm.utils import save_config

        self.write_beside(folder)
        keep = {"keep_vision_config": True} if "vision_config" in self.config else {}
        save_config(dict(self.config), folder / "config.json", **keep)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that are still to be written."""
        return sum(array.nbytes for array in self.weights.values())

    @property
    def size(self) -> int:
        """Bytes on disk, about, before the weights are written."""
        return self.weight_bytes + self.rest

    @property
    def memory(self) -> int:
        """Bytes that converting takes at most, about."""
        return self.held + self.largest + RUNTIME


def largest(weights: dict[str, mx.array]) -> int:
    """Bytes of the largest array."""
    return max(array.nbytes for array in weights.values())


def describe_numbers(config: dict[str, Any], weights: dict[str, mx.array]) -> str:
    """How weights are stored, in words that end with the dtype of what is not packed."""
    kinds = Counter[mx.Dtype]()
    for array in weights.values():
        if mx.issubdtype(array.dtype, mx.floating):
            kinds[array.dtype] += array.nbytes
    dtype = str(max(kinds, key=lambda kind: kinds[kind])).removeprefix("mlx.core.")
    words, _ = quantisation(config)
    mixed = any(isinstance(choice, dict) for choice in config.get("quantization", {}).values())
    return f"in {words}{' and others' * mixed}, else in {dtype}" if words else f"in {dtype}"
