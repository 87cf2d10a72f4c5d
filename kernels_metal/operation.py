"""What an operation is: a kernel and a reference, how calls are told apart, and random calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx

from kernels_metal.factory import Kernel

ROWS = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96)
PREFIXES = (0, 1, 7, 8, 31, 32, 33, 63, 64, 100, 255, 500, 1000, 2047, 5000)
EXACT = 32  # rows up to here are a case each: stock MLX changes its algorithm more than once
Case = tuple[int, tuple[int, ...], int, str]


@dataclass(frozen=True)
class Operation:
    """An operation that has a kernel and a reference, called with the same arguments.

    check: raises ValueError for arguments the kernel does not take. case: rows, shape, bits and
    dtype of a call, so fine that the kernel takes all calls of a case or none. kernels: what it
    launches. arguments: those of a random call. defaults: of the sizes that such a call can be
    asked for. compared: of a result and the arguments it is for, the arrays in which kernel and
    reference must agree.

    For races: ways: names of the kernels that can take these arguments, of which `kernel` takes one
    as its keyword `way`; "" where it has none. after: the arguments of a call that cannot begin
    before the result of the last one. copied: the call with copies of its large arrays, and these.
    tried: for the first try of a kernel, what tells its variants apart, and sizes of random calls
    that run it. variants: sizes of calls whose first tries run all variants between them.
    """

    name: str
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    check: Callable[..., None]
    case: Callable[..., Case]
    kernels: tuple[Kernel, ...]
    arguments: Callable[[Draw], tuple[Any, ...]]
    defaults: Mapping[str, int]
    compared: Callable[..., list[mx.array]] = lambda out, *args: [out]
    ways: Callable[..., tuple[str, ...]] = lambda *args: ("",)
    after: Callable[..., tuple[Any, ...]] = lambda out, *args: args
    copied: Callable[..., tuple[tuple[Any, ...], list[mx.array]]] | None = None
    tried: Callable[..., tuple[str, list[dict[str, int]]]] = lambda *args: ("", [dict[str, int]()])
    variants: Sequence[Mapping[str, int]] = ({},)

    def by(self, way: str) -> Callable[..., Any]:
        """The kernel of this name."""
        return partial(self.kernel, way=way) if way else self.kernel

    def run(self, **sizes: int) -> Any:
        """The kernel's result for random arguments of these sizes, the others by default."""
        return self.kernel(
            *self.arguments(Draw(random.Random(0), given={**self.defaults, **sizes}))
        )


@dataclass
class Draw:
    """Draws the arguments of one call; the same generator draws the same.

    given: sizes by their names. With any, nothing but the numbers in the arrays is left to chance;
    without, sizes and features are drawn too. sizes: those of the call, for people.
    """

    rng: random.Random
    dtype: mx.Dtype = mx.float16
    given: Mapping[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def size(self, name: str, choices: Sequence[int]) -> int:
        """A size that every call has."""
        self.sizes[name] = self.given[name] if self.given else self.rng.choice(choices)
        return self.sizes[name]

    def extra(self, name: str, choices: Sequence[int]) -> int:
        """A size that is 0 where others are given."""
        return self.given.get(name, 0) if self.given else self.rng.choice(choices)

    def chance(self, name: str, share: float) -> bool:
        """A feature that some calls have."""
        return bool(self.given.get(name)) if self.given else self.rng.random() < share

    def key(self) -> mx.array:
        """For MLX's own generators."""
        return mx.random.key(self.rng.getrandbits(32))

    def normal(self, *shape: int) -> mx.array:
        """Normally distributed numbers."""
        return mx.random.normal(shape, key=self.key()).astype(self.dtype)

    def parents(self, nodes: int) -> list[int]:
        """Of a tree's nodes, most of them close above, or all, in a chain; -1 for the root."""
        if self.given:
            return list(range(-1, nodes - 1))
        above = (int(self.rng.expovariate(0.5)) for _ in range(1, nodes))
        return [-1, *(max(0, node - up) for node, up in enumerate(above))]


def case_of(
    rows: int, shape: tuple[int, ...], arrays: Sequence[mx.array], bits: int | None = None
) -> Case:
    """rows: exact where they are few; bits: of the first array unless given.

    dtype: one for all arrays, or that of each where they differ.
    """
    names = [dtype_name(array.dtype) for array in arrays]
    alike = len(set(names)) == 1
    bits = arrays[0].itemsize * 8 if bits is None else bits
    return (
        rows if rows <= EXACT else bucket(rows),
        shape,
        bits,
        "+".join(names[:1] if alike else names),
    )


def bucket(size: int) -> int:
    """The power of two at or above `size`, so that the table stays short; or 96, a limit."""
    return 96 if 64 < size <= 96 else 1 << max(size - 1, 0).bit_length()


@lru_cache
def dtype_name(dtype: mx.Dtype) -> str:
    """As in the names of `mlx.core`."""
    return str(dtype).removeprefix("mlx.core.")
