"""What a pass leaves of the rows of a gated delta net, so that its state can follow some of them.

The state after any path of rows is computed from the state before the pass and what the pass has
computed of each row: convolution, norms and gates are not computed again, and no module is called.
Where kernels run, nothing is computed at a commit: the next pass does it first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
from kernels_metal.factory import Step


class Behind(NamedTuple):
    """The state behind the rows on a tape's path, computed by the next pass or when somebody asks.

    Copies of a sequence share it, so a pass of one, which may fail, changes nothing in it.
    """

    state: mx.array  # before them
    tape: Tape


def settled(state: Any) -> Any:
    """An array, where there was one to be computed."""
    return replayed(*state) if isinstance(state, Behind) else state


class Rows(NamedTuple):
    """The rows of one layer in a pass.

    window: [B, before + R, C] what was convolved, of which the first came from earlier passes.
    state_behind: of the state before the pass, arrays' batch and places there, the state behind
    them. leads: where B paths of a tree are side by side, one of them that leads to each row.
    begun: the state before the pass, where that was to be computed by it.
    """

    window: mx.array
    before: int
    state_behind: Callable[[Any, int, Sequence[int]], Any]
    leads: Sequence[int] | None = None
    begun: mx.array | None = None

    def after(self, cache: Sequence[Any], path: Sequence[int]) -> list[Any]:
        """The layer's states behind the rows on `path`; cache: those before the pass."""
        batch, places = 0, path
        if self.leads is not None:
            batch, places = self.leads[path[-1]], range(len(path))
        kept = [*range(self.before), *(self.before + place for place in places)][-self.before :]
        return [part(self.window, batch, kept), self.state_behind(cache[1], batch, places)]


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

    def net(self, mixer: Any, products: Any, key: Key) -> Net | None:
        """How a net computes passes of one key, None where that is not settled."""
        run: DeltaNet | None = self._plans.made((key, mixer.conv1d["weight"].shape))
        if run is None or mixer.sharding_group is not None:
            return None
        weights, rates, biases, _ = weights_of(mixer)
        return Net(run, Step(run.key, [weights, rates, biases], run.run), mixer, products)

    def __call__(
        self, net: Any, x: mx.array, cache: Sequence[Any], parents: Sequence[int]
    ) -> tuple[mx.array, list[mx.array]] | None:
        """What a net returns for x [1, R, d], and what it leaves; see `RecurrentLayer.follow`.

        cache: its states before them. parents: of the rows, -1 for what was before.
        """
        weights = weights_of(net)
        convolved, state = cache
        if state is None:
            (channels, taps, _), heads = weights.weight.shape, weights.rates.size
            convolved = mx.zeros((1, taps - 1, channels), weights.weight.dtype)
            state = mx.zeros((1, heads, weights.dim, weights.dim))
        before = Before(convolved, *(state if isinstance(state, Behind) else (state,)))

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
        qkv, a, b, z = products()
        y, window, *left = run.run(qkv, a, b, run.given(before, parents), weights[:3])
        out = net.out_proj(net.norm(y, z.reshape(y.shape)).reshape(*x.shape[:2], -1))
        return out, [x, window[:, x.shape[1] :], window, *left]


class Net(NamedTuple):
    """A gated delta net in passes of one key, of which only arrays are to be found."""

    run: DeltaNet
    rule: Step
    mixer: Any
    products: Any  # of its model's mixers


def weights_of(net: Any) -> Mixer:
    """Of a net as Qwen3.5's."""
    return Mixer(net.conv1d["weight"], net["A_log"], net["dt_bias"], net.num_k_heads)


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
