"""What a pass leaves of the rows of a gated delta net, so that its state can follow some of them.

The state after any path of rows is computed from the state before the pass and what the pass has
computed of each row: convolution, norms and gates are not computed again, and no module is called.
Where the kernel `gated_delta` runs, nothing is computed at a commit: the next pass does it first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from dflash_mlx.verifier.routing import Kernels, Plans
from kernels_metal.gated_delta import GATED_DELTA, DeltaRows, GatedDelta, Taped, replayed

Update = Callable[..., Any]  # mlx-lm's `gated_delta_update`


@dataclass
class Behind:
    """The state behind some rows of a pass, computed by the next pass or when somebody asks.

    state: before them. taped: the rows, on a path.
    """

    state: mx.array
    taped: Taped | None

    def found(self, state: mx.array) -> None:
        """It is known."""
        self.state, self.taped = state, None

    def along(self, _: Any, path: Sequence[int]) -> Behind:
        """The same for others of the rows; see `Tape.behind`."""
        return Behind(self.state, None if self.taped is None else self.taped._replace(path=path))

    def array(self) -> mx.array:
        if self.taped is not None:
            self.found(replayed(self.state, self.taped))
        return self.state

    @property
    def nbytes(self) -> int:
        arrays = () if self.taped is None else self.taped[:3]
        return self.state.nbytes + sum(array.nbytes for array in arrays)


def settled(state: Any) -> Any:
    """An array, where there was one to be computed."""
    return state.array() if isinstance(state, Behind) else state


@dataclass(frozen=True)
class Tape:
    """The rows of one layer in a pass.

    window: [1, before + R, C] what was convolved, of which the first came from earlier passes.
    behind: of the state before the pass and a path, the state behind it. committed: to be called
    when some of the rows stay.
    """

    window: mx.array
    before: int
    behind: Callable[[Any, Sequence[int]], Any]
    committed: Callable[[], None] = lambda: None

    def after(self, cache: Sequence[Any], path: Sequence[int]) -> list[Any]:
        """The layer's states behind the rows on `path`; cache: those before the pass."""
        kept = [*range(self.before), *(self.before + row for row in path)][-self.before :]
        return [_rows(self.window, kept), self.behind(cache[1], path)]


def updated_again(
    update: Update, rows: Sequence[mx.array], gates: Sequence[mx.array]
) -> Callable[[Any, Sequence[int]], Any]:
    """See `Tape.behind`. rows: k, v, a and b; gates: what `update` is given behind the rows."""

    def behind(state: Any, path: Sequence[int]) -> Any:
        keys, *others = (_rows(x, path) for x in rows)
        return update(keys, keys, *others, *gates, settled(state), None)[1]  # there are no queries

    return behind


class DeltaKernel:
    """The kernel in the place of mlx-lm's update, where it was chosen."""

    def __init__(self, kernels: Kernels) -> None:
        self._plans = Plans(kernels)

    @property
    def runs(self) -> bool:
        return self._plans.kernels.active

    def __call__(
        self, update: Update, rows: Sequence[mx.array], state: Any, parents: Sequence[int]
    ) -> tuple[mx.array, Behind, Callable[[], None]] | None:
        """y, the state behind all rows and what is to be done at the commit; None for mlx-lm's.

        rows: q, k, v, a and b, [1, R, ...] each, then decays and biases.
        """
        q, k, v, a, b, decays, biases = rows
        plans, names = self._plans, update.__globals__
        given: list[DeltaRows] = []

        def made() -> DeltaRows:
            return DeltaRows(q, k, v, names["compute_g"](decays, a, biases), mx.sigmoid(b))

        def settle() -> GatedDelta | None:
            given.append(made())
            start = mx.zeros((1, *v.shape[2:], k.shape[3]))
            call = given[0], start, None, range(-1, k.shape[1] - 1)
            chosen = plans.kernels.chosen(_beside(names), call)
            return None if chosen is None else GatedDelta(given[0])

        kernel = plans.find((k.shape, v.shape, v.dtype), settle)
        if kernel is None:
            return None
        taken = given[0] if given else made()
        earlier = state if isinstance(state, Behind) else None
        first = settled(state) if earlier is None or earlier.taped is None else earlier.state
        if first is None:
            first = mx.zeros((1, *v.shape[2:], k.shape[3]))
        y, begun, deltas = kernel(taken, first, earlier.taped if earlier else None, parents)
        behind = Behind(begun, Taped(k, taken.decays, deltas, range(k.shape[1])))
        return y, behind, lambda: None if earlier is None else earlier.found(begun)


def _beside(names: dict[str, Any]) -> Any:
    """The operation, raced with mlx-lm's own kernel over the rows of a chain."""
    stock = names["gated_delta_kernel" if mx.metal.is_available() else "gated_delta_ops"]
    return replace(
        GATED_DELTA,
        reference=lambda rows, state, *_: [stock(*rows, state)[0]],
        compared=lambda out, *_: out[:1],
    )


def _rows(x: mx.array, rows: Sequence[int]) -> mx.array:
    """Some of the rows of x [1, R, ...]; those that follow each other are not copied."""
    first, end = rows[0], rows[-1] + 1
    return x[:, first:end] if len(rows) == end - first else x[:, mx.array(list(rows))]
