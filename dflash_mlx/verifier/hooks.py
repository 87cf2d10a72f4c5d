"""Calls of single modules routed elsewhere: parameters and other instances stay as they were.

A hook gives one module instance a class of its own, which inherits all but the methods it replaces.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.system import cpu_math
from dflash_mlx.verifier.fusion import (
    GATED_MLPS,
    MADE,
    Group,
    arrays_of,
    gated_mlp,
    groups_in,
    is_normed_attention,
    normed_attention,
    packing_of,
    settled,
    written_as,
)
from dflash_mlx.verifier.routing import Kernels, Plans
from dflash_mlx.verifier.segments import BLOCKS, Segments, replayed
from kernels_metal.factory import Step
from kernels_metal.verify_qmm import MAX_ROWS, VERIFY_QMM, Packing

_MARK = "_changed_by"  # in the class of a hooked module: what changed its calls
_ATTENTION = "scaled_dot_product_attention"  # mlx-lm's; families import it by this name
# MLX's own modules, and the method in which each multiplies by its weights
_PACKED: dict[type, str] = {nn.QuantizedLinear: "__call__", nn.QuantizedEmbedding: "as_linear"}
_PRODUCTS: dict[type, str] = {**_PACKED, nn.Linear: "__call__", nn.Embedding: "as_linear"}


def once(module: Any, mark: Any, change: Callable[[Any], Callable[..., Any]]) -> None:
    """Change the calls of a module, unless something equal to `mark` has changed them before."""
    original = type(module)
    if not any(vars(kind).get(_MARK) == mark for kind in original.__mro__):
        replace(module, "__call__", change(original.__call__))
        setattr(type(module), _MARK, mark)


def through(call: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a module that is `call(module, forward, *args, **kwargs)`."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, forward, *args, **kwargs)

    return __call__


def replace(module: Any, name: str, method: Callable[..., Any], made: Any = None) -> None:
    """Give a module a class that differs in one method; made: see `made_for`."""
    original = type(module)
    own = {"__module__": original.__module__, name: method, MADE: made}
    module.__class__ = type(original.__name__, (original,), own)


class Hooks:
    """Methods of modules that are replaced until they are removed."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, type, type]] = []  # modules, their classes before and since

    def replace(self, module: Any, name: str, method: Callable[..., Any], made: Any = None) -> None:
        original = type(module)
        replace(module, name, method, made)
        self._replaced.append((module, original, type(module)))

    def remove(self) -> None:
        for module, original, own in reversed(self._replaced):
            if type(module) is own:  # otherwise others have hooked it since, and go through it
                module.__class__ = original
        self._replaced.clear()


def rotate_by_row(rope: nn.Module) -> None:
    """Let a rope module take an `offset` that holds a position for each row of x [1, H, N, D].

    `mx.fast.rope` takes one offset per batch row, so the rows become the batch. A batch of
    sequences, as mlx-lm's own generators run, has one each. Every layer calls it twice a pass, so
    nothing stands between it and the rotation.
    """

    def by_row(forward: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(self: Any, x: mx.array, offset: Any = 0, **kwargs: Any) -> mx.array:
            if not isinstance(offset, mx.array) or offset.size == 1 or x.shape[0] > 1:
                return forward(self, x, offset, **kwargs)  # type: ignore[no-any-return]
            turned = forward(self, x.swapaxes(0, 2), offset, **kwargs)
            return turned.swapaxes(0, 2)  # type: ignore[no-any-return]

        return __call__

    once(rope, rotate_by_row, by_row)


def route(model: nn.Module) -> None:
    """Let our caches compute attention; and NumPy SwiGLU, where MLX computes on the CPU."""
    from mlx_lm.models import activations, base

    ours: list[tuple[Any, Any]] = [(base.scaled_dot_product_attention, attention)]
    if other := sys.modules.get("mlx_vlm.models.base"):
        ours.append((other.scaled_dot_product_attention, attention))
    if cpu_math.applies():
        ours.append((activations.swiglu, partial(_swiglu, activations.swiglu)))
    for module in model.modules():
        call: Any = type(module).__call__
        names = call.__code__.co_names if inspect.isfunction(call) else ()
        known = {name: call.__globals__.get(name) for name in names}
        meanings = {n: new for n, value in known.items() for old, new in ours if value is old}
        if meanings:
            replace(module, "__call__", rebound(call, meanings))


def attention(  # noqa: PLR0913  # mlx-lm's signature
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's scaled_dot_product_attention, which one of our caches computes itself."""
    how: dict[str, Any] = {"scale": scale, "mask": mask, "sinks": sinks}
    if getattr(cache, "attends", False):
        return cache.attend(queries, keys, values, **how)  # type: ignore[no-any-return]
    from mlx_lm.models import base  # not before a model is loaded: it takes seconds

    return base.scaled_dot_product_attention(queries, keys, values, cache=cache, **how)


def attending_itself(model: Any) -> str:
    """The family of a layer that keeps keys and does not leave attention to its cache, or ""."""
    for layer in model.layers:
        calls = [type(module).__call__ for module in layer.modules()]
        codes = [call for call in calls if inspect.isfunction(call)]
        keeps = any("update_and_fetch" in call.__code__.co_names for call in codes)
        if keeps and not any(call.__globals__.get(_ATTENTION) is attention for call in codes):
            return type(layer).__module__.rpartition(".")[2]
    return ""


def rebound(call: Any, meanings: dict[str, Any]) -> FunctionType:
    """A copy of a function in which these global names mean something else.

    Families import these functions by name, so for one model alone there is no other place to
    change: assigning to their modules would change all models, and copying calls all families.
    """
    names = {**call.__globals__, **meanings}
    copy = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    copy.__kwdefaults__, copy.__qualname__ = call.__kwdefaults__, call.__qualname__
    return copy


def _swiglu(stock: Callable[..., mx.array], gate: mx.array, x: mx.array) -> mx.array:
    return cpu_math.swiglu(gate, x) if gate.size >= cpu_math.ENOUGH else stock(gate, x)


class KernelHooks(Hooks):
    """Steps and products of networks that ask `kernels` first, until removed."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        self.segments = Segments(kernels)  # of layers that are replayed

    def add_products(self, network: nn.Module) -> dict[Any, list[Any]]:
        """Hook what is not yet: packed matrices, and others where something can run kernels.

        Returns the modules that were hooked, alike ones together.
        """
        names = _PRODUCTS if self._kernels.may_run else _PACKED
        alike: dict[Any, list[Any]] = {}
        for module in network.modules():
            if name := names.get(type(module)):
                self._product(module, name, alike)
        return alike

    def add(self, model: nn.Module) -> None:
        """Hook a model of mlx-lm: its products, those of one input as one, and whole steps."""
        alike = self.add_products(model)
        for module in model.modules():
            group = None
            for members in groups_in(module):
                group = self._group(module, members, alike)
            stock = type(module).__call__
            if is_normed_attention(module):
                plans = Plans(self._kernels, module)
                made = plans, group
                self.replace(module, "__call__", normed_attention(stock, plans, group), made)
            elif group is not None and written_as(stock, *GATED_MLPS):
                self.replace(module, "__call__", gated_mlp(stock, group), group)
        for i, layer in enumerate(model.layers):
            stock = type(layer).__call__
            is_known = written_as(stock, *BLOCKS)
            self.segments.layers.append(layer if is_known else None)
            if is_known:
                self.replace(layer, "__call__", replayed(self.segments, i, stock), True)

    def _product(self, module: Any, name: str, alike: dict[Any, list[Any]]) -> None:
        try:
            packing = packing_of(module)
        except ValueError as error:
            self._kernels.note(f"{VERIFY_QMM.name} of {module.bits} bits", str(error))
            return
        weight = module["weight"]
        same = alike.setdefault((weight.shape, weight.dtype, packing), [])
        same.append(module)
        stock = getattr(type(module), name)
        plans = Plans(self._kernels, module)
        self.replace(module, name, _few_rows(stock, plans, packing, same), plans)

    def _group(
        self, owner: nn.Module, members: Sequence[Any], alike: dict[Any, list[Any]]
    ) -> Group | None:
        try:
            packing = packing_of(members[0])
        except ValueError:  # which the products have noted
            return None
        shapes = tuple(member["weight"].shape for member in members)
        group = Group(owner, members, self._kernels, alike.setdefault((shapes, packing), []))
        for i, member in enumerate(members):
            self.replace(member, "__call__", _part_of(group, i, type(member).__call__), group)
        return group


def _part_of(group: Group, i: int, stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def product(self: Any, x: mx.array) -> mx.array:
        part = group.part(i, x)
        return stock(self, x) if part is None else part

    return product


def _few_rows(
    stock: Callable[..., mx.array], plans: Plans, packing: Packing, alike: list[Any]
) -> Callable[..., mx.array]:
    """The product of one module. alike: the modules of this shape, itself among them."""
    kernels = plans.kernels

    def product(self: Any, x: mx.array) -> mx.array:
        if kernels.running() is None or x.size > MAX_ROWS * x.shape[-1]:
            return stock(self, x)

        def settle() -> Step | None:
            return settled(kernels, [(x, *arrays_of(m), packing) for m in (self, *alike)])

        multiply = plans.find((x.shape[:-1], x.dtype), settle)
        if multiply is None:
            return stock(self, x)
        y: mx.array = multiply(x)
        return y + self["bias"] if "bias" in self else y

    return product
