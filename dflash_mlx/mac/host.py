"""What the host spends on building a pass: ours with kernels on and off, and mlx-lm's."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target

BEFORE = 4  # tokens in the caches
_SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 256,  # widths do not matter to the host
    "intermediate_size": 512,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
Build = Callable[[], list[mx.array]]


def host_cost(rows: int, layers: int, rounds: int) -> dict[str, float]:
    """Microseconds of a pass over `rows`, built and not computed; the least of some rounds.

    The programs take turns, so that a busy machine is unfair to none.
    """
    sides = {"mlx-lm": _theirs(rows, layers)}
    sides |= {f"kernels {mode}": _ours(rows, layers, mode) for mode in ("off", "on")}
    found = dict.fromkeys(sides, float("inf"))
    for build in sides.values():
        mx.eval(build())  # what is settled at the first pass of a shape
    for _ in range(rounds):
        for name, build in sides.items():
            begin = time.thread_time()
            made = build()
            found[name] = min(found[name], (time.thread_time() - begin) * 1e6)
            del made  # a graph is taken apart when nobody waits for it
    return found


def _model(layers: int) -> nn.Module:
    from mlx_lm.models import qwen3  # not before it is wanted: it takes seconds

    model = qwen3.Model(qwen3.ModelArgs.from_dict({**_SHAPE, "num_hidden_layers": layers}))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    return model


def _ours(rows: int, layers: int, mode: str) -> Build:
    target = Target(_model(layers), 4096, "random")
    sequence = target.new_cache()
    target.forward(mx.zeros(BEFORE, mx.int32), sequence, Block(BEFORE))
    sequence.commit(range(BEFORE))
    mx.eval(sequence.arrays)
    target.use_kernels(mode)  # type: ignore[arg-type]
    tokens = mx.zeros(rows, mx.int32)

    def build() -> list[mx.array]:
        logits, _ = target.forward(tokens, sequence.fork(), Block(rows))
        return [mx.argmax(logits, axis=-1)]

    return build


def _theirs(rows: int, layers: int) -> Build:
    from mlx_lm.models import cache

    model = _model(layers)
    caches = cache.make_prompt_cache(model)
    model(mx.zeros((1, BEFORE), mx.int32), cache=caches)
    mx.eval([layer.state for layer in caches])
    tokens = mx.zeros((1, rows), mx.int32)

    def fork(layer: Any) -> Any:
        other = copy(layer)
        other.keys, other.values = mx.array(layer.keys), mx.array(layer.values)
        return other

    def build() -> list[mx.array]:
        return [mx.argmax(model(tokens, cache=[*map(fork, caches)]), axis=-1)]

    return build
