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

from dflash_mlx.verifier.routing import Kernels, Plans
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

    def __call__(
        self, net: Any, x: mx.array, cache: Sequence[Any], parents: Sequence[int]
    ) -> tuple[mx.array, Rows, list[Any]] | None:
        """What a net returns for x [1, R, d], what it leaves, and its states behind all rows.

        cache: its states before them. parents: of the rows, -1 for what was before.
        """
        mixer = Mixer(net.conv1d["weight"], net["A_log"], net["dt_bias"], net.num_k_heads)
        convolved, state = cache
        if state is None:
            (channels, taps, _), heads = mixer.weight.shape, mixer.rates.size
            convolved = mx.zeros((1, taps - 1, channels), mixer.weight.dtype)
            state = mx.zeros((1, heads, mixer.dim, mixer.dim))
        before = Before(convolved, *(state if isinstance(state, Behind) else (state,)))

        def products() -> list[mx.array]:
            return [net[f"in_proj_{name}"](x) for name in ("qkv", "a", "b", "z")]

        def settle() -> DeltaNet | None:
            given = products()[:3]
            chain = given, mixer, before._replace(tape=None), range(-1, x.shape[1] - 1)
            chosen = self._plans.kernels.chosen(raced(), chain)
            return None if chosen is None else DeltaNet(given, mixer)

        run = self._plans.find((x.shape, x.dtype, mixer.weight.shape), settle)
        if run is None:
            return None
        *given, z = products()
        step = run(given, mixer, before, parents)
        y = net.norm(step.y, z.reshape(step.y.shape))
        out, kept = net.out_proj(y.reshape(*x.shape[:2], -1)), convolved.shape[1]

        def behind(_: Any, batch: int, path: Sequence[int]) -> Behind:
            return Behind(step.begun, step.tape._replace(path=path))

        rows = Rows(step.window, kept, behind, begun=step.begun)
        return out, rows, [step.window[:, -kept:], Behind(step.begun, step.tape)]


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
