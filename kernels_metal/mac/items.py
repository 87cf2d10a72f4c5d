"""What the report is made of: pieces of work for a child, each with a name and a limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kernels_metal.variants import calls

Item = dict[str, Any]  # "name", "kind", and what `measure` wants of that kind

ROWS = (*range(1, 9), 10, 12, 16, 20, 24, 32)
ATTENTION_ROWS, KEYS = (4, 8, 16, 32), (1024, 4096, 16384)
HEADS = {
    "32/8/128": {"heads": 32, "kv_heads": 8, "dim": 128},
    "24/4/256": {"heads": 24, "kv_heads": 4, "dim": 256},
    "32/8/128 8 bits": {"heads": 32, "kv_heads": 8, "dim": 128, "kv_bits": 8},
}
SECONDS = {"variant": 20.0, "sustained": 150.0, "host": 240.0}
OTHERWISE, REHEARSED = 60.0, 600.0  # seconds; in the emulator a compiler takes its time


@dataclass(frozen=True)
class Model:
    """Widths of a transformer, from its published config; matrices of 4 bits, groups of 64."""

    name: str
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int

    @property
    def matrices(self) -> dict[str, tuple[int, int, int]]:
        """By name: columns of x, rows of the matrix, and how many of them a pass has."""
        attention = self.heads * self.dim
        return {
            "qkv": (self.width, attention + 2 * self.kv_heads * self.dim, self.layers),
            "o": (attention, self.width, self.layers),
            "gate+up": (self.width, 2 * self.hidden, self.layers),
            "down": (self.hidden, self.width, self.layers),
            "head": (self.width, self.vocabulary, 1),
        }

    def sizes(self, matrix: str, rows: int) -> dict[str, int]:
        """Of a call of `verify_qmm`, which makes two matrices of gate+up."""
        depth, columns, _ = self.matrices[matrix]
        gated = matrix == "gate+up"
        columns = columns // 2 if gated else columns
        return {"rows": rows, "depth": depth, "columns": columns, "gated": int(gated)}


MODELS = (
    Model("Qwen3-0.6B", 28, 1024, 3072, 16, 8, 128, 151_936),
    Model("Qwen3-4B", 36, 2560, 9728, 32, 8, 128, 151_936),
    Model("Qwen3-8B", 36, 4096, 12_288, 32, 8, 128, 151_936),
    Model("Qwen3.5-27B", 64, 5120, 17_408, 24, 4, 256, 248_320),  # as if no layer were recurrent
)


def variant_items() -> Iterator[Item]:
    """Every variant of every kernel."""
    for call in calls():
        sizes = " ".join(f"{name} {size}" for name, size in call.sizes.items())
        name = " ".join(part for part in (call.operation, call.way, call.dtype, sizes) if part)
        yield {"name": name, "kind": "variant", "call": list(call)}


def product_item(model: Model, matrix: str, rows: int) -> Item:
    """A race of one matrix."""
    name = f"{model.name} {matrix}, {rows} rows"
    return _race(name, "verify_qmm", model.sizes(matrix, rows))


def attention_item(heads: str, keys: int, rows: int) -> Item:
    """A race of attention of few rows to many keys. heads: of HEADS."""
    sizes = {**HEADS[heads], "prefix": keys, "rows": rows}
    return _race(f"attention {heads}, {keys} keys, {rows} rows", "cascade_attention", sizes)


def _race(name: str, operation: str, sizes: dict[str, int]) -> Item:
    return {"name": name, "kind": "race", "operation": operation, "sizes": sizes}


def race_items() -> Iterator[Item]:
    """Every matrix of each model at every number of rows, then attention."""
    for model in MODELS:
        for matrix in model.matrices:
            yield from (product_item(model, matrix, rows) for rows in ROWS)
    for heads in HEADS:
        for keys in KEYS:
            yield from (attention_item(heads, keys, rows) for rows in ATTENTION_ROWS)


def last_items(ways: Mapping[str, str]) -> Iterator[Item]:
    """What takes long. ways: of the largest model's matrices at 8 rows, "" for stock."""
    model = MODELS[-1]
    products = [
        (model.sizes(name, 8), ways.get(name, ""))
        for name, (_, _, count) in model.matrices.items()
        if count > 1
    ]
    given = {"products": products, "layers": model.layers, "seconds": 60.0}
    yield {"name": "sustained", "kind": "sustained", **given}
    yield {"name": "host", "kind": "host"}


def limit(item: Item) -> float:
    """Seconds after which an item hangs."""
    return REHEARSED if item.get("rehearse") else SECONDS.get(item["kind"], OTHERWISE)
