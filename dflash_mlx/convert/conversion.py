"""A model on its way from a source to a folder, its weights not yet read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

TARGET, DRAFTER = "target", "drafter"
RUNTIME = 450_000_000  # bytes that Python, MLX and the tokenizer take themselves


@dataclass
class Conversion:
    """What is to be written: lazy arrays by name, and what lies beside them.

    weights: evaluated one at a time; emptied when written. config: as in its config.json.
    write_rest: puts that and the tokenizer into a folder, about `rest` bytes. largest: bytes of the
    largest tensor before and after together. held: bytes that are in memory all the time.
    """

    kind: str
    name: str
    description: str
    weights: dict[str, mx.array]
    config: dict[str, Any]
    write_rest: Callable[[Path], None]
    largest: int
    held: int = 0
    rest: int = 0

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


def describe_numbers(config: dict[str, Any], weights: dict[str, mx.array]) -> str:
    """How weights are stored, in words that end with the dtype of what is not packed."""
    kinds = Counter[str]()
    for array in weights.values():
        if mx.issubdtype(array.dtype, mx.floating):
            kinds[str(array.dtype).removeprefix("mlx.core.")] += array.nbytes
    dtype = max(kinds, key=lambda kind: kinds[kind])
    quantization = config.get("quantization")
    if not quantization:
        return f"in {dtype}"
    mixed = " and others" if any(isinstance(v, dict) for v in quantization.values()) else ""
    mode = quantization.get("mode", "affine")
    return (
        f"in {quantization['bits']} bits{mixed} ({mode}, groups of {quantization['group_size']}), "
        f"else in {dtype}"
    )
