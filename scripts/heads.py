"""Predicted rounds of heads and small models on Apple GPUs, with what they read and keep.

    .venv/bin/python scripts/heads.py        # the tables of docs/lab/2026-11-26-heads.md

The model is that of scripts/roofline.py, with recurrent layers and experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from roofline import CONTEXT, LAYER_SECONDS, Pass, chain_acceptance
from roofline_data import MACHINES, Machine
from roofline_products import BANDWIDTH_SHARE, SCALAR_SHARE, fastest, table, weight_bytes
from roofline_products import stock as stock_product


def attention(width: int, heads: int, kv_heads: int, dim: int, gated: bool = False) -> int:
    """Numbers in the matrices of a layer's attention. gated: q_proj has a gate beside the query."""
    return width * dim * (heads * (2 + gated) + 2 * kv_heads)


def delta_net(width: int, keys: int, values: int, dim: int) -> int:
    """Numbers in a Gated DeltaNet: queries, keys, values, z, b, a, the convolution, the output."""
    mixed = dim * (2 * keys + values)
    return width * (mixed + values * dim + 2 * values) + 4 * mixed + values * dim * width


@dataclass(frozen=True)
class Network:
    """What a pass over its rows reads, in numbers of weights."""

    name: str
    layers: int
    dense: int  # of all layers, read once
    head: int
    embedding: int  # of which a pass reads its rows alone; 0 where it is the head
    cached: int = 0  # numbers kept for each token, of all layers
    state: int = 0  # bytes of recurrent states, read and written by a pass
    vocabulary: int = 0
    expert: int = 0  # of one expert in every layer
    experts: int = 0  # a layer has
    used: int = 0  # of them by a row

    @property
    def parameters(self) -> int:
        return self.dense + self.expert * self.experts + self.head + self.embedding

    def chosen(self, rows: int) -> float:
        """Different experts that so many rows use, if each chooses by itself and evenly."""
        return self.experts * (1 - (1 - self.used / self.experts) ** rows) if self.experts else 0.0

    def read(self, rows: int = 1) -> float:
        return self.dense + self.head + self.expert * self.chosen(rows)


@dataclass(frozen=True)
class Qwen35:
    """A target of Qwen 3.5 to 3.8 by its published config; hidden: of its MLP or shared expert."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    values: int  # value heads of its recurrent layers; key heads are 16, both are 128 wide
    hidden: int
    experts: int = 0
    used: int = 0
    expert_hidden: int = 0
    dim: int = 256
    vocabulary: int = 248_320

    @property
    def full(self) -> int:
        return attention(self.width, self.heads, self.kv_heads, self.dim, gated=True)

    @property
    def feed_forward(self) -> int:
        """Of a layer, without experts: with experts a router and the shared one's gate."""
        routed = self.width * (self.experts + 1) if self.experts else 0
        return 3 * self.width * self.hidden + routed

    @cached_property
    def target(self) -> Network:
        full = self.layers // 4
        recurrent = delta_net(self.width, 16, self.values, 128) * (self.layers - full)
        dense = recurrent + full * self.full + self.layers * self.feed_forward
        head, kept = self.vocabulary * self.width, 2 * self.kv_heads * self.dim
        state = (self.layers - full) * self.values * 128 * 128 * 4
        expert = self.layers * 3 * self.width * self.expert_hidden
        routed = expert, self.experts, self.used
        return Network(
            self.name, self.layers, dense, head, head, full * kept, state, self.vocabulary, *routed
        )

    @cached_property
    def mtp(self) -> Network:
        """Its head: a projection of two states, one layer with full attention."""
        dense = 2 * self.width**2 + self.full + self.feed_forward
        kept, expert = 2 * self.kv_heads * self.dim, 3 * self.width * self.expert_hidden
        routed = expert, self.experts, self.used
        return Network("MTP head", 1, dense, 0, 0, kept, 0, self.vocabulary, *routed)


def dflash(name: str, layers: int, width: int, hidden: int, read: int) -> Network:
    """A published DFlash: 32 heads and 8 for keys, each 128 wide; read: layers of the target."""
    each = attention(width, 32, 8, 128) + 3 * width * hidden
    return Network(name, layers, layers * each + read * width**2, 0, 0, layers * 2 * 8 * 128)


def qwen3(name: str, layers: int, width: int, hidden: int, heads: int, tied: bool) -> Network:
    """A Qwen3 with 8 heads for keys, each 128 wide."""
    dense, head = attention(width, heads, 8, 128) + 3 * width * hidden, 151_936 * width
    cached = layers * 2 * 8 * 128
    return Network(name, layers, layers * dense, head, 0 if tied else head, cached, 0, 151_936)


@dataclass(frozen=True)
class Drafter:
    """A network with so many bits; blocks: it drafts all tokens in one pass."""

    network: Network
    bits: int
    blocks: bool = False

    @property
    def name(self) -> str:
        return f"{self.network.name}, {self.bits} bits"


DENSE = Qwen35("Qwen3.6-27B", 64, 5120, 24, 4, 48, 17_408)
MOE = Qwen35("Qwen3.6-35B-A3B", 40, 2048, 16, 2, 32, 512, 256, 8, 512)
LARGE = qwen3("Qwen3-32B", 64, 5120, 25_600, 64, tied=False)
SMALL = qwen3("Qwen3-0.6B", 28, 1024, 3072, 16, tied=True)
DRAFTS = {
    DENSE.target: (
        *(Drafter(DENSE.mtp, bits) for bits in (4, 8, 16)),
        *(Drafter(dflash("DFlash", 5, 5120, 17_408, 5), bits, True) for bits in (4, 16)),
    ),
    MOE.target: (
        *(Drafter(MOE.mtp, bits) for bits in (4, 8, 16)),
        *(Drafter(dflash("DFlash", 6, 2048, 6144, 8), bits, True) for bits in (4, 16)),
    ),
    LARGE: tuple(Drafter(SMALL, bits) for bits in (4, 8)),
}


@dataclass(frozen=True)
class Accepted:
    """Published tokens per round, the target's own included, with so many drafts.

    Fewer: as if every draft were right with the same probability.
    """

    tokens: float
    drafts: int

    def of(self, drafts: int) -> float:
        return chain_acceptance(self.tokens, self.drafts + 1, drafts + 1)


HIGH = Accepted(2.64, 2)  # Qwen3.6-27B at 4 bits, greedy, a program: Blaizzy/mlx-vlm PR 1167
MIDDLE = Accepted(2.62, 3)  # Qwen3.8-27B at 4 bits, an answer from texts: Rapid-MLX issue 3156
LOW = Accepted(2.10, 2)  # gemma-4-31B's assistant at 4 bits, prose: Blaizzy/mlx-vlm issue 1121
# Qwen3.8-27B at temperature 1 with 7 drafts, the mean of GSM8K, MATH-500, HumanEval, MBPP and
# MT-Bench: the card of incoai/Qwen3.8-27B-DFlash2
HEAD_OF_7, DFLASH2_OF_7 = Accepted(4.28, 7), Accepted(4.80, 7)


def pass_time(machine: Machine, network: Network, bits: int, rows: int, stock: bool) -> Pass:
    """A pass over `rows` behind CONTEXT tokens. stock: with MLX's own products alone."""
    matrices = network.dense + network.head
    product = (
        stock_product(machine, rows, bits) if stock else fastest(machine, matrices, bits, rows)
    )
    experts = network.expert * (network.used * rows if stock else network.chosen(rows))
    memory = weight_bytes(matrices * product.reads + experts, bits) + 2 * network.state
    memory += 2 * network.cached * (CONTEXT + rows) + 4 * rows * network.vocabulary
    compute = matrices * product.adds + network.expert * network.used * rows / SCALAR_SHARE
    return Pass(
        memory / (machine.bandwidth * 1e9 * BANDWIDTH_SHARE),
        compute / (machine.tflops * 1e12 / 2) if rows > 1 else 0.0,
        network.layers * LAYER_SECONDS,
    )


def draft_time(
    machine: Machine, target: Network, drafter: Drafter, drafts: int, stock: bool
) -> float:
    """Seconds of so many drafts; heads without a head of their own use the target's, at 4 bits."""
    rows, passes = (drafts + 1, 1) if drafter.blocks else (1, drafts)
    one = pass_time(machine, drafter.network, drafter.bits, rows, stock).seconds
    if not drafter.network.head:
        head = Network("", 0, 0, target.head, 0, vocabulary=target.vocabulary)
        one += pass_time(machine, head, 4, rows, stock).seconds
    return passes * one


def round_time(
    machine: Machine, target: Network, drafter: Drafter, drafts: int, stock: bool
) -> float:
    """Seconds of a round with a target of 4 bits."""
    verify = pass_time(machine, target, 4, drafts + 1, stock).seconds
    return draft_time(machine, target, drafter, drafts, stock) + verify


def speedup(
    machine: Machine,
    target: Network,
    drafter: Drafter,
    accepted: Accepted,
    stock: bool,
) -> tuple[float, int]:
    """Over plain decoding with the best number of drafts, which comes second.

    No more drafts than the acceptance was published with, since later ones are accepted less.
    """
    plain = pass_time(machine, target, 4, 1, stock).seconds
    return max(
        (accepted.of(n) * plain / round_time(machine, target, drafter, n, stock), n)
        for n in range(1, accepted.drafts + 1)
    )


def size_rows() -> Iterator[list[str]]:
    """Every drafter: memory, bytes of a draft beside its share of a plain pass, and of a token."""
    for target, drafters in DRAFTS.items():
        kept = f"{target.cached * 2 / 1e3:.0f} kB"
        plain = weight_bytes(target.read(), 4)
        size = f"{weight_bytes(target.parameters, 4) / 1e9:.2f} GB"
        about = f"{target.parameters / 1e9:.2f}"
        yield [f"**{target.name}, 4 bits**", about, size, f"{plain / 1e9:.2f} GB", "", kept]
        for drafter in drafters:
            network = drafter.network
            own = weight_bytes(network.read(), drafter.bits)
            both = own + (0 if network.head else weight_bytes(target.head, 4))
            yield [
                drafter.name,
                f"{network.parameters / 1e9:.2f}",
                f"{weight_bytes(network.parameters, drafter.bits) / 1e9:.2f} GB",
                f"{both / 1e9:.2f} GB, its own {own / 1e9:.2f}",
                f"{100 * both / plain:.0f} %" + " a block" * drafter.blocks,
                f"{network.cached * 2 / 1e3:.0f} kB",
            ]


def speed_rows(target: Network, drafter: Drafter, *further: Drafter) -> Iterator[list[str]]:
    """Every machine: plain speed, speed-ups by acceptance with either kernels, and of DFlash."""
    for machine in MACHINES.values():
        cells = [machine.name, f"{1 / pass_time(machine, target, 4, 1, False).seconds:.0f}"]
        for stock in (True, False):
            found = [speedup(machine, target, drafter, each, stock) for each in (HIGH, MIDDLE, LOW)]
            cells.append(" / ".join(f"{gain:.2f} ({n})" for gain, n in found))
        for other in further:
            pairs = (drafter, HEAD_OF_7), (other, DFLASH2_OF_7)
            found = [speedup(machine, target, each, known, False) for each, known in pairs]
            cells.append(" / ".join(f"{gain:.2f} ({n})" for gain, n in found))
        yield cells


@dataclass(frozen=True)
class Published:
    """A round that others measured: milliseconds of a plain pass and of a round."""

    machine: str
    what: str
    target: Network
    drafter: Drafter
    drafts: int
    plain: float
    round: float
    source: str
    stock: bool = True


PUBLISHED = (
    Published("M1 Ultra", "Qwen3.8-27B", DENSE.target, Drafter(DENSE.mtp, 16), 2, math.nan, 129.1,
              "lablup/mlxcel PR 1197"),
    Published("M5 Max", "Qwen3.8-27B", DENSE.target, Drafter(DENSE.mtp, 16), 2, 1e3 / 32.96, 58.5,
              "lablup/mlxcel PR 1182, 1197"),
    Published("M2 Max", "Qwen3.8-27B", DENSE.target, Drafter(DENSE.mtp, 16), 3, 1e3 / 19.8,
              2.62e3 / 33.0, "raullenchai/Rapid-MLX issue 3156 (MTPLX)", False),
    Published("M3 Ultra", "Qwen3.8-27B", DENSE.target, Drafter(DENSE.mtp, 16), 3, 1e3 / 36.5,
              256e3 / 98 / 52.28, "raullenchai/Rapid-MLX PR 159, 3233"),
    Published("M3 Ultra", "Qwen3.5-35B-A3B", MOE.target, Drafter(MOE.mtp, 4), 1, 1e3 / 73.7,
              1.795e3 / 85.9, "waybarrios/vllm-mlx PR 245"),
    Published("M2 Max", "Qwen3.6-35B-A3B", MOE.target, Drafter(MOE.mtp, 4), 0, 1e3 / 79.75,
              math.nan, "raullenchai/Rapid-MLX PR 1065"),
)  # fmt: skip


def published_rows() -> Iterator[list[str]]:
    """What others measured beside the model, in milliseconds."""
    for known in PUBLISHED:
        machine = MACHINES[known.machine]
        plain = 1e3 * pass_time(machine, known.target, 4, 1, known.stock).seconds
        ours = round_time(machine, known.target, known.drafter, known.drafts, known.stock)
        told = ["" if math.isnan(ms) else f"{ms:.1f}" for ms in (known.plain, known.round)]
        said = f"{1e3 * ours:.1f}" if known.drafts else ""
        kernels = "MLX's" if known.stock else "their own"
        name, drafts = f"{known.what}, {known.drafter.name}", str(known.drafts or "")
        yield [machine.name, name, drafts, kernels, told[0], f"{plain:.1f}", told[1], said,
               known.source]  # fmt: skip


def report() -> str:
    """All tables of the page."""
    columns = ["machine", "plain tok/s", "MLX's products", "verify_qmm"]
    beside = "head / DFlash 2, verify_qmm"
    dense, moe = DRAFTS[DENSE.target], DRAFTS[MOE.target]
    return "\n".join(
        [
            table(
                ["", "billions of weights", "memory", "read by a pass, for a draft",
                 "of a plain pass", "kept for a token"],
                size_rows(),
            ),
            f"{DENSE.name} with its head\n",
            table([*columns, beside], speed_rows(DENSE.target, dense[0], dense[3])),
            f"{MOE.name} with its head\n",
            table([*columns, beside], speed_rows(MOE.target, moe[0], moe[3])),
            f"{LARGE.name} with {SMALL.name}\n",
            table(columns, speed_rows(LARGE, DRAFTS[LARGE][0])),
            table(
                ["machine", "published", "drafts", "products", "plain, ms", "model", "round, ms",
                 "model", "source"],
                published_rows(),
            ),
        ]
    )  # fmt: skip


if __name__ == "__main__":
    print(report())
