"""What a layer computes between two attentions, as one graph that is traced once.

Building a graph costs the host more than MLX's own nodes do, so where kernels run, a pass's second
and later ones replay `mx.compile`d segments: output projection, both sums, the MLP, and the next
layer's norm, queries, keys and values. Weights and positions are inputs, so layers of one form
share a trace, and none outlives the weights it was made with. A segment ends where a module is not
known; it is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from itertools import accumulate, pairwise
from operator import is_
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.verifier.fusion import Call, Group, source
from dflash_mlx.verifier.routing import Kernels, Plans
from kernels_metal.factory import Step, executor, metal
from kernels_metal.verify_qmm import MAX_ROWS

# What mlx-lm's sources call layers that are Qwen3's, written in two ways, and Qwen3.5's;
# `test_segments.py` compares these with it.
BLOCKS = frozenset(
    {
        "Klear.KlearDecoderLayer", "afm7.TransformerBlock", "bitnet.TransformerBlock",
        "deepseek.DeepseekDecoderLayer", "deepseek_v2.DeepseekV2DecoderLayer",
        "deepseek_v3.DeepseekV3DecoderLayer", "deepseek_v32.DeepseekV32DecoderLayer",
        "dots1.Dots1DecoderLayer", "ernie4_5.DecoderLayer", "ernie4_5_moe.Ernie4_5_DecoderLayer",
        "exaone_moe.DecoderLayer", "gemma.TransformerBlock", "glm.GLMBlock",
        "glm4_moe.DecoderLayer", "glm4_moe_lite.Glm4MoeLiteDecoderLayer",
        "helium.HeliumDecoderLayer", "hunyuan_v1_dense.TransformerBlock",
        "internlm3.TransformerBlock", "laguna.TransformerBlock", "llama.TransformerBlock",
        "mellum.MellumDecoderLayer", "mimo.TransformerBlock", "mimo_v2_flash.DecoderLayer",
        "nanbeige.TransformerBlock", "nemotron.TransformerBlock", "phi3.TransformerBlock",
        "phi3small.TransformerBlock", "qwen2.TransformerBlock", "qwen2_moe.Qwen2MoeDecoderLayer",
        "qwen3.TransformerBlock", "qwen3_moe.Qwen3MoeDecoderLayer", "seed_oss.TransformerBlock",
        "starcoder2.TransformerBlock", "youtu_llm.YoutuLLMDecoderLayer",
    }
)  # fmt: skip
HYBRID_BLOCKS = frozenset({"qwen3_5.DecoderLayer", "qwen3_next.Qwen3NextDecoderLayer"})
_PLAIN = (nn.RMSNorm, nn.LayerNorm, nn.Linear, nn.QuantizedLinear)
Key = tuple[int, mx.Dtype]  # rows and dtype of a pass
Known = dict[int, tuple[type, Any]]  # by the id of a module: its class, its plans or its group


class Seen(NamedTuple):
    """An array or module that is to be found where it was."""

    owner: dict[str, Any]
    name: str
    key: str  # within what has that name
    kept: Any


class Part(NamedTuple):
    """A step, and where its weights were found."""

    step: Step
    seen: list[Seen]
    values: int = 1  # that it gives


def joined(parts: Sequence[Part], run: Callable[..., Any], *about: Hashable) -> Part:
    """`run(*given, *steps)` as one part; about: all that `run` holds beside them."""
    steps = [part.step for part in parts]
    runs, key = [step.run for step in steps], (run.__name__, *about, *(s.key for s in steps))
    ends = [*accumulate((len(step.arrays) for step in steps), initial=0)]

    def whole(*given: Any) -> Any:
        arrays = [given[-1][begin:end] for begin, end in pairwise(ends)]
        bound = [Step(None, own, run) for own, run in zip(arrays, runs, strict=True)]
        return run(*given[:-1], *bound)

    arrays = [array for step in steps for array in step.arrays]
    return Part(Step(key, arrays, whole), [each for part in parts for each in part.seen])


class Parts:
    """The parts of layers for passes of one key, None for what is not known or not settled."""

    def __init__(self, known: Known, key: Key) -> None:
        self._all = known
        self._rows, self._dtype = key

    def _known(self, module: Any) -> Any:
        """What was made for a module, None where others have hooked it since."""
        kind, made = self._all.get(id(module), (None, None))
        return made if kind is type(module) else None

    def plain(self, owner: Any, name: str) -> Part | None:
        """A module of MLX's own, by its own code."""
        module = owner[name]
        kind = next((kind for kind in type(module).__mro__ if kind in _PLAIN), None)
        if kind is None or kind is not type(module) and self._known(module) is None:
            return None
        names = [name for name, value in module.items() if isinstance(value, mx.array)]
        bare = copy(module)
        dict.clear(bare)

        def run(*given: Any) -> Any:
            dict.update(bare, zip(names, given[-1], strict=True))
            try:
                return kind.__call__(bare, *given[:-1])
            finally:
                dict.clear(bare)

        about = sorted((k, v) for k, v in vars(module).items() if isinstance(v, int | float | str))
        step = Step((kind, *names, *about), [module[name] for name in names], run)
        first = "scales" if "scales" in names else "weight"
        watched = [key for key in names if key in (first, "bias")]
        return Part(step, [Seen(owner, name, key, module[key]) for key in watched])

    def product(self, owner: Any, name: str) -> Part | None:
        """A linear module, by a kernel where that is chosen."""
        module = owner[name]
        plans = self._known(module)
        if not isinstance(plans, Plans):
            return self.plain(owner, name)
        step = plans.made(((1, self._rows, _width(module)), self._dtype))
        if step is None or "bias" in module:
            return self.plain(owner, name)
        kept = zip(("weight", "scales"), step.arrays[:2], strict=True)
        return Part(step, [Seen(owner, name, key, array) for key, array in kept if key in module])

    def mlp(self, layer: Any) -> Part | None:
        """SwiGLU whose gate is part of a product."""
        module = layer["mlp"]
        group = self._known(module)
        gate = self._of_group(group, "_gate", module) if isinstance(group, Group) else None
        down = self.product(module, "down_proj") if gate else None
        if gate is None or down is None:
            return None
        down.seen.append(Seen(layer, "mlp", "down_proj", module["down_proj"]))

        def gated_mlp(x: mx.array, gate: Step, down: Step) -> Any:
            return down(gate(x))

        return joined([gate, down], gated_mlp)

    def _of_group(self, group: Group, name: str, owner: Any) -> Part | None:
        step = group.made(name, (1, self._rows, _width(group.members[0])), self._dtype)
        return step and Part(
            step, [Seen(owner, name, "scales", kept) for name, kept in group.scales]
        )

    def back(self, layer: Any, mixer: str) -> Part | None:
        """Of attention by its cache: the output projection."""
        rows, project = self._rows, self.product(layer[mixer], "o_proj")

        def back(found: mx.array, project: Step) -> Any:
            return project(found.transpose(0, 2, 1, 3).reshape(1, rows, -1))

        return project and joined([project], back, rows)

    def front(self, layer: Any, mixer: str) -> Part | None:
        """The norm; and queries, keys and values of attention whose rotation is settled."""
        norm = self.plain(layer, "input_layernorm")
        if norm is None:
            return None
        module, rows = layer[mixer], self._rows
        plans, group = self._known(module) or (None, None)
        turn: Step | None = plans and plans.made(rows)
        products = self._of_group(group, "_together", module) if turn and group else None
        if turn is None or products is None:
            return joined([norm], lambda x, at, norm: [norm(x)])
        heads = module.n_kv_heads
        names = ("q_norm", "k_norm")
        seen = [
            Seen(module, *each)
            for each in zip(names, ("weight",) * 2, turn.arrays[:2], strict=True)
        ]
        seen.append(Seen(layer, mixer, "o_proj", module["o_proj"]))

        def front(x: mx.array, at: mx.array, *steps: Step) -> list[mx.array]:
            norm, products, turn = steps
            queries, keys, values = products(norm(x))
            values = values.reshape(1, rows, heads, -1).transpose(0, 2, 1, 3)
            return [*turn(queries, keys, at), values]

        made = joined([norm, products, Part(turn, seen)], front, rows, heads)
        return made._replace(values=3)


def _width(linear: Any) -> int:
    """Of what it multiplies."""
    width: int = linear["weight"].shape[1]
    return width * 32 // linear.bits if "scales" in linear else width


Segment = tuple[Callable[..., Any], Sequence[mx.array]]  # what `Step.run` became, and its arrays


class Entry(NamedTuple):
    """How one layer computes a pass: see `replayed`."""

    before: Segment
    after: Segment
    then: Segment | None  # behind the MLP, where that is called as it is
    attends: bool  # by its cache; otherwise the mixer is called as it is


class Settled:
    """How all layers compute passes of one key, None for a layer's own call."""

    def __init__(self, entries: list[Entry | None], seen: Sequence[Seen]) -> None:
        self.entries = entries
        self._owners, self._names, self._keys, self._kept = [*zip(*seen, strict=True)] or [()] * 4
        self._kinds = [type(each.owner[each.name]) for each in seen]

    def holds(self) -> bool:
        """Whether the same modules with the same weights are still in their places."""
        modules: list[Any] = [*map(dict.get, self._owners, self._names)]
        same = all(map(is_, map(type, modules), self._kinds))
        return same and all(map(is_, map(dict.get, modules, self._keys), self._kept))


# What a layer has computed for the next: its output, by which that knows it, what that begins with,
# positions, and how the layers compute the pass.
Held = tuple[mx.array, Sequence[mx.array], mx.array, list[Entry | None]]


class Segments:
    """Those of one model, for the passes of its target."""

    def __init__(self, kernels: Kernels, known: Known) -> None:
        self._kernels, self._known = kernels, known
        self.layers: list[Layer] = []
        self.held: Held | None = None
        self._running: object = None
        self._key: Key | None = None  # of the pass
        self._entries: list[Entry | None] | None = None
        self._asked: set[Key] = set()
        self._settled: dict[Key, Settled] = {}
        self._traces: dict[Hashable, Callable[..., Any]] = {}

    def begin(self) -> None:
        """A pass begins, in which layers may be replayed."""
        running = self._kernels.running()
        if running is not self._running:
            self._drop()
            self._running = running

    def end(self) -> None:
        """Nothing of a pass is kept behind it."""
        self._key = self._entries = self.held = None

    def entries(self, x: mx.array) -> list[Entry | None] | None:
        """For a layer's input, None where layers are to be called as they are."""
        if x.ndim != 3 or x.shape[0] > 1 or x.shape[1] > MAX_ROWS:
            return None
        key = x.shape[1], x.dtype
        if key != self._key:
            self._key, self._entries = key, self._find(key)
        return self._entries

    def _find(self, key: Key) -> list[Entry | None] | None:
        """None in the first pass of a key, which settles the plans with values at hand."""
        if self._running is None:
            return None
        if key in self._settled and not self._settled[key].holds():
            self._drop()
        if key not in self._asked:
            self._asked.add(key)
            return None
        if key not in self._settled:
            self._settled[key] = self._made(Parts(self._known, key))
        return self._settled[key].entries

    def _made(self, parts: Parts) -> Settled:
        made = [layer.made(parts, self._segment) for layer in self.layers]
        seen = [each for _, seen in made for each in seen]
        return Settled([entry for entry, _ in made], seen)

    def _segment(self, part: Part) -> Segment:
        """The part as a graph; those of one key share it."""
        step = part.step
        if step.key not in self._traces:
            self._traces[step.key] = mx.compile(step.run) if executor() is metal else step.run
        return self._traces[step.key], step.arrays

    def _drop(self) -> None:
        self._asked.clear()
        self._settled.clear()
        self._traces.clear()


class Layer:
    """A decoder layer that is known."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.next: Layer | None = None
        linear = source(module) in HYBRID_BLOCKS and module.is_linear
        self.mixer = "linear_attn" if linear else "self_attn"

    def made(
        self, parts: Parts, segment: Callable[[Part], Segment]
    ) -> tuple[Entry | None, list[Seen]]:
        """How it computes passes, and what that was made of."""
        module = self.module
        front = parts.front(module, self.mixer)
        norm = parts.plain(module, "post_attention_layernorm")
        attends = front is not None and front.values > 1
        back = parts.back(module, self.mixer) if attends else None
        if front is None or norm is None or attends and back is None:
            return None, []
        mlp = parts.mlp(module)
        following = self.next and parts.front(self.next.module, self.next.mixer)
        if following and following.values > 1 and not attends:  # which has no positions at hand
            following = None
        behind = [following] if following else []
        known = [*([back] if back else []), norm, *([mlp, *behind] if mlp else [])]
        after = joined(known, _after(bool(back), bool(mlp)), bool(back), bool(mlp))
        then = None if mlp else joined(behind, _then)
        seen = [each for part in (front, after, then) if part for each in part.seen]
        return Entry(segment(front), segment(after), then and segment(then), attends), seen


def replayed(segments: Segments, layer: Layer, stock: Call) -> Call:
    """The call of a layer: x + mixer(norm(x)), and the MLP behind it, by segments."""
    i, mixer_name = len(segments.layers), layer.mixer
    segments.layers.append(layer)

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        held, segments.held = segments.held, None
        if held is not None and held[0] is x:
            _, given, at, entries = held
            entry = entries[i]
        else:
            entries, given, at = segments.entries(x) or [], (), x
            entry = entries[i] if entries else None
        if entry is None:
            return stock(self, x, mask, cache)
        if not given:
            at = cache.places if entry.attends else x
            run, arrays = entry.before
            given = run(x, at, arrays)
        mixer = self[mixer_name]
        if entry.attends:
            mixed = cache.extend_and_attend(*given, mixer.scale, mask)
        else:
            mixed = mixer(given[0], mask, cache)
        run, arrays = entry.after
        out, *rest = run(mixed, x, at, arrays)
        if entry.then:
            run, arrays = entry.then
            out, *rest = run(self.mlp(rest[0]), out, at, arrays)
        if rest:
            segments.held = out, rest, at, entries
        return out  # type: ignore[no-any-return]

    return call


def _then(given: mx.array, x: mx.array, at: mx.array, *front: Step) -> list[mx.array]:
    """A layer's output, and what the next layer begins with."""
    out = x + given
    return [out, *(front[0](out, at) if front else ())]


def _after(has_back: bool, has_mlp: bool) -> Callable[..., list[mx.array]]:
    """What is behind attention or a mixer, up to the MLP where that is not known."""

    def after(given: mx.array, x: mx.array, at: mx.array, *steps: Step) -> list[mx.array]:
        rest = iter(steps)
        states = x + (next(rest)(given) if has_back else given)
        normed = next(rest)(states)
        return _then(next(rest)(normed), states, at, *rest) if has_mlp else [states, normed]

    return after
