"""What a layer computes between two attentions, as one graph that is traced once.

Building a graph costs the host more than MLX's own nodes do, so where kernels run, a pass's second
and later ones replay `mx.compile`d segments: output projection, both sums, the MLP, and the next
layer's norm, queries, keys and values. Weights and positions are inputs, so layers of one form
share a trace, and none outlives the weights it was made with. A module is traced by its own code,
routers and experts as any other, if that is MLX's or mlx-lm's and does nothing but compute; where
it is not, a segment ends and the module is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from dis import get_instructions
from functools import cache, partial
from inspect import isfunction
from itertools import accumulate, chain, pairwise, repeat
from types import CodeType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.verifier.fusion import MADE, Call, Group, made_for
from dflash_mlx.verifier.routing import Kernels, Key, MadeOf, Plans
from dflash_mlx.verifier.tape import Net
from kernels_metal.factory import Step, executor, metal
from kernels_metal.verify_qmm import MAX_ROWS

# Layers that are replayed: x + mixer(norm(x)), and the MLP behind it, as mlx-lm writes them
BLOCKS = "qwen3.TransformerBlock", "glm4_moe.DecoderLayer", "qwen3_5.DecoderLayer"
# What code is not traced with: it would be done once, or asks for values, which a trace has not
_ONCE = {"STORE_ATTR", "random", "item", "tolist", "eval", "async_eval"}
Replay = Callable[..., Any]  # a graph that is traced, bound to one layer's arrays


class Entry(NamedTuple):
    """How one layer computes passes of one key: `before`, its mixer, `after`."""

    before: Replay  # the norm; of a mixer that is settled what it multiplies its input by, too
    after: Replay
    then: Replay | None  # behind the MLP, where that is called as it is
    net: Net | None  # a gated delta net, with which `whole` stands for `before` and `after`
    whole: Replay | None


class Settled(NamedTuple):
    """How all layers compute passes of one key, None for a layer's own call."""

    entries: list[Entry | None]
    made_of: MadeOf


class Segments:
    """Those of one model, replayed in the passes of its target and nowhere else."""

    _caches: Iterable[Any] | None
    _key: Key | None
    _width: int
    _entries: list[Entry | None]
    at: Any  # positions of the rows
    # A layer's output, by which the next one knows it, what that begins with, and which it is
    held: tuple[mx.array | None, Sequence[mx.array]]
    following: int

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._plans = kernels, Plans(kernels)
        self.layers: list[Any] = []  # None for one that is not known
        self.end()

    def begin(self, caches: Iterable[Any]) -> None:
        """A pass begins, in which layers may be replayed."""
        if self.layers and self._kernels.running() is not None:
            self._caches = caches

    def settle(self) -> None:
        """Behind a pass, which has settled its plans with values at hand where it was the first."""
        if self._key is not None:
            self._plans.find(self._key, self._made)

    def end(self) -> None:
        """Nothing of a pass is kept behind it."""
        self._caches = self._key = self.at = None
        self._entries, self.held = [], (None, ())

    def entry(self, i: int, x: mx.array) -> tuple[Entry | None, Sequence[mx.array]]:
        """How layer i computes x, and what the layer before it has computed of that."""
        (out, given), self.held = self.held, (None, ())
        if out is not x or i != self.following:
            given = ()
            self._look(x)
        return self._entries[i] if self._entries else None, given

    def _look(self, x: mx.array) -> None:
        if self._caches is None or x.ndim != 3 or x.shape[0] > 1 or x.shape[1] > MAX_ROWS:
            self._key, self._entries = None, []
            return
        key, self._width = (x.shape[:-1], x.dtype), x.shape[-1]
        if key == self._key:
            return
        found: Settled | None = self._plans.made(key)
        if found is not None and not found.made_of.holds():
            self._plans, found = Plans(self._kernels), None
        places = (getattr(cache, "places", None) for cache in self._caches)
        self.at = found and next((at for at in places if at is not None), None)
        self._key, self._entries = key, found.entries if found and self.at is not None else []

    def _made(self) -> Settled:
        key: Any = self._key
        known = [each and _known(each, key, self._fits) for each in self.layers]
        pairs = pairwise([*known, None])
        entries = [here and self._entry(here, following) for here, following in pairs]
        return Settled(entries, MadeOf(chain(*(each.modules for each in known if each))))

    def _fits(self, mlp: Step) -> bool:
        """Whether a graph can be made of its code, which may ask for more than parts of it have."""

        def trial() -> bool:
            (rows, dtype), width = self._key, self._width  # type: ignore[misc]
            try:
                mx.compile(mlp.run)(mx.zeros((*rows, width), dtype), mlp.arrays)
            except Exception:
                return False
            return True

        return executor() is not metal or bool(self._plans.find(("fits", mlp.key), trial))

    def _entry(self, here: Known, following: Known | None) -> Entry:
        front: list[Step] = []
        # Hooks of others may change what is between the two, in its place
        if following and not (following.net or here.is_hooked or following.is_hooked):
            front = following.front
        before = self._traced(_front, here.front)
        after = self._traced(_after, here.back, here.norm, here.mlp, front if here.mlp else [])
        then = None if here.mlp else self._traced(_then, front)
        steps = here.front, here.steps, here.norm, here.mlp, front if here.mlp else []
        whole = self._traced(_whole, *steps) if here.net else None
        return Entry(before, after, then, here.net, whole)

    def _traced(self, run: Callable[..., Any], *steps: Sequence[Step]) -> Replay:
        """`run(*given, *steps)` as a graph that all of one form share."""
        ends = [*accumulate(map(len, steps), initial=0)]

        def grouped(bound: Sequence[Step], *given: mx.array) -> Any:
            return run(*given, *(bound[begin:end] for begin, end in pairwise(ends)))

        key, arrays, call = _joined(grouped, [*chain(*steps)], (run, *ends))

        def whole(arrays: Sequence[mx.array], *given: mx.array) -> Any:
            return call(*given, arrays)

        def trace() -> Replay:
            return mx.compile(whole) if executor() is metal else whole

        return partial(self._plans.find(key, trace) or whole, arrays)


def replayed(segments: Segments, i: int, stock: Call) -> Call:
    """The call of layer i: x + mixer(norm(x)), and the MLP behind it, by segments."""
    name = _mixer(segments.layers[i])

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        entry, given = segments.entry(i, x)
        if entry is None:
            return stock(self, x, mask, cache)
        at, net = segments.at, entry.net
        before = cache.given(net) if net and mask is None and hasattr(cache, "given") else None
        if net is not None and before is not None:
            left, out, *rest = entry.whole(before, x, at)  # type: ignore[misc]
            cache.follow(net.mixer, net.products, left)
        else:
            given = given or entry.before(x, at)
            if len(given) > 1:
                scale = self[name].scale
                given = cache.extend_and_attend(*given[:3], scale, mask), *given[3:]
            else:
                given = (self[name](given[0], mask, cache),)
            out, *rest = entry.after(given, x, at)
        if entry.then is not None:
            out, *rest = entry.then(self.mlp(rest[0]), out, at)
        segments.held, segments.following = (out, rest), i + 1
        return out  # type: ignore[no-any-return]

    return call


class Known(NamedTuple):
    """The steps of one layer for passes of one key, and the modules whose they are."""

    front: list[Step]  # the norm; products and rotation of attention
    back: list[Step]  # of attention: the output projection
    net: Net | None
    steps: list[Step]  # of a gated delta net: products, kernels, norm, output projection
    norm: list[Step]
    mlp: list[Step]  # dense or of experts
    modules: list[Any]
    is_hooked: bool  # by others


def _known(layer: Any, key: Key, fits: Callable[[Step], bool]) -> Known | None:
    """None where a norm is not known. Attention or an MLP that is not, has no steps."""
    norms = [layer["input_layernorm"], layer["post_attention_layernorm"]]
    before, behind, mlp = (_step(module, key) for module in (*norms, layer["mlp"]))
    if before is None or behind is None:
        return None
    mlp = mlp if mlp and fits(mlp) else None
    mixer = layer[_mixer(layer)]
    attention, (net, steps) = _attention(mixer, key), _net(mixer, key)
    modules = [layer, *norms]
    modules += mixer.modules() if attention or net else []
    modules += layer["mlp"].modules() if mlp else []
    front, back = [before, *attention[:2]], attention[2:]
    mlps, is_hooked = [mlp] if mlp else [], made_for(layer) is None
    return Known(front, back, net, steps, [behind], mlps, modules, is_hooked)


def _mixer(layer: Any) -> str:
    return "self_attn" if "self_attn" in layer else "linear_attn"


def _attention(module: Any, key: Key) -> list[Step]:
    """Products, rotation and output projection, where attention is hooked and these are settled."""
    made = made_for(module)
    plans, group = made if isinstance(made, tuple) else (None, None)
    if plans is None or group is None:
        return []
    found = [group.made("_together", key), plans.made(key), _step(module["o_proj"], key)]
    return found if all(found) else []


def _net(module: Any, key: Key) -> tuple[Net | None, list[Step]]:
    """A gated delta net and its steps, where it is hooked and these are settled."""
    made = made_for(module)
    net: Net | None = made(key) if isinstance(made, partial) else None
    group = made_for(module["in_proj_qkv"]) if net else None
    if net is None or not isinstance(group, Group):
        return None, []
    if any(made_for(member) is not group for member in group.members):
        return None, []
    behind = _step(module["norm"], key), _step(module["out_proj"], key)
    found: list[Any] = [group.made("_together", key), net.rule, *behind]
    return (net, found) if all(found) else (None, [])


def _step(module: Any, key: Key) -> Step | None:
    """What a module computes, by kernels where these are chosen; None where it may do more.

    An array, as of a module, gives itself.
    """
    if isinstance(module, mx.array):
        return Step(None, [module], _itself)
    if not isinstance(module, nn.Module):
        return None
    made = made_for(module)
    if isinstance(made, Group):
        found = [made.made("_gate", key), _step(module.get("down_proj"), key)]
        return _joined(lambda parts, x: parts[1](parts[0](x)), found, Group) if all(found) else None
    if not isinstance(made, Plans):
        return _own(module, type(module), key)
    step = made.made(key, otherwise=made)
    if step is None:
        kinds = type(module).__mro__
        return _own(module, next(kind for kind in kinds if MADE not in vars(kind)), key)
    return None if step is made or "bias" in module else step  # made: it had rows of another key


def _itself(arrays: Sequence[mx.array]) -> mx.array:
    return arrays[0]


def _own(module: Any, kind: Any, key: Key) -> Step | None:
    """What a module computes by the code of this kind, where that and all it calls is known."""
    code = getattr(kind.__call__, "__code__", None)
    if code is None or not all(map(_only_computes, *zip(*_called(kind), strict=True))):
        return None
    parts = [_step(value, key) for value in module.values()]
    if not all(parts):
        return None
    names, bare = [*module], copy(module)
    dict.clear(bare)  # a trace is to hold no weights

    def run(parts: Sequence[Step], *given: Any, **how: Any) -> Any:
        whole = copy(bare)
        values = (part() if part.run is _itself else part for part in parts)
        dict.update(whole, zip(names, values, strict=True))
        return kind.__call__(whole, *given, **how)

    settings = {k: v for k, v in vars(module).items() if k != "_no_grad"}
    about = [(k, v if isinstance(v, int | float | str) else id(v)) for k, v in settings.items()]
    return _joined(run, parts, (code, kind.__module__, kind.__name__, *names, *about))  # type: ignore[arg-type]


def _called(kind: type) -> Iterator[tuple[CodeType, str]]:
    """The code of a module's call and of methods that it names, its parents' too, and whose it is.

    A function that wraps another has that one's name, but is not by the same.
    """
    names = {"__call__", *kind.__call__.__code__.co_names}
    for base in kind.__mro__:
        for each in filter(isfunction, map(vars(base).get, names)):
            yield each.__code__, "" if hasattr(each, "__wrapped__") else each.__module__


@cache
def _only_computes(code: CodeType, module: str) -> bool:
    """Whether MLX or mlx-lm has written it, without what a trace would do once or cannot."""
    does = {*code.co_names, *(each.opname for each in get_instructions(code))}
    inside = (each for each in code.co_consts if isinstance(each, CodeType))
    is_known = module.split(".")[0] in ("mlx", "mlx_lm") and does.isdisjoint(_ONCE)
    return is_known and all(_only_computes(each, module) for each in inside)


def _joined(run: Callable[..., Any], steps: Sequence[Step], about: Hashable) -> Step:
    """`run(steps, *given)` as one step of all their arrays, which its graph does not hold."""
    runs = [each.run for each in steps]
    ends = [*accumulate((len(each.arrays) for each in steps), initial=0)]

    def whole(*given: Any, **how: Any) -> Any:
        own = (given[-1][begin:end] for begin, end in pairwise(ends))
        return run([*map(Step, repeat(None), own, runs)], *given[:-1], **how)

    arrays = [*chain(*(each.arrays for each in steps))]
    return Step((about, *(each.key for each in steps)), arrays, whole)


def _front(x: mx.array, at: mx.array, steps: Sequence[Step]) -> Sequence[mx.array]:
    """What a mixer is given: its input, or queries, keys and values for attention by a cache.

    Behind these comes the gate of attention that has one.
    """
    norm, *attention = steps
    if not attention:
        return [norm(x)]
    products, turn = attention
    given, keys, values = products(norm(x))
    queries, keys = turn(given, keys, at)
    values = values.reshape(*x.shape[:2], keys.shape[1], -1).transpose(0, 2, 1, 3)
    if given.size == queries.size:
        return [queries, keys, values]
    gate = given.reshape(*x.shape[:2], queries.shape[1], 2, -1)[..., 1, :]
    return [queries, keys, values, gate.reshape(*x.shape[:2], -1)]


def _whole(before: Any, x: mx.array, at: mx.array, front: Any, net: Any, *behind: Any) -> list[Any]:
    """A layer with a gated delta net: what that leaves for its cache, and as `_after`."""
    products, rule, norm, project = net
    normed = front[0](x)
    qkv, z, b, a = products(normed)
    y, window, *left = rule(qkv, a, b, before)
    out = project(norm(y, z.reshape(y.shape)).reshape(*x.shape[:2], -1))
    left = [normed, window[:, x.shape[1] :], window, *left]
    return [left, *_after([out], x, at, [], *behind)]


def _after(  # noqa: PLR0913  # the parts of a layer
    given: Sequence[mx.array],
    x: mx.array,
    at: mx.array,
    back: Sequence[Step],
    norm: Sequence[Step],
    mlp: Sequence[Step],
    front: Sequence[Step],
) -> list[mx.array]:
    """Behind attention or a mixer; up to the MLP, where that is not known."""
    mixed, *gates = given
    for project in back:
        mixed = mixed.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
        mixed = project(mixed * mx.sigmoid(gates[0]) if gates else mixed)
    x = x + mixed
    normed = norm[0](x)
    return _then(mlp[0](normed), x, at, front) if mlp else [x, normed]


def _then(given: mx.array, x: mx.array, at: mx.array, front: Sequence[Step]) -> list[mx.array]:
    """A layer's output, and what the next layer begins with."""
    x = x + given
    return [x, *(_front(x, at, front) if front else ())]
