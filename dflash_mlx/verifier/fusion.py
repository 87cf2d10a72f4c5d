"""Layers that multiply one input by several quantised matrices do it in one product, if that pays.

Queries, keys and values are such a group, gate and up another. mlx-lm calls their modules one
after the other with the same array, so the first call can compute all and the others take
their part: no model's code is touched. The weights of a group are put side by side when a
kernel could run for the first time; the modules then hold views of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.verifier.routing import Kernels
from kernels_metal.shared_input import SHARED_INPUT, bounds, side_by_side
from kernels_metal.verify_qmm import MAX_ROWS, VERIFY_QMM, Multiply, Packing, Product

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_ARRAYS = ("weight", "scales", "biases")


def groups_in(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Modules, and in them the members of a group whose weights can stand side by side."""
    for module in model.modules():
        for names in GROUPS:
            members = [module.get(name) for name in names]
            if all(type(member) is nn.QuantizedLinear for member in members) and _alike(members):
                yield module, members


def _alike(members: Sequence[Any]) -> bool:
    """Whether they are packed in the one way that kernels take, and for one input."""
    forms = {
        (m.mode, m.bits, m.group_size, m["weight"].shape[1], m["scales"].dtype, "bias" in m)
        for m in members
    }
    return len(forms) == 1 and members[0].mode == "affine"


class Group:
    """Modules that are called with one input, one after the other, in any order.

    hook: lets the module that multiplies by all their weights ask for kernels too. alike: the
    groups of this shape in the model, which this one joins.
    """

    def __init__(
        self,
        members: Sequence[Any],
        kernels: Kernels,
        hook: Callable[[Any], None],
        alike: list[Group],
    ) -> None:
        self.members, self._kernels, self._hook, self._alike = members, kernels, hook, alike
        self.packing = Packing(members[0].bits, members[0].group_size)
        self._whole: Any = None
        self._views: list[Any] = []
        self._bounds: list[int] = []
        self._known: object = None
        self._pays: dict[tuple[Any, ...], bool] = {}
        self._gates: dict[tuple[Any, ...], Multiply | None] = {}
        self._x: mx.array | None = None
        self._parts: dict[int, mx.array] = {}
        self._broken = False
        alike.append(self)

    def part(self, i: int, x: mx.array) -> mx.array | None:
        """The product of member i, None where it is to be computed by itself."""
        if x is self._x:
            found = self._parts.pop(i, None)
            if not self._parts:
                self._x = None  # nothing of a pass is kept behind it
            return found
        if self._broken:
            return None
        if self._parts:  # somebody calls only some of them
            self._broken, self._x, self._parts = True, None, {}
            return None
        products = self.products(x)
        if products is None:
            return None
        self._x, self._parts = x, dict(enumerate(products))
        return self._parts.pop(i)

    def products(self, x: mx.array) -> list[mx.array] | None:
        """Of all members, by one, None where each is to be computed by itself."""
        running = self._kernels.running()
        if running is None:
            return None
        self._follow(running)
        key = x.shape, x.dtype
        if key not in self._pays:
            if x.size > MAX_ROWS * x.shape[-1]:
                return None
            self._join_alike()
            calls = [group.call(x) for group in self._alike]
            self._pays[key] = self._kernels.chosen(SHARED_INPUT, self.call(x), calls) is not None
        if not self._pays[key]:
            return None
        return mx.split(self._whole(x), self._bounds, axis=-1)  # type: ignore[return-value]

    def gated(self, x: mx.array) -> mx.array | None:
        """Of gate and up: silu(gate x) * up x in one product, None where it is to be by parts."""
        running = self._kernels.running()
        if running is None or x.size > MAX_ROWS * x.shape[-1] or "bias" in self.members[0]:
            return None
        self._follow(running)
        key = x.shape, x.dtype
        if key not in self._gates:
            self._gates[key] = self._gate_for(x)
        multiply = self._gates[key]
        return None if multiply is None else multiply(x)

    def _gate_for(self, x: mx.array) -> Multiply | None:
        self._join_alike()
        packing = replace(self.packing, gated=True)
        calls = [(x, *group.call(x)[1], packing) for group in (self, *self._alike)]
        choice = self._kernels.chosen(VERIFY_QMM, calls[0], calls[1:])
        if choice is None:
            return None
        return Product(*calls[0][1:]).settled(x, choice.way or None)  # type: ignore[arg-type]

    def _follow(self, running: object) -> None:
        """Forget what was chosen, where other choices hold now or the weights were changed."""
        if running is not self._known or not self._joined:
            self._known = running
            self._pays.clear()
            self._gates.clear()

    @property
    def _joined(self) -> bool:
        """Whether the members hold views of what is side by side, and nobody changed them since."""
        for member, view in zip(self.members, self._views, strict=False):
            if member["scales"] is not view[1]:
                return False
        return bool(self._views)

    def call(self, x: mx.array) -> tuple[Any, ...]:
        """The arguments of SHARED_INPUT."""
        parts = [tuple(member[name] for name in _ARRAYS) for member in self.members]
        return x, tuple(self._whole[name] for name in _ARRAYS), parts, self.packing

    def _join_alike(self) -> None:
        """Put the weights of all groups of this shape side by side."""
        apart = [group for group in self._alike if not group._joined]
        for group in apart:
            group._join()
        if apart:
            mx.clear_cache()  # of the weights' old places, which no new array would fit

    def _join(self) -> None:
        """Put the weights side by side; the members keep views."""
        parts = [tuple(member[name] for name in _ARRAYS) for member in self.members]
        arrays, views = side_by_side(parts)
        for member, view in zip(self.members, views, strict=True):
            for name, array in zip(_ARRAYS, view, strict=True):
                member[name] = array
        whole: Any = nn.QuantizedLinear.__new__(nn.QuantizedLinear)  # one without random weights
        nn.Module.__init__(whole)
        first = self.members[0]
        whole.bits, whole.group_size, whole.mode = first.bits, first.group_size, first.mode
        for name, array in zip(_ARRAYS, arrays, strict=True):
            whole[name] = array
        if "bias" in first:
            whole["bias"] = mx.concatenate([member["bias"] for member in self.members])
        whole.freeze()
        self._hook(whole)
        self._whole, self._views, self._bounds = whole, views, bounds(views)
