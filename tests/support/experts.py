"""Experts of a mixture: which of them rows touch, and routers with favourites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.hooks import Hooks, through
from dflash_mlx.verifier.model import Target
from support.families import VOCAB_SIZE, make_model

# Tiny models, and the setting that says how many experts a layer has
MIXTURES = {
    "qwen3_moe": "num_experts",
    "mixtral": "num_local_experts",
    "gpt_oss": "num_local_experts",
    "deepseek_v3": "n_routed_experts",
}


class Touched:
    """Experts that the passes of a model touch from now on, of all layers together.

    Mixtures of mlx-lm give the router's choice to a `SwitchGLU` or a `SwitchMLP`.
    """

    def __init__(self, model: nn.Module) -> None:
        from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

        self._chosen: list[mx.array] = []
        hooks = Hooks()
        for module in model.modules():
            if isinstance(module, SwitchGLU | SwitchMLP):
                hooks.replace(module, "__call__", through(self._see, type(module).__call__))

    def _see(self, module: Any, forward: Any, x: mx.array, indices: mx.array) -> mx.array:
        self._chosen.append(indices)
        return forward(module, x, indices)  # type: ignore[no-any-return]

    def clear(self) -> None:
        self._chosen.clear()

    def counts(self) -> list[int]:
        """Of each layer of each pass so far: what some row of it touched."""
        return [len(np.unique(np.array(indices))) for indices in self._chosen]


def prefer(model: nn.Module, steepness: float, seed: int = 0) -> None:
    """Let the routers of a tiny Qwen3 choose some experts more often than others."""
    draws = np.random.default_rng(seed)
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            scales = np.exp(steepness * draws.standard_normal((len(module.weight), 1)))
            module.weight = module.weight * mx.array(scales, module.weight.dtype)


def touched_by_rows(sizes: Sequence[int], steepness: float) -> dict[str, list[float]]:
    """Experts of a layer that passes of a random model touch, by what the rows' tokens are."""
    model = make_model("qwen3_moe", num_experts=128, num_experts_per_tok=8, layers=4)
    prefer(model, steepness)
    target, touched = Target(model, 512, "tiny"), Touched(model)
    tokens = {"of one token": mx.zeros(VOCAB_SIZE, mx.int32), "different": mx.arange(VOCAB_SIZE)}
    found: dict[str, list[float]] = {}
    for name, words in tokens.items():
        cache = target.new_cache()
        target.forward(words, cache, Block(VOCAB_SIZE))
        cache.commit(range(VOCAB_SIZE))
        for rows in sizes:
            touched.clear()
            target.forward(words[:rows], cache, Block(rows))
            cache.discard()
            found.setdefault(name, []).append(float(np.mean(touched.counts())))
    return found
