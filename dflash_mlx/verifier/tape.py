"""What a pass leaves of the rows of a gated delta net, so that its state can follow some of them.

The state after any path of rows is computed from the state before the pass and what the pass has
computed of each row: convolution, norms and gates are not computed again, and no module is called.
Where kernels run, nothing is computed at a commit: the next pass does it first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from dflash_mlx.verifier.routing import Kernels, Key, Plans
from kernels_metal.delta_net import (
    DELTA_NET,
    Before,
    DeltaNet,
    Mixer,
    Tape,
    delta_net_reference,
    replayed,
)


class Behind(NamedTuple):
    """The state behind the rows on a tape's path, computed by the next pass or when somebody asks.

    Copies of a sequence share it, so a pass of one, which may fail, changes nothing in it.
    """

    state: mx.array  # before them
    tape: Tape


def settled(state: Any) -> Any:
    """An array, where there was one to be computed."""
    return replayed(*state) if isinstance(state, Behind) else state


@dataclass(frozen=True)
class Rows:
    """The rows of one layer in a pass.

    window: [B, before + R, C] what was convolved, of which the first came from earlier passes.
    state_behind: of the state before the pass, arrays' batch and places there, the state behind
    them. leads: where B paths of a tree are side by side, one of them that leads to each row.
    """

    window: mx.array
    before: int
    state_behind: Callable[[Any, int, Sequence[int]], Any]
    leads: Sequence[int] | None = None
    begun = None

    def after(self, cache: Sequence[Any], path: Sequence[int]) -> list[Any]:
        """The layer's states behind the rows on `path`; cache: those before the pass."""
        batch, places = 0, path
        if self.leads is not None:
            batch, places = self.leads[path[-1]], range(len(path))
        convolved = _last(self.window, self.before, batch, places)
        return [convolved, self.state_behind(cache[1], batch, places)]


class Taped(NamedTuple):
    """As `Rows`, of a pass by the kernels."""

    convolved: mx.array  # the last rows of the window, with which the next ones are
    window: mx.array
    begun: mx.array  # the state before the pass, which that has computed
    tape: Tape

    def after(self, _: Sequence[Any], path: Sequence[int]) -> list[Any]:
        """As that of `Rows`."""
        behind = Behind(self.begun, self.tape._replace(path=path))
        return [_last(self.window, self.convolved.shape[1], 0, path), behind]


def _last(window: mx.array, before: int, batch: int, places: Sequence[int]) -> mx.array:
    """What the next rows are convolved with."""
    kept = [*range(before), *(before + place for place in places)][-before:]
    return part(window, batch, kept)


def part(x: mx.array, batch: int, rows: Sequence[int]) -> mx.array:
    """[1, n, ...] of x [B, R, ...]; rows that follow each other are not copied."""
    first, end = rows[0], rows[-1] + 1
    x = x[batch : batch + 1]
    return x[:, first:end] if len(rows) == end - first else x[:, mx.array(list(rows))]


class DeltaKernels:
    """The kernels in the place of all that Qwen3.5's nets do between products, if chosen."""

    def __init__(self, kernels: Kernels) -> None:
        self._plans = Plans(kernels)

    @property
    def run(self) -> bool:
        return self._plans.kernels.active

    def made(self, weights: Mixer, key: Key) -> DeltaNet | None:
        """For passes of one key, None where it is not settled."""
        return self._plans.made((key, weights.weight.shape))

    def __call__(
        self, net: Any, x: mx.array, cache: Sequence[Any], parents: Sequence[int]
    ) -> tuple[mx.array, Taped] | None:
        """What a net returns for x [1, R, d], and what it leaves.

        cache: its states before them. parents: of the rows, -1 for what was before.
        """
        weights = weights_of(net)
        before = before_of(cache, weights)

        def products() -> list[mx.array]:
            return [net[f"in_proj_{name}"](x) for name in ("qkv", "a", "b", "z")]

        def settle() -> DeltaNet | None:
            given = products()[:3]
            chain = given, weights, before._replace(tape=None), range(-1, x.shape[1] - 1)
            chosen = self._plans.kernels.chosen(raced(), chain)
            return None if chosen is None else DeltaNet(given, weights)

        run = self._plans.find(((x.shape[:-1], x.dtype), weights.weight.shape), settle)
        if run is None:
            return None
        *given, z = products()
        step = run(given, weights, before, parents)
        y = net.norm(step.y, z.reshape(step.y.shape))
        out = net.out_proj(y.reshape(*x.shape[:2], -1))
        return out, Taped(step.window[:, x.shape[1] :], *step[1:])


class Net(NamedTuple):
    """A gated delta net in passes of one key, of which only arrays are to be found.

    keep: what makes a call to be run again, of the net's input, what its rows leave, and the layer.
    """

    run: DeltaNet
    weights: Mixer
    keep: Callable[[mx.array, Taped, int], Any]

    def given(self, cache: Sequence[Any], parents: Sequence[int]) -> list[mx.array]:
        """The arrays of a pass behind `cache`."""
        return self.run.given(before_of(cache, self.weights), parents)


def weights_of(net: Any) -> Mixer:
    """Of a net as Qwen3.5's."""
    return Mixer(net["conv1d"]["weight"], net["A_log"], net["dt_bias"], net.num_k_heads)


def before_of(cache: Sequence[Any], weights: Mixer) -> Before:
    """What a net's states stand for; zeros where there are none yet."""
    convolved, state = cache
    if isinstance(state, Behind):
        return Before(convolved, *state)
    if state is None:
        (channels, taps, _), heads = weights.weight.shape, weights.rates.size
        convolved = mx.zeros((1, taps - 1, channels), weights.weight.dtype)
        state = mx.zeros((1, heads, weights.dim, weights.dim))
    return Before(convolved, state)


def raced() -> Any:
    """The operation, in races with mlx-lm's own kernel over the rows of a chain."""
    from mlx_lm.models import gated_delta

    metal = mx.metal.is_available()
    stock = gated_delta.gated_delta_kernel if metal else gated_delta.gated_delta_ops
    return replace(
        DELTA_NET,
        reference=partial(delta_net_reference, rule=stock),
        compared=lambda out, *_: [out.y, out.window],
    )
