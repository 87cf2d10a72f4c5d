"""What each row of an attention sees, as MLX's mask and as bits for a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kernels_metal.checks import check, check_range

MAX_ROWS = 96
MAX_LOCAL = 1024


@dataclass(frozen=True, eq=False)
class Visibility:
    """What each of R rows sees: made once for a block, used by all layers of one kind.

    prefix: committed keys, P. local: bool [R, N], which of the N keys behind them each row sees
    (ancestors in a tree, the own branch of a forest). first: R, the first key of the prefix that
    each row sees (its sliding window); 0 for all by default. R up to 96, N up to 1,024.
    Raises ValueError for anything else, and for a row that sees nothing.
    """

    prefix: int
    local: npt.NDArray[np.bool_]
    first: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check(self.prefix >= 0, "prefix", self.prefix, "0 or more")
        if self.local.ndim != 2 or self.local.dtype != np.bool_:
            kind = f"{self.local.dtype} {list(self.local.shape)}"
            check(False, "local", kind, "bool [R, N]")
        check_range("the rows of local", self.rows, 1, MAX_ROWS)
        check_range("the columns of local", self.columns, 1, MAX_LOCAL)
        if self.first is None and self.prefix > 0:
            return  # every row sees all of it
        count = len(self.starts)
        check(count == self.rows, "the length of first", count, f"{self.rows}, the rows")
        starts = np.array(self.starts)
        if starts.min() < 0 or starts.max() > self.prefix:
            for row, start in enumerate(self.starts):
                check_range(f"first[{row}]", start, 0, self.prefix)
        blind = np.flatnonzero((starts >= self.prefix) & ~self.local.any(axis=1))
        for row in blind[:1]:
            problem = "True somewhere: the row sees nothing"
            check(False, f"local[{row}]", "all False", problem)

    @property
    def rows(self) -> int:
        """R."""
        return len(self.local)

    @property
    def columns(self) -> int:
        """N."""
        return int(self.local.shape[1])

    @property
    def keys(self) -> int:
        """P + N."""
        return self.prefix + self.columns

    @property
    def starts(self) -> tuple[int, ...]:
        """First key of the prefix that each row sees."""
        return (0,) * self.rows if self.first is None else self.first

    @property
    def low(self) -> int:
        """The first key that any row sees, where it is one of the prefix."""
        return min(self.starts)

    @cached_property
    def mask(self) -> mx.array | str | None:
        """As MLX's attention takes it: None, "causal" or bool [R, P + N]."""
        starts = np.array(self.starts)
        if not starts.any():
            if self.local.all():
                return None
            if np.array_equal(self.local, np.tri(self.rows, dtype=bool)):
                return "causal"
        return mx.array(np.hstack([np.arange(self.prefix) >= starts[:, None], self.local]))

    @cached_property
    def bits(self) -> mx.array:
        """uint32 [max(R, 8), 1 + ceil(N / 32)]: `first`, then `local` as bits, lowest first.

        Eight rows or more, so that the kernel always has it in device memory.
        """
        return _table(self.rows, self.local.tobytes(), self.starts)


@lru_cache(64)  # chains of a few lengths come again and again
def _table(rows: int, seen: bytes, starts: tuple[int, ...]) -> mx.array:
    local = np.frombuffer(seen, np.bool_).reshape(rows, -1)
    words = -(-local.shape[1] // 32)
    wide = np.zeros((rows, words * 32), np.bool_)
    wide[:, : local.shape[1]] = local
    table = np.zeros((max(rows, 8), 1 + words), np.uint32)
    table[:rows, 0] = starts
    table[:rows, 1:] = np.packbits(wide, axis=1, bitorder="little").view("<u4")
    return mx.array(table)
