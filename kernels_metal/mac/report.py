"""The report in words: what is pasted, 60 lines at most, and the file with all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from kernels_metal.dispatch import MARGIN, STOCK
from kernels_metal.faults import first_error
from kernels_metal.mac.items import (
    ATTENTION_ROWS,
    HEADS,
    KEYS,
    MODELS,
    ROWS,
    Item,
    Model,
    attention_item,
    product_item,
)
from kernels_metal.verify_qmm import FEW_ROWS

Found = Mapping[str, Mapping[str, Any]]
MOST_LINES = 60
PROBLEMS = 8  # named in what is pasted
# Of a float32 peak: our products by rows, MLX's tiles of 32 and its large ones (docs/roofline.md)
SHARES = {FEW_ROWS: 0.30, 8: 0.56, 16: 0.66, 32: 0.60}
TILED, LARGE = 0.72, 0.85
SEND = 'Please paste this into an issue "Report from a Mac", and attach the .md and .json files.'


def summary(facts: Mapping[str, str], found: Found) -> list[str]:
    """What is printed to be pasted."""
    lines = [
        "dflash-chat on a Mac",
        f"{facts['chip']}, {facts['cpu cores']} CPU and {facts['gpu cores']} GPU cores "
        f"({facts['gpu']}), {facts['memory']}, {facts['free memory']} free",
        f"macOS {facts['macos']} {facts['build']}, MLX {facts['mlx']}, mlx-lm {facts['mlx-lm']}, "
        f"Python {facts['python']}, {facts['power']}, power mode {facts['power mode']}",
        _machine(found),
        *_variants(found),
        *_products(found),
        *_attention(found),
        *_last(found),
        *_automatic(found),
    ]
    return [*lines[: MOST_LINES - 1], SEND]


def ways(found: Found, model: Model, rows: int) -> dict[str, str]:
    """Which kernel `auto` would take for each matrix of a model, "" for stock."""
    return {
        matrix: chosen(_us(found, product_item(model, matrix, rows))) for matrix in model.matrices
    }


def chosen(us: Mapping[str, float]) -> str:
    """The fastest kernel, "" where stock is as fast."""
    ours = {way: time for way, time in us.items() if way != STOCK}
    best = min(ours, key=lambda way: ours[way], default="")
    return best if ours and ours[best] <= us[STOCK] * (1 - MARGIN) else ""


def _us(found: Found, item: Item) -> Mapping[str, float]:
    us: Mapping[str, float] = found.get(item["name"], {}).get("us", {})
    return us


def _machine(found: Found) -> str:
    copied, gap, *products = (
        _number(found.get("machine", {}).get(what)) for what in ("GB/s", "us", "float32", "float16")
    )
    return (
        f"copy {copied} GB/s, a launch {gap} us, products {products[0]} (float32) and "
        f"{products[1]} (float16) TFLOP/s"
    )


def _variants(found: Found) -> Iterator[str]:
    tried = {name: each for name, each in found.items() if each.get("kind") == "variant"}
    wrong = {name: each["wrong"] for name, each in found.items() if each.get("wrong")}
    refused = sum("refused" in each for each in tried.values())
    right = sum("error" in each and not each.get("wrong") for each in tried.values())
    built = [each["ms"] for each in tried.values() if "ms" in each]
    spent = f", {median(built):.0f} ms each, {max(built):.0f} at most" if built else ""
    bad = sum(bool(each.get("wrong")) for each in tried.values())
    yield (
        f"variants: {len(tried)} tried, {right} right, {refused} not for this GPU, "
        f"{bad} wrong{spent}"
    )
    for name, problem in [*wrong.items()][:PROBLEMS]:
        yield f"  WRONG {name}: {first_error(problem)}"[:200]
    if len(wrong) > PROBLEMS:
        yield f"  and {len(wrong) - PROBLEMS} more, all in the files"
    largest: dict[str, list[int]] = {}
    for each in tried.values():
        for kernel, threads in (each.get("threads") or {}).items():
            largest.setdefault(kernel, []).append(threads)
    told = [f"{kernel} {min(all_of)}" for kernel, all_of in largest.items()]
    yield f"threads that have registers, at least: {', '.join(told) or 'not told'}"


def times(found: Found, model: Model, rows: int) -> tuple[float, float] | None:
    """Milliseconds of a pass's products: by stock, and by the fastest of each."""
    stock = best = 0.0
    for matrix, (_, _, count) in model.matrices.items():
        us = _us(found, product_item(model, matrix, rows))
        if STOCK not in us:
            return None
        stock += us[STOCK] * count / 1e3
        best += us[chosen(us) or STOCK] * count / 1e3
    return stock, best


def predicted(found: Found, model: Model, rows: int) -> float | None:
    """Milliseconds of a pass's products, by MLX's or ours; by bytes or by multiplications."""
    speed, peak = (float(found.get("machine", {}).get(what, 0)) for what in ("GB/s", "float32"))
    if not (speed and peak):
        return None
    share = next((share for most, share in SHARES.items() if rows <= most), SHARES[32])
    weights = sum(depth * columns * n for depth, columns, n in model.matrices.values())
    padded = -(-rows // 8) * 8 if rows > FEW_ROWS else rows
    multiplied = 2 * weights * min(padded / share, 32 / TILED) / (peak / LARGE * 1e9)
    return max(weights * 0.5625 / speed / 1e6, multiplied)  # bytes of a weight, scales included


def _products(found: Found) -> Iterator[str]:
    yield "products of a pass, ms: stock, then the fastest of each"
    yield _row("rows", [str(rows) for rows in ROWS])
    for model in MODELS:
        both = [times(found, model, rows) for rows in ROWS]
        yield _row(model.name, [_number(each and each[0]) for each in both])
        yield _row("", [_number(each and each[1]) for each in both])
    largest = MODELS[-1]
    yield _row("predicted", [_number(predicted(found, largest, rows)) for rows in ROWS])


def _attention(found: Found) -> Iterator[str]:
    yield f"attention, us: stock/fastest at {', '.join(map(str, ATTENTION_ROWS))} rows"
    for heads in HEADS:
        for keys in KEYS:
            cells = []
            for rows in ATTENTION_ROWS:
                us = _us(found, attention_item(heads, keys, rows))
                best = min((time for way, time in us.items() if way != STOCK), default=None)
                cells.append(f"{_number(us.get(STOCK))}/{_number(best)}")
            yield f"  {heads}, {keys} keys: {'  '.join(cells)}"


def _last(found: Found) -> Iterator[str]:
    long = found.get("sustained", {})
    if "first" in long:
        yield (
            f"a minute of passes (27B, 8 rows): {long['passes']}, {long['first']:.1f} ms at first, "
            f"{long['last']:.1f} at last, the longest {long['longest']:.1f}"
        )
    yield from found.get("host", {}).get("table", [])


def _automatic(found: Found) -> Iterator[str]:
    for model in MODELS:
        by_kernel = [rows for rows in ROWS if any(ways(found, model, rows).values())]
        one, eight = times(found, model, 1), times(found, model, 8)
        if one is None or eight is None:
            continue
        taken = f"kernels at {', '.join(map(str, by_kernel)) or 'no'} rows"
        yield (
            f"auto, {model.name}: {taken}; 8 rows cost {eight[1] / one[1]:.2f} x of one "
            f"(stock {eight[0] / one[0]:.2f} x)"
        )


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<12}" + "".join(f"{cell:>7}" for cell in cells)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
