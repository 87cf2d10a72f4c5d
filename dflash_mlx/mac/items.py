"""What the report is made of: pieces of work for a child, each with a name and a limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kernels_metal.variants import calls

Item = dict[str, Any]  # "name", "kind", and what `measure` wants of that kind

ROWS = (*range(1, 9), 10, 12, 16, 20, 24, 32)
ATTENTION_ROWS, KEYS = (4, 8, 16, 32), (1024, 4096, 16384)
HEADS = ((32, 8, 128, 0), (24, 4, 256, 0), (32, 8, 128, 8))  # and bits of packed keys, 0: none
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


def product_items() -> Iterator[Item]:
    """Products of each model's matrices, at every number of rows; one matrix after the other."""
    matrices = [(m.name, name, *m.matrices[name][:2]) for m in MODELS for name in m.matrices]
    for model, matrix, depth, columns in matrices:
        for rows in ROWS:
            sizes = {"depth": depth, "columns": columns, "rows": rows}
            gated = matrix == "gate+up"
            name = product_name(model, matrix, rows)
            yield {"name": name, "kind": "product", "gated": gated, **sizes}


def product_name(model: str, matrix: str, rows: int) -> str:
    """Of the item."""
    return f"{model} {matrix}, {rows} rows"


def attention_items() -> Iterator[Item]:
    """Attention of few rows to many keys."""
    for heads, kv_heads, dim, bits in HEADS:
        for keys in KEYS:
            for rows in ATTENTION_ROWS:
                sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "kv_bits": bits}
                name = attention_name((heads, kv_heads, dim, bits), keys, rows)
                yield {"name": name, "kind": "attention", **sizes, "prefix": keys, "rows": rows}


def attention_name(heads: tuple[int, ...], keys: int, rows: int) -> str:
    """Of the item."""
    packed = f" {heads[3]} bits" if heads[3] else ""
    return f"attention {'/'.join(map(str, heads[:3]))}{packed}, {keys} keys, {rows} rows"


def last_items(ways: dict[str, str]) -> Iterator[Item]:
    """What takes long. ways: of the largest model's matrices at 8 rows, "" for stock."""
    matrices = {
        name: (depth, columns, ways.get(name, ""))
        for name, (depth, columns, count) in MODELS[-1].matrices.items()
        if count > 1
    }
    given = {"matrices": matrices, "layers": MODELS[-1].layers, "rows": 8, "seconds": 60.0}
    yield {"name": "sustained", "kind": "sustained", **given}
    yield {"name": "host", "kind": "host"}


def limit(item: Item) -> float:
    """Seconds after which an item hangs."""
    return REHEARSED if item.get("rehearse") else SECONDS.get(item["kind"], OTHERWISE)
