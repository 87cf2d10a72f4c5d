"""A DFlash 2 drafter in straight NumPy float64, to test the real one against.

Written from the published equations and the published checkpoint's names and shapes; one row, one
channel, one candidate at a time where that is clearer. Letters as in `reference_dflash.py`.
"""

import itertools
from typing import Any

import numpy as np

from support.reference_dflash import (
    Array,
    Config,
    Given,
    LinkedBlock,
    Tensors,
    draft_logits,
    draft_states,
    random_drafter,
    tensor_shapes,
    tiny_drafter_config,
)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Return a small config in the published layout; `dflash_config` is replaced field by field."""
    method = {
        "block_size": 6,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "selector_rank": 8,
        "selector_top_k": 4,
        **changes.pop("dflash_config", {}),
    }
    config = tiny_drafter_config(architectures=["DFlash2DraftModel"], dflash_config=method)
    del config["block_size"]
    return {**config, **changes}


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """List the name and shape of every tensor of a checkpoint."""
    method, d, vocabulary = config["dflash_config"], config["hidden_size"], config["vocab_size"]
    taps, rank = method["conv_kernel_size"], method["selector_rank"]
    groups = d // method["conv_group_size"]
    result = tensor_shapes(config)
    for index, name in itertools.product(range(config["num_hidden_layers"]), ("attention", "mlp")):
        result[f"layers.{index}.{name}_conv.base_kernel"] = (2, taps, d)
        result[f"layers.{index}.{name}_conv.kernel_projection.weight"] = (2 * taps * groups, d)
    for name in ("predecessor_codebook", "successor_codebook"):
        result[f"candidate_selector.{name}"] = (vocabulary, rank)
    result["candidate_selector.hidden_projection.weight"] = (rank, d)
    return result


def random_tensors(config: Config, seed: int = 0) -> dict[str, Array]:
    """Draw float32 weights for every tensor, large enough for each to matter."""
    rng = np.random.default_rng(seed + 1)
    tensors = random_drafter(config, seed)
    for name, shape in shapes(config).items():
        if name not in tensors:
            scale = 1.0 if "codebook" in name else 0.5 if "base" in name else 1 / np.sqrt(shape[-1])
            tensors[name] = (rng.standard_normal(shape) * scale).astype(np.float32)
    return tensors


def idle_tensors(config: Config, seed: int = 0) -> dict[str, Array]:
    """Draw weights as `random_tensors` does, for convolutions that give out what goes in."""
    tensors = random_tensors(config, seed)
    for name in tensors:
        if "_conv." in name:
            tensors[name] = np.zeros_like(tensors[name])
        if name.endswith("base_kernel"):
            tensors[name][:, 0] = 1
    return tensors


def _convolved(layer: Tensors, config: Config, name: str, x: Array, sub_layer: Any) -> Array:
    """A sub-layer between its two convolutions."""
    before, after = _kernels(layer, config, name, x)
    return _convolve(sub_layer(_convolve(x, before)), after)


def _kernels(layer: Tensors, config: Config, name: str, x: Array) -> Array:
    """The kernels [2, B, taps, d] before and after a sub-layer with input x [B, d]."""
    base = layer[f"{name}_conv.base_kernel"]
    size = config["dflash_config"]["conv_group_size"]
    sides, taps, d = base.shape
    result = np.zeros((sides, len(x), taps, d))
    for t, row in enumerate(x @ layer[f"{name}_conv.kernel_projection.weight"].T):
        delta = row.reshape(sides, taps, d // size)
        for channel in range(d):
            result[:, t, :, channel] = base[:, :, channel] + delta[:, :, channel // size]
    return result


def _convolve(x: Array, kernel: Array) -> Array:
    """Sum kernel[t, j] * x[t - j] over the taps j for which there is a row; x [B, d]."""
    out = np.zeros_like(x)
    for t in range(len(x)):
        for j in range(min(kernel.shape[1], t + 1)):
            out[t] += kernel[t, j] * x[t - j]
    return out


class Block(LinkedBlock):
    """One block behind its context. tables: the target's embedding and head."""

    def __init__(
        self, config: Config, tensors: Tensors, tables: tuple[Array, Array], given: Given
    ) -> None:
        self.states = draft_states(tensors, config, tables[0], given, _convolved)
        self.logits = draft_logits(tensors, config, tables, given, _convolved)
        self.before = (given.anchor, *given.prefix)[-1]
        method = config["dflash_config"]
        k, most = method["selector_top_k"], method.get("selector_vocab_size")
        self.offers = np.argsort(-self.logits[:, :most], kind="stable")[:, :k].tolist()
        self._weights = {
            name.removeprefix("candidate_selector."): np.asarray(tensor, np.float64)
            for name, tensor in tensors.items()
            if name.startswith("candidate_selector.")
        }

    def edges(self, t: int, before: int) -> Array:
        """[k] what the selector adds to the logits of the likeliest tokens of position t."""
        context = self._weights["hidden_projection.weight"] @ self.states[t]
        context = self._weights["predecessor_codebook"][before] * context
        return self._weights["successor_codebook"][self.offers[t]] @ context  # type: ignore[no-any-return]

    def scores(self, t: int, before: int) -> dict[int, float]:
        tokens = self.offers[t]
        scores = self.logits[t, tokens] + self.edges(t, before)
        return dict(zip(tokens, scores.tolist(), strict=True))
