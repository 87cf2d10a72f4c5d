"""What the roofline is computed from: machines, targets, published results with their sources.

docs/roofline.md names the sources of the machines' figures.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """The largest GPU of a chip. bandwidth: GB/s. tflops: float32. stated: tflops by Apple."""

    name: str
    bandwidth: float
    tflops: float
    stated: bool

    @property
    def generation(self) -> int:
        """1 to 5."""
        return int(self.name[1])

    @property
    def stock(self) -> Stock:
        """MLX's own products."""
        is_old_ultra = self.generation <= 2 and self.name.endswith("Ultra")
        return STOCK_ULTRA if is_old_ultra else STOCK[self.generation]


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("M1", 68, 2.6, True),
        Machine("M1 Pro", 200, 5.2, True),
        Machine("M1 Max", 400, 10.4, True),
        Machine("M1 Ultra", 800, 21.0, True),
        Machine("M2", 100, 3.6, True),
        Machine("M2 Pro", 200, 6.8, True),
        Machine("M2 Max", 400, 13.6, True),
        Machine("M2 Ultra", 800, 27.2, True),
        Machine("M3", 100, 4.1, False),
        Machine("M3 Pro", 150, 7.4, False),
        Machine("M3 Max", 400, 14.2, False),
        Machine("M3 Ultra", 819, 28.4, False),
        Machine("M4", 120, 4.6, False),
        Machine("M4 Pro", 273, 9.2, False),
        Machine("M4 Max", 546, 18.4, False),
        Machine("M5", 153, 5.7, False),
        Machine("M5 Pro", 307, 11.4, False),
        Machine("M5 Max", 614, 22.8, False),
    )
}


@dataclass(frozen=True)
class Stock:
    """How MLX 0.32.4 multiplies large packed matrices, read in its source (quantized.cpp).

    single: rows up to which each reads all weights by itself (`qmv`). wide: rows up to which five
    read them together (`qmv_wide`). More rows go by tiles of 32, of which all rows are paid, at
    `tiled` of the float32 peak: measured by others (MEASURED), but on an M1 and M2 an estimate.
    An M5's tiles go through its own matrix units, and reach more than this peak has.
    """

    single: int
    wide: int
    tiled: float


STOCK = {  # by generation; limits are smaller for small matrices
    1: Stock(5, 0, 0.61),
    2: Stock(5, 0, 0.61),
    3: Stock(1, 12, 0.72),
    4: Stock(1, 12, 0.72),
    5: Stock(1, 12, 1.0),
}
STOCK_ULTRA = Stock(12, 0, 0.61)  # of an M1 and M2


@dataclass(frozen=True)
class Measured:
    """Milliseconds that others measured of one product x [rows, depth] W^T at 4 bits, by rows."""

    machine: str
    depth: int
    columns: int
    stock: bool
    times: dict[int, float]


MEASURED = (
    Measured("M4 Pro", 5120, 17_408, True, {1: 0.198, 5: 0.379, 8: 0.580, 12: 0.863, 16: 0.939}),
    Measured("M3 Max", 5120, 17_408, True, {1: 0.129, 4: 0.165, 8: 0.323, 9: 0.405, 32: 0.51}),
    Measured("M5", 5120, 13_824, True, {14: 0.833, 32: 0.804}),
    Measured("M4 Pro", 5120, 17_408, False, {8: 0.314, 16: 0.533}),  # of the scheme of ours
)


@dataclass(frozen=True)
class Target:
    """Widths of a transformer, from its published config.

    tied: the head is the embedding table. drafter_layers: of its DFlash drafter, 5 where none is
    published. drafter_taps: the target layers that the drafter reads.
    """

    name: str
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    tied: bool = False
    drafter_layers: int = 5
    drafter_taps: int = 5

    @property
    def layer_weights(self) -> int:
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.dim
        return attention + 3 * self.width * self.hidden

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.width

    @property
    def weights(self) -> int:
        """Numbers read in one pass: all matrices, without the embedding table."""
        return self.layers * self.layer_weights + self.head_weights

    @property
    def parameters(self) -> int:
        return self.weights + (0 if self.tied else self.head_weights)

    @property
    def drafter(self) -> Target:
        """The drafter's layers, whose widths are the target's; the head is the target's too."""
        name = f"{self.name} drafter"
        rest = (self.width, self.hidden, self.heads, self.kv_heads, self.dim, self.vocabulary)
        return Target(name, self.drafter_layers, *rest)


TARGETS = {
    target.name: target
    for target in (
        Target("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49_152, True, 3),
        Target("Qwen3-1.7B", 28, 2048, 6144, 16, 8, 128, 151_936, True),
        Target("Qwen3-4B", 36, 2560, 9728, 32, 8, 128, 151_936, True),
        Target("Qwen3-8B", 36, 4096, 12_288, 32, 8, 128, 151_936),
        Target("Qwen3-14B", 40, 5120, 17_408, 40, 8, 128, 151_936),
        Target("Qwen3-32B", 64, 5120, 25_600, 64, 8, 128, 151_936),
    )
}
OTHERS = {
    target.name: target
    for target in (
        Target("Llama-3.1-8B", 32, 4096, 14_336, 32, 8, 128, 128_256),
        Target("Qwen2.5-7B", 28, 3584, 18_944, 28, 4, 128, 152_064),
        Target("Qwen2.5-14B", 48, 5120, 13_824, 40, 8, 128, 152_064),
        Target("Qwen2.5-32B", 64, 5120, 27_648, 40, 8, 128, 152_064),
    )
}


@dataclass(frozen=True)
class Plain:
    """Published tokens per second of plain decoding with MLX."""

    machine: str
    target: Target
    bits: int
    speed: float
    source: str


PLAIN = (
    Plain("M1 Pro", OTHERS["Llama-3.1-8B"], 4, 38.0, "lmstudio-ai/mlx-engine issue 103"),
    Plain("M3 Pro", TARGETS["Qwen3-4B"], 4, 44.6, "ml-explore/mlx-lm PR 1569"),
    Plain("M4 Max", OTHERS["Qwen2.5-7B"], 4, 91.0, "NexVeridian/llm-inference-benchmarks"),
    Plain("M4 Max", OTHERS["Qwen2.5-14B"], 4, 52.0, "NexVeridian/llm-inference-benchmarks"),
    Plain("M4 Max", OTHERS["Qwen2.5-32B"], 4, 23.0, "NexVeridian/llm-inference-benchmarks"),
    Plain("M4 Max", TARGETS["Qwen3-4B"], 16, 53.2, "Aryagm/dflash-mlx issue 2"),
)


@dataclass(frozen=True)
class Drafted:
    """A published result with a drafter: tokens per round and speed over plain decoding.

    target: the modelled target nearest to theirs. draft_bits: of their drafter.
    """

    machine: str
    what: str
    target: Target
    bits: int
    rows: int
    draft_bits: int
    accepted: float
    speedup: float
    source: str


DRAFTED = (
    Drafted("M4 Max", "Qwen3-4B, DFlash, 512 tokens", TARGETS["Qwen3-4B"], 16, 16, 16, 8.81, 2.8,
            "Aryagm/dflash-mlx issue 2"),
    Drafted("M4 Max", "Qwen3-4B, DFlash, 4,028 tokens", TARGETS["Qwen3-4B"], 16, 16, 16, 13.55, 4.1,
            "Aryagm/dflash-mlx issue 2"),
    Drafted("M5 Max", "Qwen3.8-27B, DFlash 2", TARGETS["Qwen3-32B"], 4, 3, 4, 200 / 82, 1.75,
            "Blaizzy/mlx-vlm PR 2014"),
    Drafted("M5 Max", "Qwen3.8-27B, DSpark", TARGETS["Qwen3-32B"], 8, 3, 16, 2.49, 1.90,
            "ARahim3/mlx-dspark issue 8"),
)  # fmt: skip

QWEN3_DFLASH = 5.31  # tokens per round, Qwen3-8B, block 16, greedy: arXiv 2606.04446, table 3
QWEN3_D2SD = 7.05  # as above, K = 4
DEFAULT_PAIR = {"block 8": 1.83, "tree 8": 2.17, "tree 16": 2.33, "tree 32": 2.48}  # benchmarks.md
MERGED = 24.6 / 40  # rows of the default pair's D2SD tree over those of its K + 1 blocks of 8
