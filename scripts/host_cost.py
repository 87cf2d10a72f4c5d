"""What the host spends on a pass: microseconds of Python, nodes of MLX's graph, custom launches.

Nothing is computed: graphs are built and dropped, on random models with the layers of Qwen3-4B,
Qwen3.5-4B and Qwen3-30B-A3B, but narrow and few, inside the trace of an exported function, where
custom Metal kernels can be called without Metal. A norm, a rotation, attention, SwiGLU and the
delta rule are one node each on a Mac and several elsewhere, so something of one node stands in
their places (`as_on_a_mac`): the nodes are those of a Mac, the microseconds those of this
processor. All programs take turns, and the fastest of their passes counts. z-lab's is there if its
package `dflash` can be imported (PYTHONPATH).

    .venv/bin/python scripts/host_cost.py           # passes of Qwen3-4B's layers at 4 bits
    .venv/bin/python scripts/host_cost.py hybrid
    .venv/bin/python scripts/host_cost.py experts
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import (
    activations,
    cache,
    gated_delta,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    switch_layers,
)

from dflash_mlx.core.tree import Tree
from dflash_mlx.system import cpu_math
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import SequenceCache
from kernels_metal import factory, gpu

BEFORE = 4  # tokens in the caches
ROUNDS = 40  # the fastest pass counts

# By what decodes: rows of a pass, and whether they are a tree, each row of which has two below it
METHODS = {"plain": 1, "chain of 4": 4, "chain of 8": 8, "tree of 16": 16}
BRANCHED = ("tree of 16",)
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 256,  # widths do not matter to the host
    "intermediate_size": 512,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 1024,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
HYBRID = {
    **SHAPE,
    **{"model_type": "qwen3_5", "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"head_dim": 256, "linear_num_value_heads": 32, "linear_num_key_heads": 16},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
EXPERTS = {
    **SHAPE,
    **{"model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128},
    **{"num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []},
    **{"moe_intermediate_size": 64, "norm_topk_prob": True},
}
MODELS: dict[str, tuple[Any, dict[str, Any], int]] = {  # by name: source, settings, layers
    "dense": (qwen3, SHAPE, 36),
    "hybrid": (qwen3_5, HYBRID, 32),
    "experts": (qwen3_moe, EXPERTS, 48),
}
_FAST = ("rms_norm", "rope", "scaled_dot_product_attention")
FEW = 4, 16  # layers that are built
TAPS = (0, 1)


class HostCost(NamedTuple):
    """Of building one pass; launches: of custom kernels, among the nodes."""

    microseconds: float
    nodes: int
    launches: int


class Builder(NamedTuple):
    """Builds one pass behind a cache that `fork` makes."""

    build: Callable[[Any], list[mx.array]]
    fork: Callable[[], Any]


def passes_of(
    target: Target, rows: int, aux_layers: tuple[int, ...] = (), tree: Sequence[int] | None = None
) -> tuple[Callable[[SequenceCache], list[mx.array]], Callable[[], SequenceCache]]:
    """What builds a pass, and what makes a cache to build it behind."""
    sequence = target.new_cache()
    target.forward(mx.zeros(BEFORE, mx.int32), sequence, Block(BEFORE))
    sequence.commit(range(BEFORE))
    mx.eval(sequence.arrays)
    tokens = mx.zeros(rows, mx.int32)

    def block() -> Block:  # a new one for each pass, as in a round
        return Block(rows) if tree is None else Block.of(Tree(tuple(range(1, rows)), tuple(tree)))

    def build(behind: SequenceCache) -> list[mx.array]:
        logits, features = target.forward(tokens, behind, block(), aux_layers)
        return [mx.argmax(logits, axis=-1), *([] if features is None else [features])]

    return build, sequence.fork


def microseconds(builder: Builder) -> float:
    """Of building a pass, in this thread alone, whoever else runs."""
    cache = builder.fork()
    begin = time.thread_time()
    made = builder.build(cache)
    end = time.thread_time()
    del made  # a graph is taken apart when nobody waits for it
    return (end - begin) * 1e6


def nodes_of(*outputs: mx.array) -> tuple[int, int]:
    """Operations in the graph of arrays that are not computed, and custom kernels among them."""
    text = io.StringIO()
    mx.export_to_dot(text, *outputs)
    made = [line for line in text.getvalue().splitlines() if "shape=rectangle" in line]
    return len(made), sum("CustomKernel" in line for line in made)


def model_of(layers: int, name: str = "dense") -> nn.Module:
    """A random 4-bit model, one of MODELS."""
    source, shape, _ = MODELS[name]
    model = source.Model(source.ModelArgs.from_dict({**shape, "num_hidden_layers": layers}))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    return model


@contextmanager
def as_on_a_mac() -> Iterator[None]:
    """Within it what MLX has one node for on a Mac is built as one node."""

    def like_first(*given: Any, **more: Any) -> mx.array:
        arrays = [array for array in (*given, *more.values()) if isinstance(array, mx.array)]
        return mx.depends(arrays[0], arrays)  # type: ignore[return-value]

    def delta(q: mx.array, k: mx.array, v: mx.array, *given: Any) -> Any:
        return mx.depends([v, given[2]], [q, k, *given[:2]])

    swiglu = activations, qwen3, qwen3_moe, qwen3_next, switch_layers
    places: list[tuple[Any, str, Any]] = [
        *((mx.fast, name, like_first) for name in _FAST),
        *((place, "swiglu", like_first) for place in swiglu),
        (gated_delta, "gated_delta_ops", delta),
        (cpu_math, "applies", lambda: False),  # products of the CPU's own
        (gpu, "gpu_family", lambda: "applegpu_g16s"),  # an M4 Max
    ]
    with ExitStack() as stack:
        for place, name, other in places:
            stack.enter_context(mock.patch.object(place, name, other))
        yield


def traced(work: Callable[[], object]) -> None:
    """Run `work` inside a trace, where kernels of Metal can be called everywhere."""

    def function(x: mx.array) -> list[mx.array]:
        with factory.executing(factory.metal):
            work()
        return [x]

    with tempfile.TemporaryDirectory() as folder:
        mx.export_function(str(Path(folder) / "traced.mlxfn"), function, mx.zeros(1))


def ours(rows: int, mode: str, layers: int, name: str = "dense", branched: bool = False) -> Builder:
    """A pass over a chain or a tree of `rows`, with the features a drafter reads."""
    target = Target(model_of(layers, name), 4096, "random")
    aux_layers = TAPS if rows > 1 else ()
    target.tap(aux_layers)
    tree = [-1, *(i // 2 for i in range(rows - 1))] if branched else None
    build, fork = passes_of(target, rows, aux_layers, tree)
    target.use_kernels(mode)  # type: ignore[arg-type]

    def fresh() -> SequenceCache:
        target._outputs.clear()  # of the last pass: on a Mac they are computed, and hold no graph
        return fork()

    return Builder(build, fresh)


def theirs(rows: int, name: str, layers: int, model_name: str = "dense") -> Builder:
    """The same as mlx-lm does it, or z-lab's `dflash`: with hooks and taps; no trees."""
    model = model_of(layers, model_name)
    if name == "z-lab":
        from dflash import model_mlx  # a published package, not one of ours

        model_mlx._patch_model(model, TAPS)
    caches = cache.make_prompt_cache(model)
    model(mx.zeros((1, BEFORE), mx.int32), cache=caches)
    mx.eval([layer.state for layer in caches])
    states = [array for layer in caches for array in getattr(layer, "cache", ())]
    mx.eval([array for array in states if array is not None])
    tokens = mx.zeros((1, rows), mx.int32)

    def build(behind: list[Any]) -> list[mx.array]:
        chosen = mx.argmax(model(tokens, cache=behind), axis=-1)
        tapped = [mx.concatenate(model._hidden_states, axis=-1)] if name == "z-lab" else []
        return [chosen, *tapped]

    def fork() -> list[Any]:
        copies = [copy(layer) for layer in caches]
        for layer in copies:
            if isinstance(layer, cache.KVCache):
                layer.keys, layer.values = mx.array(layer.keys), mx.array(layer.values)
            else:
                layer.cache = [*layer.cache]
        return copies

    return Builder(build, fork)


def measured(builders: dict[Any, Builder]) -> dict[Any, HostCost]:
    """The cost of each; they take turns, so that a busy machine is unfair to none."""
    found: dict[Any, HostCost] = {}

    def work() -> None:
        for key, (build, fork) in builders.items():
            build(fork())  # what is chosen or settled at the first pass of a shape
            found[key] = HostCost(float("inf"), *nodes_of(*build(fork())))
        for _ in range(ROUNDS):
            for key, builder in builders.items():
                least = min(microseconds(builder), found[key].microseconds)
                found[key] = found[key]._replace(microseconds=least)

    traced(work)
    return found


def passes(model: str) -> None:
    """The table of passes of one of MODELS."""
    layers, (few, more) = MODELS[model][2], FEW
    modes = {f"ours, {mode}": mode for mode in ("off", "on")}
    others = ["mlx-lm", *(["z-lab"] if find_spec("dflash") is not None else [])]
    if len(others) == 1:
        print("z-lab's package dflash cannot be imported, so it is left out")
    print(f"one pass of {layers} layers ({model}), built as on a Mac and not computed")
    print("| method | program | graph nodes | custom kernels | us a pass | of mlx-lm's plain |")
    print("| --- | --- | --- | --- | --- | --- |")
    for method, rows in METHODS.items():
        branched = method in BRANCHED
        made = {("plain", n): theirs(1, "mlx-lm", n, model) for n in FEW}
        made |= {(name, n): theirs(rows, name, n, model) for name in others for n in FEW}
        for name, mode in modes.items():
            made |= {(name, n): ours(rows, mode, n, model, branched) for n in FEW}
        costs, whole = measured(made), {}
        for name in ("plain", *others, *modes):  # what a layer adds, for all of them
            pairs = zip(costs[name, few], costs[name, more], strict=True)
            parts = (a + (b - a) / (more - few) * (layers - few) for a, b in pairs)
            whole[name] = HostCost(*parts)
        for name in (*others, *modes):
            cost = whole[name]
            share = cost.microseconds / whole["plain"].microseconds
            numbers = f"{cost.nodes:.0f} | {cost.launches:.0f} | {cost.microseconds:.0f}"
            rows_of = " (as a chain)" if branched and name in others else ""
            print(f"| {method} | {name}{rows_of} | {numbers} | {share:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the host spends on a pass.")
    parser.add_argument("model", nargs="?", default="dense", choices=MODELS)
    with as_on_a_mac():
        passes(parser.parse_args().model)


if __name__ == "__main__":
    main()
