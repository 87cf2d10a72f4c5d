"""What the host spends on a pass: microseconds of Python, nodes of MLX's graph, custom launches.

Nothing is computed: graphs are built and dropped, on random models with Qwen3-4B's layers, but
narrow and few, inside the trace of an exported function, where custom Metal kernels can be called
without Metal. A norm, a rotation, attention and SwiGLU are one node each on a Mac and several
elsewhere, so something of one node stands in their places (`as_on_a_mac`): the nodes are those of a
Mac, the microseconds those of this processor. All programs take turns, and the fastest of their
passes counts. z-lab's is there if its package `dflash` can be imported (PYTHONPATH).

    .venv/bin/python scripts/host_cost.py                # a pass of Qwen3-4B at 4 bits
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, cache, qwen3

from dflash_mlx.system import cpu_math
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import SequenceCache
from kernels_metal import factory, gpu

BEFORE = 4  # tokens in the caches
ROUNDS = 40  # the fastest pass counts
# By what decodes: rows of a pass, and tokens a round as measured with the default pair
# (docs/lab/2026-11-22-methods.md)
METHODS = {"plain": (1, 1.0), "chain of 4": (4, 2.26), "chain of 8": (8, 2.53)}
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
_FAST = ("rms_norm", "rope", "scaled_dot_product_attention")
LAYERS, FEW = 36, (4, 16)
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
    target: Target, rows: int, aux_layers: tuple[int, ...] = ()
) -> tuple[Callable[[SequenceCache], list[mx.array]], Callable[[], SequenceCache]]:
    """What builds a pass, and what makes a cache to build it behind."""
    sequence = target.new_cache()
    target.forward(mx.zeros(BEFORE, mx.int32), sequence, Block(BEFORE))
    sequence.commit(range(BEFORE))
    mx.eval(sequence.arrays)
    tokens = mx.zeros(rows, mx.int32)

    def build(behind: SequenceCache) -> list[mx.array]:
        logits, features = target.forward(tokens, behind, Block(rows), aux_layers)
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


def model_of(layers: int) -> nn.Module:
    """A random 4-bit model."""
    model = qwen3.Model(qwen3.ModelArgs.from_dict({**SHAPE, "num_hidden_layers": layers}))
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

    places: list[tuple[Any, str, Any]] = [
        *((mx.fast, name, like_first) for name in _FAST),
        *((place, "swiglu", like_first) for place in (activations, qwen3)),
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


def ours(rows: int, mode: str, layers: int) -> Builder:
    """A pass over a chain of `rows`, with the features a drafter reads."""
    target = Target(model_of(layers), 4096, "random")
    aux_layers = TAPS if rows > 1 else ()
    target.tap(aux_layers)
    build, fork = passes_of(target, rows, aux_layers)
    target.use_kernels(mode)  # type: ignore[arg-type]

    def fresh() -> SequenceCache:
        target._outputs.clear()  # of the last pass: on a Mac they are computed, and hold no graph
        return fork()

    return Builder(build, fresh)


def theirs(rows: int, name: str, layers: int) -> Builder:
    """The same as mlx-lm does it, or z-lab's `dflash`: with hooks and taps."""
    model = model_of(layers)
    if name == "z-lab":
        from dflash import model_mlx  # a published package, not one of ours

        model_mlx._patch_model(model, TAPS)
    caches = cache.make_prompt_cache(model)
    model(mx.zeros((1, BEFORE), mx.int32), cache=caches)
    mx.eval([layer.state for layer in caches])
    tokens = mx.zeros((1, rows), mx.int32)

    def build(behind: list[cache.KVCache]) -> list[mx.array]:
        chosen = mx.argmax(model(tokens, cache=behind), axis=-1)
        tapped = [mx.concatenate(model._hidden_states, axis=-1)] if name == "z-lab" else []
        return [chosen, *tapped]

    def fork() -> list[cache.KVCache]:
        copies = [copy(layer) for layer in caches]
        for layer in copies:
            layer.keys, layer.values = mx.array(layer.keys), mx.array(layer.values)
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


def passes() -> None:
    """The table of passes."""
    programs = {name: partial(theirs, name=name) for name in ("mlx-lm", "z-lab")}
    programs |= {f"ours, {mode}": partial(ours, mode=mode) for mode in ("off", "on")}
    if find_spec("dflash") is None:
        print("z-lab's package dflash cannot be imported, so it is left out")
        del programs["z-lab"]
    print(f"one pass of {LAYERS} layers, built as on a Mac and not computed")
    print("| method | program | graph nodes | custom kernels | us a pass | us a token |")
    print("| --- | --- | --- | --- | --- | --- |")
    few, more = FEW
    for method, (rows, tokens) in METHODS.items():
        made = {(name, n): make(rows, layers=n) for name, make in programs.items() for n in FEW}
        costs = measured(made)
        for name in programs:  # what a layer adds, for all of them
            pairs = zip(costs[name, few], costs[name, more], strict=True)
            cost = HostCost(*(a + (b - a) / (more - few) * (LAYERS - few) for a, b in pairs))
            numbers = f"{cost.nodes:.0f} | {cost.launches:.0f} | {cost.microseconds:.0f}"
            print(
                f"| {method} | {name} | {numbers} | {cost.microseconds / tokens:.0f} |", flush=True
            )


def main() -> None:
    argparse.ArgumentParser(description="What the host spends on a pass.").parse_args()
    with as_on_a_mac():
        passes()


if __name__ == "__main__":
    main()
