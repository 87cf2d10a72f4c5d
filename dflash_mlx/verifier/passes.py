"""Passes that recurrent layers remember, to go back behind them or to keep a part of their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from dflash_mlx.core.tree import rows_on

if TYPE_CHECKING:
    from dflash_mlx.verifier.paths import Noted, Products
    from dflash_mlx.verifier.recurrent import RecurrentLayer

STATE = object()  # stands for the layer's state among the arguments of a kept call
_CHUNKS = 4  # parts of prompts whose beginnings are kept; states can be large


@dataclass(frozen=True)
class Call:
    """One call of a mixer in a pass: `run(*args, **kwargs)`, the state of layer `layer` in it.

    products: of the mixer. noted: what they gave in the pass, until its rows are committed.
    """

    layer: int
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    products: Products
    noted: Noted = field(default_factory=dict)

    @property
    def arrays(self) -> list[mx.array]:
        """What it was given."""
        return [arg for arg in (*self.args, *self.kwargs.values()) if isinstance(arg, mx.array)]

    def again(self, state: RecurrentLayer, rows: int, path: Sequence[int]) -> None:
        """Run it over those of its `rows` rows that are on `path`; what it returns is dropped.

        A row on a path has the same rows before it as in the pass, so what products gave for it
        holds: only convolutions and the recurrence itself are computed again.
        """
        kept = rows_on(path)

        def part(arg: Any) -> Any:
            if isinstance(arg, mx.array) and arg.shape[:2] == (1, rows):
                return arg[:, kept]
            return state if arg is STATE else arg

        with self.products.given_again(self.noted, rows, kept):
            self.on(part)

    def on(self, change: Callable[[Any], Any]) -> Any:
        """Run it with its arguments changed, the state's place among them."""
        kwargs = {key: change(arg) for key, arg in self.kwargs.items()}
        return self.run(*map(change, self.args), **kwargs)


@dataclass(frozen=True)
class Pass:
    """A pass behind `start` tokens, of which the rows on `path` were committed.

    parents: the row before each row, -1 for the first. before: the arrays of all layers' states.
    calls: of the mixers; None where they were not kept.
    """

    start: int
    parents: Sequence[int]
    before: tuple[tuple[mx.array | None, ...], ...]
    calls: list[Call] | None
    path: Sequence[int] = ()

    def nearest(self, length: int) -> int:
        """The most tokens up to `length`, at least `start`, that it leads back to."""
        return min(length, self.start + len(self.path)) if self.calls is not None else self.start

    def beginning(self) -> Pass:
        """Only the way back to its start."""
        return replace(self, calls=None, path=())

    def leads(self, path: Sequence[int]) -> bool:
        """Whether `path` begins at the first row, and each of its rows follows the one before."""
        rows, steps = range(len(self.parents)), zip(path, (-1, *path), strict=False)
        return all(row in rows and self.parents[row] == before for row, before in steps)


def spread(chunks: list[Pass]) -> list[Pass]:
    """At most _CHUNKS of them, in order and the last among them, that leave no wide gaps."""
    while len(chunks) > _CHUNKS:
        starts = [0, *(chunk.start for chunk in chunks)]
        gaps = [after - before for before, after in zip(starts, starts[2:], strict=False)]
        leaves = gaps.index(min(gaps))
        chunks = [chunk for i, chunk in enumerate(chunks) if i != leaves]
    return chunks


def own(value: Any) -> Any:
    """An array's data under a name of its own: MLX's `+=` changes an array for all who have it."""
    return value[:] if isinstance(value, mx.array) and value.ndim else value
