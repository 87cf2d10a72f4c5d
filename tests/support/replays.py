"""Layers that are replayed: targets, passes, and how many of their layers are."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.segments import Settled
from support.decoding import ids_of
from support.families import VOCAB_SIZE
from support.hybrids import changed_target, fresh, some_tree

SHAPE = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
HYBRID = {
    **{"head_dim": 64, "linear_num_key_heads": 1, "linear_num_value_heads": 2},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
SHAPES = {"qwen3": SHAPE, "qwen3_moe": SHAPE, "qwen3_5": HYBRID}
TREE = some_tree(np.random.default_rng(5), 12)
CHAIN = mx.arange(3, 7), Block(4)
PASSES = (
    *((mx.arange(3, 3 + rows), Block(rows)) for rows in (1, 4, 8)),
    (ids_of(TREE), Block.of(TREE)),
)
PREFIXES = 11, 20, 300  # the last with more slots, which attention splits
CLOSE = 2e-4


def make_target(name: str = "qwen3", **changes: Any) -> Target:
    target = changed_target(name, 4, **{**SHAPES.get(name, {}), **changes})
    target.tap((0, target.num_layers - 1))
    for i, (path, module) in enumerate(target.model.named_modules()):
        if type(module) is nn.RMSNorm and path.endswith("norm"):
            noise = mx.random.normal(module.weight.shape, key=mx.random.key(i))
            module.weight = 1 + 0.3 * noise
    return target


def outputs(target: Target, tokens: mx.array, block: Block, before: int) -> mx.array:
    """Logits and features of a block behind a prompt, as one array."""
    cache = fresh(target, [(7 * i + 3) % VOCAB_SIZE for i in range(before)])
    logits, features = target.forward(tokens, cache, block, (0, target.num_layers - 1))
    found = mx.concatenate([logits, features], axis=-1)
    mx.eval(found)
    return found


def worst(target: Target) -> float:
    """By how much passes are off, of which all but the first of every width can be replayed."""
    calls = [(*rows, before) for rows in PASSES for before in PREFIXES]
    target.use_kernels("off")
    stock = [outputs(target, *call) for call in calls]
    target.use_kernels("on")
    found = [outputs(target, *call) for call in calls]
    return max(mx.abs(a - b).max().item() for a, b in zip(found, stock, strict=True))


def replayed(target: Target) -> int:
    """How many layers are, in passes of all widths that were made twice."""
    settled = [found.entries for found in kept(target) if isinstance(found, Settled)]
    return min((sum(entry is not None for entry in entries) for entries in settled), default=0)


def nets(target: Target) -> int:
    """How many of them are gated delta nets that are replayed with their layers."""
    settled = [found.entries for found in kept(target) if isinstance(found, Settled)]
    return min(sum(entry is not None and entry.net is not None for entry in e) for e in settled)


def kept(target: Target) -> list[Any]:
    """How layers compute passes, and traces."""
    return [*target._kernel_hooks.segments._plans._made.values()]
