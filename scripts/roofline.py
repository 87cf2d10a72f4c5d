"""Predicted time of a round on Apple GPUs: docs/roofline.md has the assumptions and the results.

    .venv/bin/python scripts/roofline.py                   # the tables
    .venv/bin/python scripts/roofline_plots.py docs        # the pictures
    .venv/bin/python scripts/roofline.py --measure         # the kernels' traffic again, emulated

A pass takes the longer of its memory traffic and its arithmetic, and a fixed time for each layer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from roofline_data import (
    DEFAULT_PAIR,
    DRAFTED,
    MACHINES,
    MERGED,
    PLAIN,
    QWEN3_D2SD,
    QWEN3_DFLASH,
    TARGETS,
    Machine,
    Target,
)
from roofline_products import (
    BANDWIDTH_SHARE,
    GROUP,
    MATRIX_SHARE,
    TILE,
    fastest,
    product_rows,
    stock,
    stock_rows,
    table,
)

TRAFFIC = Path(__file__).parents[1] / "docs" / "roofline_traffic.json"
CONTEXT = 1024
CURVES = ("M1 Max", "M2 Ultra", "M3 Max", "M4 Pro", "M4 Max", "M5 Max")
CURVE_ROWS = (2, 4, 5, 8, 12, 16, 24, 32)
ROWS = (1, 2, 4, 8, 16, 32, 48, 64)
BITS = (4, 8, 16)
LAYER_SECONDS = 45e-6  # spent beside it, fitted to the published plain speeds


@dataclass(frozen=True)
class Traffic:
    """The emulator's counters.

    weights: bytes read by verify_qmm over bytes of the weights, by bits and rows. attention: of one
    layer at CONTEXT, by target and rows: bytes of keys and values, and of the splits' results,
    written by one kernel and read by the next.
    """

    weights: dict[int, dict[int, float]]
    attention: dict[str, dict[int, tuple[int, int]]]

    @classmethod
    def read(cls, file: Path = TRAFFIC) -> Traffic:
        """As `measure` kept it."""
        saved = json.loads(file.read_text(encoding="utf-8"))
        weights = {
            int(bits): {int(r): x for r, x in rows.items()}
            for bits, rows in saved["weights"].items()
        }
        attention = {
            name: {int(r): (x[0], x[1]) for r, x in rows.items()}
            for name, rows in saved["attention"].items()
        }
        return cls(weights, attention)

    def keys_and_splits(self, target: Target, rows: int) -> tuple[float, float]:
        """Of one layer, between measured rows in proportion.

        Where a target was not measured, the keys and values once and no splits: one row does so.
        """
        once = 2.0 * target.kv_heads * target.dim * 2 * (CONTEXT + rows)
        known = self.attention.get(target.name.removesuffix(" drafter"))
        if known is None or rows == 1:
            return once, 0.0
        above = min(r for r in known if r >= rows)
        below = max(r for r in known if r <= rows)
        share = 0.0 if above == below else (rows - below) / (above - below)
        low, high = known[below], known[above]
        return low[0] + share * (high[0] - low[0]), low[1] + share * (high[1] - low[1])


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass over some rows: of its memory traffic, its arithmetic, and besides.

    is_stock: its products are MLX's.
    """

    memory: float
    compute: float
    besides: float
    is_stock: bool = True

    @property
    def seconds(self) -> float:
        """Memory and arithmetic overlap."""
        return max(self.memory, self.compute) + self.besides

    def __add__(self, other: Pass) -> Pass:
        """One after the other, so not overlapping: the limits are added as they were reached."""
        mine, theirs = (max(p.memory, p.compute) for p in (self, other))
        return Pass(mine + theirs, 0.0, self.besides + other.besides)


def pass_time(
    machine: Machine, target: Target, bits: int, rows: int, traffic: Traffic, numbers: float = 0
) -> Pass:
    """A pass of the target over `rows` behind CONTEXT tokens, by the faster products.

    One row is plain decoding with stock MLX, whose published speeds memory alone explains.
    numbers: weights that it reads, those of all layers and the head by default.
    """
    numbers = numbers or target.weights
    keys, splits = traffic.keys_and_splits(target, rows)
    factors = traffic.weights.get(bits, {})
    product = fastest(machine, numbers, bits, rows, max(factors.values(), default=1.0))
    memory = target.layers * (keys + splits)
    memory += 2 * 2.0 * rows * target.vocabulary  # logits, written and read
    attention = 2.0 * target.layers * target.heads * target.dim * rows * (CONTEXT + rows)
    besides = attention / MATRIX_SHARE / (machine.tflops * 1e12 / 2) if rows > 1 else 0.0
    return Pass(
        product.memory(machine, numbers, bits)
        + memory / (machine.bandwidth * 1e9 * BANDWIDTH_SHARE),
        product.compute(machine, numbers) + besides,
        target.layers * LAYER_SECONDS,
        product.is_stock,
    )


def draft_time(
    machine: Machine, target: Target, bits: int, rows: int, traffic: Traffic, own_bits: int = 16
) -> Pass:
    """One pass of the drafter, in 16 bits as published, and of the target's head."""
    drafter = target.drafter
    numbers = drafter.layers * drafter.layer_weights + target.drafter_taps * target.width**2
    layers = pass_time(machine, drafter, own_bits, rows, traffic, numbers)
    bare = Target("head", 0, target.width, 0, 0, 0, 0, 0)
    return layers + pass_time(machine, bare, bits, rows, traffic, target.head_weights)


@dataclass(frozen=True)
class Method:
    """Rows that the target verifies, rows of each drafter pass, tokens committed per round."""

    name: str
    rows: int
    drafts: tuple[int, ...]
    accepted: float


PLAINLY = Method("plain", 1, (), 1.0)


def chain_acceptance(known: float, of: int, block: int) -> float:
    """Tokens per round of another block size, if every draft is right with the same probability.

    known: tokens per round with blocks of `of`, solved for the probability by halving.
    """
    low, high = 0.0, 1.0 - 1e-9
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _expected(middle, of) < known else (low, middle)
    return _expected(low, block)


def _expected(right: float, block: int) -> float:
    return float(sum(right**k for k in range(block)))


def methods(target: Target) -> tuple[Method, ...]:
    """Those whose tokens per round are known for a target, or taken over from Qwen3-8B."""
    if target.name == "SmolLM2-135M":
        return tuple(
            Method(name, int(name.split()[1]), (8,), accepted)
            for name, accepted in DEFAULT_PAIR.items()
        )
    return (
        *(chain(block) for block in (4, 8, 16)),
        Method("D2SD", round(5 * 16 * MERGED), (16, 4 * 16), QWEN3_D2SD),
    )


def chain(block: int) -> Method:
    """DFlash on a Qwen3 target."""
    accepted = chain_acceptance(QWEN3_DFLASH, 16, block)
    return Method(f"block {block}", block, (block,), accepted)


def best_block(machine: Machine, target: Target, bits: int, traffic: Traffic) -> int:
    """The block of 2 to 16 with the greatest predicted speed-up."""
    return max(range(2, 17), key=lambda n: speedup(machine, target, bits, chain(n), traffic))


def round_time(
    machine: Machine, target: Target, bits: int, method: Method, traffic: Traffic
) -> float:
    """Seconds of a round: drafts, then the verification."""
    drafts = sum(draft_time(machine, target, bits, rows, traffic).seconds for rows in method.drafts)
    return drafts + pass_time(machine, target, bits, method.rows, traffic).seconds


def speedup(machine: Machine, target: Target, bits: int, method: Method, traffic: Traffic) -> float:
    """Over plain decoding."""
    plain = round_time(machine, target, bits, PLAINLY, traffic)
    return method.accepted * plain / round_time(machine, target, bits, method, traffic)


def break_even(machine: Machine, target: Target, bits: int, rows: int, traffic: Traffic) -> float:
    """Tokens per round that make a tree of `rows` nodes as fast as plain decoding.

    Drafted in one pass over 16 rows.
    """
    tree = Method("tree", rows, (16,), 1.0)
    return 1 / speedup(machine, target, bits, tree, traffic)


def attention_bytes(target: Target, rows: int) -> tuple[int, int]:
    """Of one layer: keys and values, and what the splits write and the next kernel reads.

    By the kernel's own plan; a test compares it with what the emulator counts.
    """
    from kernels_metal.cascade_attention import layout

    shared = target.heads // target.kv_heads * rows
    plan = layout(shared, CONTEXT + rows, target.kv_heads, target.dim, 2)
    keys = 2 * plan.sets * target.kv_heads * target.dim * 2 * (CONTEXT + rows)
    results = 4 * rows * target.heads * plan.splits
    if plan.splits == 1:  # finished at once, and only the sums are left over
        return keys, results * 2
    return keys, 2 * results * (target.dim + 2)


def measure() -> dict[str, object]:
    """Run the product in the emulator, plan the attention of every target, keep what they move."""
    import mlx.core as mx

    from kernels_metal.catalog import CATALOG
    from kernels_metal.emulator import Run, emulated

    def run(name: str, **shape: int) -> Run:
        with emulated() as counted:
            mx.eval(CATALOG[name].run(**shape))
        return counted

    def weights(bits: int, rows: int) -> float:
        shape = {"rows": rows, "depth": 1024, "columns": 128, "bits": bits, "group": GROUP}
        (counters,) = run("verify_qmm", **shape).counters
        stored = [counters.buffers[name] for name in ("weights", "scales", "biases")]
        return sum(b.fetched for b in stored) / sum(b.size for b in stored)

    return {
        "context": CONTEXT,
        "weights": {bits: {r: weights(bits, r) for r in ROWS if r <= TILE} for bits in (4, 8)},
        "attention": {
            name: {r: attention_bytes(target, r) for r in ROWS} for name, target in TARGETS.items()
        },
    }


def machine_rows(target: Target, bits: int, traffic: Traffic) -> Iterator[list[str]]:
    """Every machine: plain speed, passes, speed-ups, and what a tree of 32 has to accept."""
    for machine in MACHINES.values():
        passes = {rows: pass_time(machine, target, bits, rows, traffic) for rows in (1, 8, 16, 32)}
        times = [f"{p.seconds * 1e3:.1f}" + _mark(p) * (rows > 1) for rows, p in passes.items()]
        gains = [f"{speedup(machine, target, bits, m, traffic):.2f}" for m in methods(target)]
        trees = [f"{break_even(machine, target, bits, n, traffic):.2f}" for n in (16, 32)]
        mark = "" if machine.stated else " *"
        speed = f"{1 / passes[1].seconds:.0f}"
        yield [machine.name + mark, speed, *times, *gains, " / ".join(trees)]


def _mark(found: Pass) -> str:
    """c: arithmetic is the limit. s: by MLX's own products."""
    return " c" * (found.memory < found.compute) + " s" * found.is_stock


def curve_rows(target: Target) -> Iterator[list[str]]:
    """What the products of a pass cost over those of one row: by MLX alone, and by the faster."""
    for name in CURVES:
        machine, cells = MACHINES[name], []
        plain = stock(machine, 1, 4).seconds(machine, target.weights, 4)
        for rows in CURVE_ROWS:
            both = stock(machine, rows, 4), fastest(machine, target.weights, 4, rows)
            costs = [each.seconds(machine, target.weights, 4) / plain for each in both]
            cells.append(" / ".join(f"{cost:.2f}" for cost in costs))
        yield [name, *cells]


def gains(bits: int, traffic: Traffic) -> tuple[float, float]:
    """The least and the greatest predicted speed-up of any machine with Qwen3-8B's best block."""
    target = TARGETS["Qwen3-8B"]
    found = []
    for machine in MACHINES.values():
        method = chain(best_block(machine, target, bits, traffic))
        found.append(speedup(machine, target, bits, method, traffic))
    return min(found), max(found)


def target_rows(names: Sequence[str], traffic: Traffic) -> Iterator[list[str]]:
    """Every Qwen3 target and width of weights on some machines: plain speed and speed-ups."""
    for target in TARGETS.values():
        if target.name == "SmolLM2-135M":
            continue
        for bits in BITS:
            cells = []
            for name in names:
                machine = MACHINES[name]
                plain = 1 / round_time(machine, target, bits, PLAINLY, traffic)
                gains = [speedup(machine, target, bits, m, traffic) for m in methods(target)]
                best = best_block(machine, target, bits, traffic)
                speeds = " ".join(f"{gain:.2f}" for gain in gains[:3])
                cells.append(f"{plain:.0f}: {speeds} ({best})")
            yield [target.name, str(bits), *cells]


def plain_rows(traffic: Traffic) -> Iterator[list[str]]:
    """Published plain speeds beside those of the model."""
    for known in PLAIN:
        machine = MACHINES[known.machine]
        ours = 1 / round_time(machine, known.target, known.bits, PLAINLY, traffic)
        ratio = f"{ours / known.speed:.2f}"
        name = f"{known.target.name}, {known.bits} bits"
        yield [known.machine, name, f"{known.speed:.1f}", f"{ours:.1f}", ratio, known.source]


def drafted_rows(traffic: Traffic) -> Iterator[list[str]]:
    """What a published round cost, in plain passes, beside the model's."""
    for known in DRAFTED:
        machine, target, bits = MACHINES[known.machine], known.target, known.bits
        plain = round_time(machine, target, bits, PLAINLY, traffic)
        draft = draft_time(machine, target, bits, known.rows, traffic, known.draft_bits)
        verify = pass_time(machine, target, bits, known.rows, traffic)
        ours = (draft + verify).seconds / plain
        theirs = known.accepted / known.speedup
        numbers = [f"{known.accepted:.2f}", f"{known.speedup:.2f}", f"{theirs:.2f}", f"{ours:.2f}"]
        name = f"{known.what}, {bits} bits"
        yield [known.machine, name, str(known.rows), *numbers, known.source]


def report(traffic: Traffic) -> str:
    """All tables of docs/roofline.md."""
    passes = ["1 row, ms", "8", "16", "32"]
    eight, small = TARGETS["Qwen3-8B"], TARGETS["SmolLM2-135M"]
    named = {t.name: [m.name for m in methods(t)] for t in (eight, small)}
    columns = ["machine", "plain tok/s", *passes]
    tree = "tree 16 / 32 breaks even at"
    names = ["M1", "M1 Max", "M2 Ultra", "M4 Pro", "M4 Max", "M5 Max"]
    return "\n".join(
        [
            "Qwen3-8B, 4 bits\n",
            table([*columns, *named["Qwen3-8B"], tree], machine_rows(eight, 4, traffic)),
            "The default pair, 16 bits\n",
            table([*columns, *named["SmolLM2-135M"], tree], machine_rows(small, 16, traffic)),
            "plain tok/s: speed-up of blocks of 4, 8, 16 (best block)\n",
            table(["target", "bits", *names], target_rows(names, traffic)),
            table(["chips", "rows that read all", "rows by fives", "then by 32"], stock_rows()),
            "Products over those of one row: MLX alone / the faster of both\n",
            table(["machine", *map(str, CURVE_ROWS)], curve_rows(eight)),
            table(
                ["machine", "products", "K x N", "rows", "measured, ms", "model", "ratio"],
                product_rows(),
            ),
            table(
                ["machine", "target", "published tok/s", "model", "ratio", "source"],
                plain_rows(traffic),
            ),
            table(
                ["machine", "published", "rows", "tokens/round", "speed-up", "plain passes a round",
                 "model", "source"],
                drafted_rows(traffic),
            ),
        ]
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted rounds on Apple GPUs.")
    parser.add_argument("--measure", action="store_true", help="emulate the kernels' traffic again")
    arguments = parser.parse_args()
    if arguments.measure:
        TRAFFIC.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    print(report(Traffic.read()))


if __name__ == "__main__":
    main()
