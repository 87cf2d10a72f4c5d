"""Steps of mlx-lm's modules that are one launch each, where kernels run and that pays.

Queries, keys and values are products of one input, gate and up are two more, what a gated delta net
takes from its input four. mlx-lm calls such modules one after the other with the same array, so the
first call can compute all and the others take their part: no model's code is touched. The weights
of a group are put side by side when a kernel could run for the first time; the modules then hold
views of them. Attention like Qwen3's normalises and turns queries and keys in one launch, and
SwiGLU is part of gate's and up's product.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.verifier.routing import Kernels, Key, MadeOf, Plans
from kernels_metal.factory import Step
from kernels_metal.norm_rope import MAX_ROWS as MAX_TURNED
from kernels_metal.norm_rope import NORM_ROPE, HeadNorm, turning
from kernels_metal.shared_input import SHARED_INPUT, bounds, side_by_side
from kernels_metal.verify_qmm import (
    MAX_ROWS,
    UNPACKED,
    VERIFY_QMM,
    Matrix,
    Packing,
    Product,
    stock,
)

Call = Callable[..., mx.array]
GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),  # of gated delta nets
    ("in_proj_qkvz", "in_proj_ba"),
)
GATED_MLPS = "qwen3.MLP", "glm4_moe.MLP"  # down(swiglu(gate(x), up(x))), at once or by a name
GATED_ATTENTION = "qwen3_next.Qwen3NextAttention"  # which has a gate behind its queries
_ARRAYS = ("weight", "scales", "biases")
MADE = "_made_for_it"  # in the class of a hooked module


def arrays_of(module: Any) -> Matrix:
    """Of one matrix, packed or not."""
    return module["weight"], module.get("scales"), module.get("biases")


def packing_of(module: Any) -> Packing:
    """How its weights are stored. Raises ValueError for what the kernels do not know."""
    if module.get("scales") is None:
        return UNPACKED
    return Packing(module.bits, module.group_size, mode=module.mode)


def settled(kernels: Kernels, calls: Sequence[tuple[Any, ...]]) -> Step | None:
    """The product of the first call, None for stock MLX; the same calls in other layers follow."""
    choice = kernels.chosen(VERIFY_QMM, calls[0], calls[1:])
    if choice is None:
        return None
    x, *matrix = calls[0]
    return Product(*matrix).settled(x, choice.way or None)  # type: ignore[arg-type]


def is_normed_attention(module: Any) -> bool:
    """Whether it normalises queries and keys by head and turns them as in Qwen3 or Qwen3-Next."""
    if not written_as(type(module).__call__, "qwen3.Attention", GATED_ATTENTION):
        return False
    rope = module.rope
    plain = nn.RoPE in type(rope).__mro__[:2] and not rope.traditional  # a hooked one is a subclass
    norms = type(module.q_norm) is type(module.k_norm) is nn.RMSNorm
    norms = norms and module.q_norm.eps == module.k_norm.eps
    return norms and plain and rope.dims <= module.q_norm["weight"].size


def made_for(module: nn.Module) -> Any:
    """What its hook asks for steps; None without one, and where others have hooked it since."""
    return vars(type(module)).get(MADE)


def written_as(call: Any, *known: str) -> bool:
    """Whether a module's call is, word for word, that of one of these of mlx-lm, family.Class."""
    words = _words(call)
    if words is None:
        return False
    from mlx_lm import models  # not before a model is loaded: it takes seconds

    pairs = (name.split(".") for name in known)
    modules = ((import_module(f"{models.__name__}.{family}"), kind) for family, kind in pairs)
    return any(words == _words(getattr(module, kind).__call__) for module, kind in modules)


def _words(call: Any) -> tuple[Any, ...] | None:
    """A function's code, and what names mean where it is written; None for what is no function."""
    code = getattr(call, "__code__", None)
    if code is None or call.__module__ not in sys.modules:
        return None
    meant = vars(sys.modules[call.__module__])
    names = code.co_names, code.co_varnames, code.co_freevars
    return code.co_code, code.co_consts, *names, [id(meant.get(name)) for name in code.co_names]


def source_of(call: Any) -> str:
    """Where a module's call is written, as family.Class."""
    kind = getattr(call, "__qualname__", "").removesuffix(".__call__")
    return f"{getattr(call, '__module__', '').rpartition('.')[2]}.{kind}"


def gated_mlp(stock: Call, group: Group) -> Call:
    """The call of an MLP whose gate and up are `group`."""

    def mlp(self: Any, x: mx.array) -> mx.array:
        inner = group.gated(x)
        return stock(self, x) if inner is None else self.down_proj(inner)

    return mlp


def normed_attention(stock: Call, plans: Plans, group: Group | None) -> Call:
    """Qwen3's attention with norms and rope in one launch; group: of its queries, keys, values.

    Qwen3-Next's has a gate behind each head of its queries.
    """
    gated = written_as(stock, GATED_ATTENTION)

    def attend(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        rows = x.shape[1]
        if x.shape[0] > 1 or rows > MAX_TURNED or not getattr(cache, "attends", False):
            return stock(self, x, mask, cache)

        made: list[Sequence[mx.array]] = []

        def products() -> Sequence[mx.array]:
            found = None if group is None else group.products(x)
            return found or (self.q_proj(x), self.k_proj(x), self.v_proj(x))

        def settle() -> Step | None:
            made.append(products())
            (queries, keys, _), how = made[0], _norm(self, gated)
            given = queries, keys, cache.places[:rows], how
            chosen = plans.kernels.chosen(NORM_ROPE, given)
            return None if chosen is None else turning(queries, keys, how)

        turn = plans.find((x.shape[:-1], x.dtype), settle)
        if turn is None:
            return stock(self, x, mask, cache)
        given, keys, values = made[0] if made else products()
        queries, keys = turn(given, keys, cache.places)
        values = values.reshape(1, rows, keys.shape[1], -1).transpose(0, 2, 1, 3)
        found = cache.extend_and_attend(queries, keys, values, self.scale, mask)
        found = found.transpose(0, 2, 1, 3).reshape(1, rows, -1)
        if gated:
            gate = given.reshape(1, rows, queries.shape[1], 2, -1)[..., 1, :]
            found = found * mx.sigmoid(gate.reshape(1, rows, -1))
        return self.o_proj(found)  # type: ignore[no-any-return]

    return attend


def _norm(module: Any, gated: bool) -> HeadNorm:
    rope, norm = module.rope, module.q_norm
    steps = mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims
    periods = rope.base**steps / rope.scale
    return HeadNorm(norm["weight"], module.k_norm["weight"], periods, norm.eps, gated)


def groups_in(module: nn.Module) -> Iterator[list[Any]]:
    """The members of each group of a module whose weights can stand side by side."""
    for names in GROUPS:
        members: list[Any] = [module.get(name) for name in names]
        if all(isinstance(m, nn.QuantizedLinear) for m in members):
            forms = {
                (m.mode, m.bits, m.group_size, m["weight"].shape[1], m["scales"].dtype, "bias" in m)
                for m in members
            }
            if len(forms) == 1:
                yield members


class Group:
    """Modules that are called with one input, one after the other, in any order."""

    def __init__(
        self, owner: nn.Module, members: Sequence[Any], kernels: Kernels, alike: list[Group]
    ) -> None:
        self._owner, self.members, self._kernels = owner, members, kernels
        names = {id(module): name for name, module in owner.items()}
        self._names = [names[id(member)] for member in members]
        self._alike = alike  # the groups of this shape in the model, this one among them
        self.packing = packing_of(members[0])
        self._whole: Any = None  # weights, scales and biases of all members
        self._views: list[Any] = []  # of each, in it
        self._made_of: MadeOf | None = None
        self._plans = Plans(kernels)
        self._x: mx.array | None = None
        self._parts: dict[int, mx.array] = {}
        self._broken = False
        alike.append(self)

    def part(self, i: int, x: mx.array) -> mx.array | None:
        """The product of member i, None where it is to be computed by itself."""
        if x is not self._x:
            # Where somebody calls only some of them, each goes alone from then on
            self._broken = self._broken or bool(self._parts)
            products = None if self._broken else self.products(x)
            self._x, self._parts = x, dict(enumerate(products or ()))
        found = self._parts.pop(i, None)
        if not self._parts:
            self._x = None  # nothing of a pass is kept behind it
        return found

    def products(self, x: mx.array) -> list[mx.array] | None:
        """Of all members, by one, None where each is to be computed by itself."""
        multiply = self._find(x, self._together)
        return None if multiply is None else multiply(x)

    def gated(self, x: mx.array) -> mx.array | None:
        """Of gate and up: silu(gate x) * up x in one product, None where it is to be by parts."""
        multiply = self._find(x, self._gate)
        return None if multiply is None else multiply(x)

    def made(self, name: str, key: Key) -> Any:
        """The step of this name for an x of these rows, None where there is none yet."""
        return self._plans.made((name, key)) if self._is_whole and self._joined else None

    @property
    def _is_whole(self) -> bool:
        """Whether no other module has taken a member's place."""
        found = map(self._owner.get, self._names)
        return all(ours is theirs for ours, theirs in zip(self.members, found, strict=True))

    def _find(self, x: mx.array, settle: Callable[[mx.array], Any]) -> Any:
        if self._kernels.running() is None or x.size > MAX_ROWS * x.shape[-1] or not self._is_whole:
            return None
        if not self._joined:
            self._plans = Plans(self._kernels)
        key = settle.__name__, (x.shape[:-1], x.dtype)
        return self._plans.find(key, partial(settle, x))

    def _together(self, x: mx.array) -> Step | None:
        self._join_alike()
        calls = [group.call(x) for group in self._alike]
        if self._kernels.chosen(SHARED_INPUT, self.call(x), calls) is None:
            return None
        packing, ends = self.packing, bounds(self._views)
        whole = [array for array in self._whole if array is not None]

        def by_mlx(x: mx.array, arrays: Sequence[mx.array]) -> mx.array:
            scales, biases = (*arrays[1:], None)[:2]
            return stock(x, (arrays[0], scales, biases), packing)

        key, arrays, multiply = self._settled(x, packing) or Step(packing, whole, by_mlx)
        bias = [member["bias"] for member in self.members if "bias" in member]
        more = [mx.concatenate(bias)] if bias else []

        def products(x: mx.array, arrays: Sequence[mx.array]) -> Any:
            y = multiply(x, arrays[: len(arrays) - len(more)])
            return mx.split(y + arrays[-1] if more else y, ends, axis=-1)

        return Step((key, *ends, bool(bias)), [*arrays, *more], products)

    def _gate(self, x: mx.array) -> Step | None:
        if "bias" in self.members[0]:
            return None
        self._join_alike()
        return self._settled(x, replace(self.packing, gated=True))

    def _settled(self, x: mx.array, packing: Packing) -> Step | None:
        calls = [(x, *group.call(x)[1], packing) for group in (self, *self._alike)]
        return settled(self._kernels, calls)

    @property
    def _joined(self) -> bool:
        """Whether the members hold views of what is side by side, and nobody changed them since."""
        return self._made_of is not None and self._made_of.holds()

    def call(self, x: mx.array) -> tuple[Any, ...]:
        """The arguments of SHARED_INPUT."""
        return x, self._whole, [*map(arrays_of, self.members)], self.packing

    def _join_alike(self) -> None:
        apart = [group for group in self._alike if not group._joined]
        for group in apart:
            group._join()
        if apart:
            mx.clear_cache()  # of the weights' old places, which no new array would fit

    def _join(self) -> None:
        self._whole, self._views = side_by_side([*map(arrays_of, self.members)])
        for member, view in zip(self.members, self._views, strict=True):
            member.update({n: a for n, a in zip(_ARRAYS, view, strict=True) if a is not None})
        self._made_of = MadeOf(self.members)
