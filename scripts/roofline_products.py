"""What a matrix product of some rows costs an Apple GPU: by MLX, by verify_qmm, by the faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roofline_data import MACHINES, MEASURED, STOCK, STOCK_ULTRA, Machine

GROUP = 64
BANDWIDTH_SHARE = 0.82  # reached, fitted to the published plain speeds
# Of the arithmetic peak: what others measured of scalar kernels and of MLX's `qmv_wide`, and what
# cycles of instructions that others measured let verify_qmm_matrix reach, up to so many rows
SCALAR_SHARE, WIDE_SHARE = 0.30, 0.28
MATRIX_SHARES = {8: 0.56, 16: 0.66, 32: 0.60}
MATRIX_SHARE = 0.66  # of attention, and of MLX's products by weights of 16 bits
FEW_ROWS, WIDE_ROWS, TILE, LARGE_TILE = 5, 5, 32, 64
KERNEL_ROWS = {1: 32, 2: 32, 3: 24, 4: 24, 5: 0}  # of verify_qmm by generation; then stock MLX


def weight_bytes(numbers: float, bits: int) -> float:
    """Of stored weights: a scale and a bias of 16 bits for each group of 64 quantised ones."""
    return numbers * (bits + (32 / GROUP if bits < 16 else 0)) / 8


@dataclass(frozen=True)
class Product:
    """How often a product reads all weights, and multiply-adds of one that its time has room for.

    At the peak, that is: what is multiplied in vain and what is slower counts, too.
    """

    reads: float
    adds: float
    is_stock: bool = True

    def memory(self, machine: Machine, numbers: float, bits: int) -> float:
        """Seconds of reading so many weights."""
        read = weight_bytes(numbers, bits) * self.reads
        return read / (machine.bandwidth * 1e9 * BANDWIDTH_SHARE)

    def compute(self, machine: Machine, numbers: float) -> float:
        """Seconds of multiplying by so many weights."""
        return numbers * self.adds / (machine.tflops * 1e12 / 2)

    def seconds(self, machine: Machine, numbers: float, bits: int) -> float:
        """Of the two, which overlap."""
        return max(self.memory(machine, numbers, bits), self.compute(machine, numbers))


def stock(machine: Machine, rows: int, bits: int) -> Product:
    """MLX's own, see `Stock`.

    16 bits: before an M3, 2 to 32 rows are multiplied as if they were 64, else weights are read
    once and rows multiplied as they are. One row takes no time beside its memory.
    """
    if rows == 1:
        return Product(1, 0)
    if bits == 16:
        padded = machine.generation <= 2 and rows <= TILE
        return Product(1, (LARGE_TILE if padded else rows) / MATRIX_SHARE)
    how = machine.stock
    if rows <= how.single:
        return Product(rows, rows / SCALAR_SHARE)
    if rows <= how.wide:
        return Product(-(-rows // WIDE_ROWS), rows / WIDE_SHARE)
    tiles = -(-rows // TILE)
    return Product(tiles, tiles * TILE / how.tiled)


def kernel(machine: Machine, rows: int, reads: float = 1.0) -> Product | None:
    """verify_qmm: scalar for the fewest rows, then by whole tiles of eight rows.

    reads: of the weights, as counted. None where `auto` has no kernel.
    """
    if not 1 < rows <= KERNEL_ROWS[machine.generation]:
        return None
    if rows <= FEW_ROWS:
        return Product(reads, rows / SCALAR_SHARE, False)
    share = next(share for most, share in MATRIX_SHARES.items() if rows <= most)
    return Product(reads, -(-rows // 8) * 8 / share, False)


def fastest(machine: Machine, numbers: float, bits: int, rows: int, reads: float = 1.0) -> Product:
    """The faster of both, as `auto` would find it."""
    both = [stock(machine, rows, bits), kernel(machine, rows, reads)]
    known = [each for each in both if each]
    return min(known, key=lambda each: each.seconds(machine, numbers, bits))


def table(headings: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def stock_rows() -> Iterator[list[str]]:
    """How MLX multiplies, by generation."""
    named = {f"M{number}": how for number, how in STOCK.items()}
    for name, how in {**named, "M1 Ultra, M2 Ultra": STOCK_ULTRA}.items():
        known = "estimated" if how.tiled == STOCK_ULTRA.tiled else "measured by others"
        single = "1" if how.single == 1 else f"1 to {how.single}"
        fives = f"2 to {how.wide}" if how.wide else "none"
        first = max(how.single, how.wide) + 1
        yield [name, single, fives, f"from {first}, at {how.tiled:.0%} of the peak ({known})"]


def product_rows() -> Iterator[list[str]]:
    """What others measured of single products beside the model, in milliseconds."""
    for known in MEASURED:
        machine, numbers = MACHINES[known.machine], known.depth * known.columns
        for rows, theirs in known.times.items():
            found = stock(machine, rows, 4) if known.stock else kernel(machine, rows)
            assert found is not None
            ours = 1e3 * found.seconds(machine, numbers, 4)
            name = "MLX" if known.stock else "a kernel like ours"
            shape, told = f"{known.depth} x {known.columns}", [f"{theirs:.3f}", f"{ours:.3f}"]
            yield [known.machine, name, shape, str(rows), *told, f"{ours / theirs:.2f}"]
