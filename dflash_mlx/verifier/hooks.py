"""Calls of single modules routed elsewhere: parameters and other instances stay as they were.

A hook gives one module instance a class of its own, which inherits all but the methods it replaces.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.system import cpu_math
from dflash_mlx.verifier.calls import (
    gated_mlp,
    is_gated_mlp,
    is_normed_attention,
    normed_attention,
    scaled_dot_product_attention,
    stock_attention,
)
from dflash_mlx.verifier.fusion import Group, groups_in
from dflash_mlx.verifier.routing import Kernels
from kernels_metal.cascade_attention import CASCADE_ATTENTION
from kernels_metal.verify_qmm import MAX_ROWS, VERIFY_QMM, Packing, Product

_ROUTE = "_routed_through"  # in the class of a hooked module: what its calls go through
_ATTENTION = "scaled_dot_product_attention"  # mlx-lm's; families import it by this name
_SWIGLU = "swiglu"  # likewise
# MLX's own modules, and the method in which each multiplies by its quantised weights
_PRODUCTS: dict[type, str] = {nn.QuantizedLinear: "__call__", nn.QuantizedEmbedding: "as_linear"}


def override(module: nn.Module, call: Callable[..., Any]) -> None:
    """Route calls of this one module through `call(module, original, *args, **kwargs)`.

    Where they go through the same `call` already, they stay as they are.
    """
    original = type(module)
    if any(call in vars(kind).get(_ROUTE, ()) for kind in original.__mro__):
        return

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, original.__call__, *args, **kwargs)

    _replace(module, "__call__", __call__)
    setattr(type(module), _ROUTE, (call,))


def rotate_by_row(rope: nn.Module) -> None:
    """Let a rope module take an `offset` that holds a position for each row of x [1, H, N, D].

    `mx.fast.rope` takes one offset per batch row, so the rows become the batch. A batch of
    sequences, as mlx-lm's own generators run, has one each. Every layer calls it twice a pass, so
    nothing stands between it and the rotation.
    """
    original = type(rope)
    if rotate_by_row in vars(original).get(_ROUTE, ()):
        return
    forward = original.__call__

    def __call__(self: Any, x: mx.array, offset: Any = 0, **kwargs: Any) -> mx.array:
        if not isinstance(offset, mx.array) or offset.size == 1 or x.shape[0] > 1:
            return forward(self, x, offset, **kwargs)  # type: ignore[no-any-return]
        turned = forward(self, x.swapaxes(0, 2), offset, **kwargs)
        return turned.swapaxes(0, 2)  # type: ignore[no-any-return]

    _replace(rope, "__call__", __call__)
    setattr(type(rope), _ROUTE, (rotate_by_row,))


@contextmanager
def rows_alone(heads: Sequence[tuple[nn.Module, str]], rows: slice | mx.array) -> Iterator[None]:
    """Within it these modules' methods are given only these rows of their inputs [..., N, d]."""
    originals = [(module, type(module)) for module, _ in heads]

    def on_rows(method: Callable[..., mx.array]) -> Callable[..., mx.array]:
        return lambda module, x: method(module, x[..., rows, :])

    for module, name in heads:
        _replace(module, name, on_rows(getattr(type(module), name)))
    try:
        yield
    finally:
        for module, original in originals:
            module.__class__ = original


def route_attention(model: Any) -> bool:
    """Let our caches compute the attention of all layers; whether that is all there is of it."""
    for layer in model.layers:
        attending = [m for m in layer.modules() if m is not layer and _attends(m)]
        if not attending and _keeps_keys(layer):
            return False
        for module in attending:
            if type(module).__call__.__globals__[_ATTENTION] is not scaled_dot_product_attention:
                _replace(
                    module,
                    "__call__",
                    _rebound(type(module).__call__, {_ATTENTION: scaled_dot_product_attention}),
                )
    return True


class KernelHooks:
    """Attention and quantised layers of a model that ask `kernels` first, until removed."""

    def __init__(self, model: Any, kernels: Kernels) -> None:
        self._originals: list[tuple[Any, type]] = []
        self._alike: dict[tuple[Any, ...], list[Any]] = {}
        gated = [module for module in model.modules() if is_gated_mlp(module)]
        normed = self._route(model, kernels)
        groups = list(groups_in(model))
        for module in model.modules():
            if cpu_math.applies() and _SWIGLU in _names_in(module):
                stock = type(module).__call__.__globals__[_SWIGLU]
                names = {_SWIGLU: partial(_swiglu, stock)}
                self._replace(module, "__call__", _rebound(type(module).__call__, names))
            if type(module) in _PRODUCTS:
                self._product(module, _PRODUCTS[type(module)], kernels)
        alike: dict[tuple[Any, ...], list[Group]] = {}
        made = {id(module): self._group(members, kernels, alike) for module, members in groups}
        for module in gated:
            if (group := made.get(id(module))) is not None:
                self._replace(module, "__call__", gated_mlp(type(module).__call__, group))
        for module in normed:
            call = normed_attention(type(module).__call__, kernels, made.get(id(module)))
            self._replace(module, "__call__", call)

    def _route(self, model: Any, kernels: Kernels) -> list[Any]:
        """Let our caches compute attention; the modules that have a call of their own for it."""
        normed = []
        for layer in model.layers:
            attending = [m for m in layer.modules() if m is not layer and _attends(m)]
            normed += [module for module in attending if is_normed_attention(module)]
            for module in attending:
                names = {_ATTENTION: scaled_dot_product_attention}
                self._replace(module, "__call__", _rebound(type(module).__call__, names))
            if not attending and _keeps_keys(layer):
                family = type(layer).__module__.rpartition(".")[2]
                reason = f"{family} computes the attention of some layers itself"
                kernels.note(f"{CASCADE_ATTENTION.name} in the target", reason)
        return normed

    def remove(self) -> None:
        """Give every module its own class back."""
        for module, original in reversed(self._originals):
            module.__class__ = original
        self._originals.clear()

    def _replace(self, module: Any, name: str, method: Callable[..., Any]) -> None:
        self._originals.append((module, type(module)))
        _replace(module, name, method)

    def _product(self, module: Any, name: str, kernels: Kernels) -> None:
        try:
            if module.mode != "affine":
                raise ValueError(f"mode is {module.mode}, but must be affine")
            packing = Packing(module.bits, module.group_size)
        except ValueError as error:
            kernels.note(f"{VERIFY_QMM.name} of {module.bits} bits", str(error))
            return
        stock = getattr(type(module), name)
        alike = self._alike.setdefault((module["weight"].shape, packing), [])
        alike.append(module)
        self._replace(module, name, _few_rows(stock, kernels, packing, alike))

    def _group(
        self,
        members: Sequence[Any],
        kernels: Kernels,
        alike: dict[tuple[Any, ...], list[Group]],
    ) -> Group | None:
        try:
            packing = Packing(members[0].bits, members[0].group_size)
        except ValueError:  # which the products have noted
            return None

        hook = partial(self._product, name="__call__", kernels=kernels)
        shapes = tuple(member["weight"].shape for member in members)
        group = Group(members, kernels, hook, alike.setdefault((shapes, packing), []))
        for i, member in enumerate(members):
            stock = type(member).__call__
            self._replace(member, "__call__", _part_of(group, i, stock))
        return group


def _part_of(group: Group, i: int, stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def product(self: Any, x: mx.array) -> mx.array:
        part = group.part(i, x)
        return stock(self, x) if part is None else part

    return product


def subclass(original: type, name: str, method: Callable[..., Any]) -> type:
    """A class that differs in one method."""
    own = {"__module__": original.__module__, name: method}
    return type(original.__name__, (original,), own)


def _replace(module: Any, name: str, method: Callable[..., Any]) -> None:
    module.__class__ = subclass(type(module), name, method)


def _attends(module: Any) -> bool:
    """Whether a module's own call is Python that calls mlx-lm's attention by its usual name."""
    if _ATTENTION not in _names_in(module):
        return False
    return type(module).__call__.__globals__.get(_ATTENTION) in (
        stock_attention(),
        scaled_dot_product_attention,
    )


def _keeps_keys(layer: nn.Module) -> bool:
    """Whether any module of a layer stores keys and values."""
    return any("update_and_fetch" in _names_in(module) for module in layer.modules())


def _names_in(module: Any) -> tuple[str, ...]:
    """The names that a module's own call uses, if that is Python."""
    call = type(module).__call__
    return call.__code__.co_names if inspect.isfunction(call) else ()


def _rebound(call: Any, meanings: dict[str, Any]) -> FunctionType:
    """The same code, in which these names mean something else."""
    names = {**call.__globals__, **meanings}
    copy = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    copy.__kwdefaults__ = call.__kwdefaults__
    return copy


def _swiglu(stock: Callable[..., mx.array], gate: mx.array, x: mx.array) -> mx.array:
    return cpu_math.swiglu(gate, x) if cpu_math.pays(gate.size) else stock(gate, x)


def _few_rows(
    stock: Callable[..., mx.array], kernels: Kernels, packing: Packing, alike: list[Any]
) -> Callable[..., mx.array]:
    """The product of one module: what is chosen for a shape is kept with the weights it is for.

    alike: the modules of this shape, itself among them.
    """
    known: object = None
    scales: mx.array | None = None  # whoever changes weights or their dtype changes these
    chosen: dict[tuple[Any, ...], Callable[[mx.array], mx.array] | None] = {}

    def product(self: Any, x: mx.array) -> mx.array:
        nonlocal known, scales
        running = kernels.running()
        if running is None:
            return stock(self, x)
        if running is not known or self["scales"] is not scales:
            known, scales = running, None  # nothing is held of weights that nothing was chosen for
            chosen.clear()
        key = x.shape, x.dtype
        try:
            multiply = chosen[key]
        except KeyError:
            if x.size > MAX_ROWS * x.shape[-1]:
                return stock(self, x)
            scales = self["scales"]
            calls = [(x, *_arrays(module), packing) for module in (self, *alike)]
            multiply = chosen[key] = _product_of(self, calls, kernels)
        return stock(self, x) if multiply is None else multiply(x)

    return product


def _product_of(
    module: Any, calls: Sequence[tuple[Any, ...]], kernels: Kernels
) -> Callable[[mx.array], mx.array] | None:
    """The chosen kernel with this module's weights, None for stock MLX.

    calls: the arguments of this module, then those of its like in other layers.
    """
    choice = kernels.chosen(VERIFY_QMM, calls[0], calls[1:])
    if choice is None:
        return None
    x, *arrays = calls[0]
    multiply = Product(*arrays).settled(x, choice.way or None)  # type: ignore[arg-type]  # its own
    if "bias" not in module:
        return multiply
    return lambda x: multiply(x) + module["bias"]


def _arrays(module: Any) -> tuple[mx.array, ...]:
    return module["weight"], module["scales"], module["biases"]
