"""Launches and bytes of states of a round of Qwen3.5: a pass, and a commit that keeps part of it.

As in `host_cost.py` nothing is computed: graphs are built on random narrow models with the heads of
the real ones, inside a trace, as on a Mac. What is no view of an array counts as one launch. Rounds
follow each other: what a pass adds behind a commit of all rows of a chain is its own cost, and what
a round that keeps some rows adds behind others like it is that of a pass and a commit. Bytes of
states are those that the launches of the delta rule are given and give, by their shapes. Copies
that MLX makes of arrays with gaps are in neither.

    .venv/bin/python scripts/hybrid_cost.py
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models import gated_delta, qwen3_5

sys.path.insert(0, str(Path(__file__).parent))
from host_cost import as_on_a_mac, model_of, traced

from dflash_mlx.core.tree import Tree
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from kernels_metal import factory

ROWS = 8
CHAIN, TREE = tuple(range(-1, ROWS - 1)), (-1, 0, 0, 1, 1, 2, 2, 3)  # with four leaves
KEPT = {"chain": (0, 1, 2), "tree": (0, 2, 5)}
FEW = (4, 8)  # layers of the models that are built; every fourth has keys
VIEWS = (
    "Reshape|Slice|Transpose|Broadcast|Split|ExpandDims|Squeeze|Flatten|Unflatten|AsStrided"
    "|Copy|StopGradient|View"
)


Cost = npt.NDArray[np.float64]  # launches, bytes of states


class Shape(NamedTuple):
    """A model: its layers, and value heads of its gated delta nets; 0 for one without."""

    name: str
    layers: int
    heads: int


SHAPES = (
    Shape("Qwen3.5-4B", 32, 32),
    Shape("Qwen3.5-27B", 64, 48),
    Shape("Qwen3-4B, dense", 36, 0),
)


def made(shape: Shape, layers: int) -> nn.Module:
    """A random narrow 4-bit model with these heads."""
    if not shape.heads:
        return model_of(layers)
    config = {
        **{"model_type": "qwen3_5", "hidden_size": 256, "intermediate_size": 512},
        **{"num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 4},
        **{"head_dim": 256, "vocab_size": 1024, "tie_word_embeddings": True},
        **{"linear_num_value_heads": shape.heads, "linear_num_key_heads": 16},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    }
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16, lambda kind: kind == mx.float32)
    for layer in model.layers:
        if layer.is_linear:
            layer.linear_attn.A_log = layer.linear_attn.A_log.astype(mx.float32)
    nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    return model


class Given:
    """Bytes of the states that the delta rule's launches take and give."""

    def __init__(self) -> None:
        self.bytes = 0

    def by_mlx_lm(self, *given: Any) -> Any:
        """One launch; a state for each of several paths is copied before."""
        q, k, v, g, beta, state, _ = given
        if state is None:
            state = mx.zeros((k.shape[0], *v.shape[2:], k.shape[3]))
        self.bytes += 2 * state.nbytes
        if state.shape[0] > 1:
            self.bytes += state.nbytes + state.nbytes // state.shape[0]
            state = state + 0
        return mx.depends([v, state], [q, k, g, beta])

    @contextmanager
    def counted(self) -> Iterator[None]:
        compiled = factory.metal

        def run(kernel: Any, inputs: Sequence[mx.array], plan: Any) -> list[mx.array]:
            if kernel.name == "gated_delta":
                self.bytes += 2 * inputs[kernel.inputs.index("state")].nbytes
            return compiled(kernel, inputs, plan)

        with (
            mock.patch.object(gated_delta, "gated_delta_ops", self.by_mlx_lm),
            factory.executing(run),
        ):
            yield


def rows_of(packed: mx.array, scales: mx.array, *_: Any, **__: Any) -> mx.array:
    """Stands for `mx.dequantize`, one launch on a Mac."""
    rows = mx.zeros((*packed.shape[:-1], 256), scales.dtype)
    return mx.depends(rows, [packed])  # type: ignore[return-value]


def launches_in(*outputs: mx.array) -> int:
    """Operations in the graph of arrays that are not computed, without views."""
    text = io.StringIO()
    mx.export_to_dot(text, *outputs)
    labels = re.findall(r'label ="([^"]*)", shape=rectangle', text.getvalue())
    return sum(not re.fullmatch(VIEWS, label) for label in labels)


def after(target: Target, passes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Cost:
    """What is to be computed for the logits of these passes: parents of rows, and what stays."""
    given, cache = Given(), target.new_cache()
    outputs: list[mx.array] = []
    stays: Sequence[int] = ()
    with given.counted():
        for parents, path in passes:
            tokens = mx.zeros(len(parents), mx.int32)
            tree = Tree(tuple(range(1, len(parents))), tuple(parents))
            if outputs:
                cache.commit(stays)
            outputs.append(target.forward(tokens, cache, Block.of(tree))[0])
            stays = path
    return np.array([launches_in(*outputs), given.bytes], np.float64)


def costs(shape: Shape, mode: str, layers: int) -> dict[str, Cost]:
    """By what is done."""
    target, found = Target(made(shape, layers), 4096, "random"), {}
    target.use_kernels(mode)  # type: ignore[arg-type]
    whole = (CHAIN, range(ROWS))

    def work() -> None:
        for name, parents in (("chain", CHAIN), ("tree", TREE)):
            part = (parents, KEPT[name])
            before = [whole, whole, whole]
            after(target, [*before, part, part])  # what is settled at the first pass of a shape
            own = after(target, [*before, part]) - after(target, before)
            both = after(target, [part] * 4) - after(target, [part] * 3)
            found[f"{name}, pass"], found[f"{name}, commit"] = own, both - own

    traced(work)
    return found


def main() -> None:
    """The table."""
    argparse.ArgumentParser(description="Launches and bytes of a round.").parse_args()
    print(f"{ROWS} rows, of which {len(KEPT['chain'])} stay; the tree has four leaves")
    print("| model | kernels | of | launches | MB of states |")
    print("| --- | --- | --- | --- | --- |")
    few, more = FEW
    for shape in SHAPES:
        for mode in ("off", "on"):
            with as_on_a_mac(), mock.patch.object(mx, "dequantize", rows_of):
                small, large = (costs(shape, mode, layers) for layers in FEW)
            for name in small:
                each = (large[name] - small[name]) / (more - few)
                launches, size = small[name] + each * (shape.layers - few)
                print(f"| {shape.name} | {mode} | {name} | {launches:.0f} | {size / 1e6:.0f} |")


if __name__ == "__main__":
    main()
