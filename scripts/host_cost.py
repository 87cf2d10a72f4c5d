"""What the host spends on a pass: microseconds of Python, nodes of MLX's graph, custom launches.

Nothing is computed: graphs are built and dropped, on random models with Qwen3-4B's layers, but
narrow and few, inside the trace of an exported function, where custom Metal kernels can be called
without Metal. On Linux MLX builds norms, rope and attention of several nodes each, on a Mac of one,
so what is to be compared here is the columns with each other.

    .venv/bin/python scripts/host_cost.py                # a pass of Qwen3-4B at 4 bits
    .venv/bin/python scripts/host_cost.py --calls        # single calls, against MLX's own
"""

from __future__ import annotations

import argparse
import functools
import io
import tempfile
import time
from collections.abc import Callable
from copy import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from dflash_mlx.target.block import Block  # isort: skip  # loads the BLAS

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache, qwen3

from dflash_mlx.target.model import Target
from dflash_mlx.target.sequence import SequenceCache
from kernels_metal import factory, gpu
from kernels_metal.cascade_attention import cascade_attention
from kernels_metal.verify_qmm import Packing, Product
from kernels_metal.visibility import Visibility

BEFORE = 4  # tokens in the caches
REPEATS = 40  # the fastest counts
CALLS = 100
ROWS = (1, 4, 8, 16)
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
LAYERS = 36
TAPS = (0, 1)


class Cost(NamedTuple):
    """Of one pass with all layers."""

    microseconds: float
    nodes: int
    launches: int


@functools.cache
def model_of(layers: int, user: str = "") -> nn.Module:
    """A random 4-bit model, one for each user."""
    model = qwen3.Model(qwen3.ModelArgs.from_dict({**SHAPE, "num_hidden_layers": layers}))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    return model


def traced(work: Callable[[], object]) -> None:
    """Run `work` inside a trace, where kernels of Metal can be called everywhere."""
    gpu.gpu_family = lambda: "applegpu_g16s"  # what may be used is decided as on an M4 Max

    def function(x: mx.array) -> list[mx.array]:
        with factory.executing(factory.metal):
            work()
        return [x]

    with tempfile.TemporaryDirectory() as folder:
        mx.export_function(str(Path(folder) / "traced.mlxfn"), function, mx.zeros(1))


def nodes_of(*outputs: mx.array) -> tuple[int, int]:
    """Operations in the graph of arrays that are not computed, and custom kernels among them."""
    text = io.StringIO()
    mx.export_to_dot(text, *outputs)
    made = [line for line in text.getvalue().splitlines() if "shape=rectangle" in line]
    return len(made), sum("CustomKernel" in line for line in made)


def fastest(work: Callable[..., object], prepare: Callable[[], object] | None = None) -> float:
    """Microseconds of `work`, of what `prepare` gives if there is one."""
    times = []
    for _ in range(REPEATS):
        given = () if prepare is None else (prepare(),)
        begin = time.perf_counter()
        made = work(*given)
        times.append(time.perf_counter() - begin)
        del made  # a graph is taken apart when nobody waits for it
    return min(times) * 1e6


def cost_of(one: Callable[..., list[mx.array]], fork: Callable[[], object]) -> Cost:
    """Of building what `one` returns behind caches that `fork` copies."""
    found = Cost(0, 0, 0)

    def work() -> None:
        nonlocal found
        one(fork())
        found = Cost(fastest(one, fork), *nodes_of(*one(fork())))

    traced(work)
    return found


def ours(rows: int, mode: str, layers: int) -> Cost:
    """A pass over a chain of `rows`, behind a few tokens, with the features a drafter reads."""
    target = Target(model_of(layers), 4096, "random")
    taps = TAPS if rows > 1 else ()
    target.tap(taps)
    sequence = target.new_cache()
    target.forward(mx.zeros(BEFORE, mx.int32), sequence, Block(BEFORE))
    mx.eval([array for layer in sequence.layers for array in layer.arrays])
    sequence.commit(range(BEFORE))
    target.use_kernels(mode)  # type: ignore[arg-type]
    tokens = mx.zeros(rows, mx.int32)

    def one(behind: SequenceCache) -> list[mx.array]:
        logits, features = target.forward(tokens, behind, Block(rows), taps)
        return [mx.argmax(logits, axis=-1), *([] if features is None else [features])]

    cost = cost_of(one, sequence.fork)
    target.use_kernels("off")  # the model is used again
    return cost


def theirs(rows: int, name: str, layers: int) -> Cost:
    """The same as mlx-lm does it, or z-lab's `dflash` if it is installed: with hooks and taps."""
    model = model_of(layers, name)
    if name == "z-lab":
        from dflash import model_mlx  # a published package, not one of ours

        model_mlx._patch_model(model, TAPS)
    caches = cache.make_prompt_cache(model)
    model(mx.zeros((1, BEFORE), mx.int32), cache=caches)
    mx.eval([layer.state for layer in caches])
    tokens = mx.zeros((1, rows), mx.int32)

    def one(behind: list[cache.KVCache]) -> list[mx.array]:
        chosen = mx.argmax(model(tokens, cache=behind), axis=-1)
        tapped = [mx.concatenate(model._hidden_states, axis=-1)] if name == "z-lab" else []
        return [chosen, *tapped]

    def fork() -> list[cache.KVCache]:
        copies = [copy(layer) for layer in caches]
        for layer in copies:
            layer.keys, layer.values = mx.array(layer.keys), mx.array(layer.values)
        return copies

    return cost_of(one, fork)


def passes() -> None:
    """The table of passes."""
    print(f"one pass, {LAYERS} layers: microseconds of Python, nodes, custom launches")
    for rows in ROWS:
        kinds = {name: partial(theirs, rows, name) for name in ("mlx-lm", "z-lab")}
        kinds |= {f"ours, {mode}": partial(ours, rows, mode) for mode in ("off", "on")}
        if find_spec("dflash") is None:
            del kinds["z-lab"]
        for name, make in kinds.items():
            few, more = make(2), make(8)  # what a layer adds, for all of them
            pairs = zip(few, more, strict=True)
            cost = Cost(*(a + (b - a) / 6 * (LAYERS - 2) for a, b in pairs))
            numbers = f"{cost.microseconds:7.0f} us {cost.nodes:6.0f} nodes {cost.launches:4.0f}"
            print(f"  {rows:3d} rows  {name:<10} {numbers}", flush=True)


def calls() -> None:
    """Single calls: a bare custom kernel, ours around it, MLX's own operation."""
    half = mx.float16
    x, weights = mx.zeros((1, 8, 1024), half), mx.zeros((512, 128), mx.uint32)
    scales = mx.zeros((512, 16), half)
    queries, keys = mx.zeros((1, 32, 8, 128), half), mx.zeros((1, 8, 1024, 128), half)
    seen = Visibility(1000, np.tri(8, dtype=np.bool_))
    product = Product(weights, scales, scales, Packing(4, 64))

    def many(call: Callable[[], object]) -> float:
        def calls() -> None:
            for _ in range(CALLS):
                call()

        return fastest(calls) / CALLS

    def show(name: str, bare: float, mine: float, stock: float) -> None:
        ratio = mine / bare
        print(f"{name}: bare {bare:.1f} us, ours {mine:.1f} ({ratio:.2f}), MLX's {stock:.1f}")

    def work() -> None:
        product(x)
        ((run, sizes),) = product._settled.values()
        inputs, settled = [x, weights, scales, scales, sizes], run._arguments
        bare = many(lambda: run._call(inputs=inputs, **settled))
        mine = many(lambda: product(x))
        stock = many(lambda: mx.quantized_matmul(x, weights, scales, scales))
        show("verify_qmm", bare, mine, stock)
        cascade_attention(queries, keys, keys, seen, 0.1)
        (plan,) = seen.plans.values()
        unused, settled = plan._unused, plan._attend._arguments
        inputs = [queries, keys, keys, *unused, *unused, *plan._settled, plan._no_sinks]
        joined = mx.zeros(plan._attend.plan.output_shapes[0]), mx.zeros((2, 256, 2))
        merging = [*joined, plan._no_sinks, plan._rows]

        def bare_attention() -> None:
            plan._attend._call(inputs=inputs, **settled)
            if plan._merge is not None:
                plan._merge._call(inputs=merging, **plan._merge._arguments)

        bare = many(bare_attention)
        mine = many(lambda: cascade_attention(queries, keys, keys, seen, 0.1))
        stock = many(lambda: mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.1))
        show("attention", bare, mine, stock)

    traced(work)


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description="What the host spends on a pass.")
    parser.add_argument("--calls", action="store_true", help="single calls instead of passes")
    calls() if parser.parse_args().calls else passes()


if __name__ == "__main__":
    main()
