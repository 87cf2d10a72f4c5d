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
from kernels_metal.delta_inputs import DELTA_INPUTS, DeltaInputs, Mixer
from kernels_metal.gated_delta import GATED_DELTA, DeltaRows, GatedDelta, Taped, replayed
from kernels_metal.operation import Operation

Update = Callable[..., Any]  # mlx-lm's `gated_delta_update`
Parents = Sequence[int]


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


# y, the state behind all rows, and what is to be done when some of them stay
Step = tuple[mx.array, Behind, Callable[[], None]]


@dataclass(frozen=True)
class Tape:
    """The rows of one layer in a pass.

    window: [B, before + R, C] what was convolved, of which the first came from earlier passes.
    behind: of the state before the pass and a path, the state behind it. leads: B paths of a tree
    are side by side; one of them, for each row that it leads to. committed: to be called when some
    of the rows stay.
    """

    window: mx.array
    before: int
    behind: Callable[[Any, Sequence[int]], Any]
    leads: Sequence[int] | None = None
    committed: Callable[[], None] = lambda: None

    def after(self, cache: Sequence[Any], path: Sequence[int]) -> list[Any]:
        """The layer's states behind the rows on `path`; cache: those before the pass."""
        (window,), steps = along([self.window], path, self.leads)
        kept = [*range(self.before), *(self.before + row for row in steps)][-self.before :]
        return [_rows(window, kept), self.behind(cache[1], path)]


def updated_again(
    update: Update,
    rows: Sequence[mx.array],
    gates: Sequence[mx.array],
    leads: Sequence[int] | None,
) -> Callable[[Any, Sequence[int]], Any]:
    """See `Tape`. rows: k, v, a and b; gates: what `update` is given behind the rows."""

    def behind(state: Any, path: Sequence[int]) -> Any:
        on_path, steps = along(rows, path, leads)
        keys, *others = (_rows(x, steps) for x in on_path)
        return update(keys, keys, *others, *gates, settled(state), None)[1]  # there are no queries

    return behind


def along(
    arrays: Sequence[mx.array], path: Sequence[int], leads: Sequence[int] | None
) -> tuple[list[mx.array], Sequence[int]]:
    """Arrays [1, R, ...] in which the rows on `path` are, and where: nothing is copied."""
    if leads is None:
        return [*arrays], path
    lead = leads[path[-1]]
    return [x[lead : lead + 1] for x in arrays], range(len(path))


class DeltaKernels:
    """The kernels in the place of what mlx-lm does between products, where they were chosen.

    parents: of the rows of a pass, -1 for the state before it.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._plans = Plans(kernels)

    @property
    def run(self) -> bool:
        return self._plans.kernels.active

    def update(self, given: Sequence[mx.array], state: Any, parents: Parents) -> Step | None:
        """Of what mlx-lm's update is given: q, k, v, a and b, then rates and biases.

        None for mlx-lm's.
        """
        from mlx_lm.models.gated_delta import compute_g

        q, k, v, a, b, rates, biases = given

        def rows() -> DeltaRows:
            return DeltaRows(q, k, v, compute_g(rates, a, biases), mx.sigmoid(b))

        rule = self._plans.find((k.shape, v.shape, v.dtype), lambda: self._rule(rows()))
        return None if rule is None else _step(rule, rows(), state, parents)

    def whole(
        self, net: Any, x: mx.array, cache: Sequence[Any], parents: Parents
    ) -> tuple[mx.array, Tape, Behind] | None:
        """Of a net like Qwen3.5's, for x [1, R, d]: what it returns, its tape and its state."""
        mixer = Mixer(net.conv1d["weight"], net["A_log"], net["dt_bias"], net.num_k_heads)
        qkv, z, b, a = (net[f"in_proj_{name}"](x) for name in ("qkv", "z", "b", "a"))
        before = mixer.weight.shape[1] - 1
        first = mx.zeros((1, before, qkv.shape[2]), qkv.dtype) if cache[0] is None else cache[0]

        def settle() -> tuple[DeltaInputs, GatedDelta] | None:
            call = (qkv, a, b), first, mixer, range(-1, x.shape[1] - 1)
            if self._plans.kernels.chosen(DELTA_INPUTS, call) is None:
                return None
            inputs = DeltaInputs((qkv, a, b), mixer)
            rule = self._rule(inputs(*call)[0])
            return None if rule is None else (inputs, rule)

        steps = self._plans.find((x.shape, x.dtype, qkv.shape), settle)
        if steps is None:
            return None
        rows, window = steps[0]((qkv, a, b), first, mixer, parents)
        y, behind, committed = _step(steps[1], rows, cache[1], parents)
        out = net.out_proj(net.norm(y, z.reshape(y.shape)).reshape(*x.shape[:2], -1))
        return out, Tape(window, before, behind.along, committed=committed), behind

    def _rule(self, rows: DeltaRows) -> GatedDelta | None:
        call = rows, _nothing(rows), None, range(-1, rows.k.shape[1] - 1)
        chosen = self._plans.kernels.chosen(raced(), call)
        return None if chosen is None else GatedDelta(rows)


def _step(rule: GatedDelta, rows: DeltaRows, state: Any, parents: Parents) -> Step:
    taped = state.taped if isinstance(state, Behind) else None
    first = state if taped is None else state.state
    first = _nothing(rows) if first is None else settled(first)
    y, begun, deltas = rule(rows, first, taped, parents)
    behind = Behind(begun, Taped(rows.k, rows.decays, deltas, range(rows.k.shape[1])))
    return y, behind, lambda: state.found(begun) if isinstance(state, Behind) else None


def _nothing(rows: DeltaRows) -> mx.array:
    return mx.zeros((1, *rows.v.shape[2:], rows.k.shape[3]))


def raced() -> Operation:
    """The operation, in races with mlx-lm's own kernel over the rows of a chain."""
    from mlx_lm.models import gated_delta

    metal = mx.metal.is_available()
    stock = gated_delta.gated_delta_kernel if metal else gated_delta.gated_delta_ops

    def reference(rows: DeltaRows, state: mx.array, *_: Any) -> list[mx.array]:
        return [stock(*rows, state)[0]]

    return replace(GATED_DELTA, reference=reference, compared=lambda out, *_: out[:1])


def _rows(x: mx.array, rows: Sequence[int]) -> mx.array:
    """Some of the rows of x [1, R, ...]; those that follow each other are not copied."""
    first, end = rows[0], rows[-1] + 1
    return x[:, first:end] if len(rows) == end - first else x[:, mx.array(list(rows))]
