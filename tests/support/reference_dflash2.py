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
    Tensors,
    attention,
    layer_tensors,
    mlp,
    random_drafter,
    rms_norm,
    tensor_shapes,
    tiny_drafter_config,
    visible_keys,
)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Return a small config in the published layout; `dflash_config` is replaced field by field."""
    method = {
        "block_size": 6,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": 5,
        "selector_rank": 8,
        "selector_top_k": 4,
        "target_layer_ids": [0, 2],
        **changes.pop("dflash_config", {}),
    }
    config = tiny_drafter_config(architectures=["DFlash2DraftModel"], num_target_layers=3)
    del config["block_size"]
    return {**config, "dflash_config": method, **changes}


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


def states(tensors: Tensors, config: Config, x: Array, features: Array) -> Array:
    """Return the final states [B, d] of a block embedded as x [B, d] after features [T, m*d]."""
    weights = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    eps = config["rms_norm_eps"]
    context = rms_norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    x = np.asarray(x, np.float64)
    for index in range(config["num_hidden_layers"]):
        layer = layer_tensors(weights, index)
        visible = visible_keys(config, index, len(context), len(x))
        normed = rms_norm(x, layer["input_layernorm.weight"], eps)
        before, after = _kernels(layer, config, "attention", normed)
        inner = attention(layer, config, _convolve(normed, before), context, visible)
        x = x + _convolve(inner, after)
        normed = rms_norm(x, layer["post_attention_layernorm.weight"], eps)
        before, after = _kernels(layer, config, "mlp", normed)
        x = x + _convolve(mlp(layer, _convolve(normed, before)), after)
    return rms_norm(x, weights["norm.weight"], eps)


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


def logits(tensors: Tensors, config: Config, tables: tuple[Array, Array], *block: Any) -> Array:
    """Return the logits [B - 1, V] of a block; see `draft_states` for `block`."""
    method = config["dflash_config"]
    hidden = draft_states(tensors, config, tables, *block)
    result = hidden @ np.asarray(tables[1], np.float64).T * method.get("output_multiplier", 1.0)
    cap = method.get("final_logit_softcapping")
    return np.tanh(result / cap) * cap if cap else result


def draft_states(
    tensors: Tensors,
    config: Config,
    tables: tuple[Array, Array],
    features: Array,
    anchor: int,
    rows: int,
    prefix: tuple[int, ...] = (),
) -> Array:
    """Return the final states of the masks of a block.

    tables: embedding and head of the target, [V, d]. features [T, m*d]; the anchor sits at
    position T, drafted tokens that the block shows unmasked follow it.
    """
    method = config["dflash_config"]
    tokens = [anchor, *prefix, *[method["mask_token_id"]] * (rows - 1 - len(prefix))]
    x = np.asarray(tables[0], np.float64)[tokens] * method.get("input_embedding_scale", 1.0)
    return states(tensors, config, x, features)[1 + len(prefix) :]


def score(tensors: Tensors, hidden: Array, unary: Array, a: int, b: int) -> float:
    """S(a -> b) at a position with final state hidden [d] and logits unary [V]."""
    weights = {
        name.removeprefix("candidate_selector."): np.asarray(tensor, np.float64)
        for name, tensor in tensors.items()
        if name.startswith("candidate_selector.")
    }
    context = weights["predecessor_codebook"][a] * (
        weights["hidden_projection.weight"] @ np.asarray(hidden, np.float64)
    )
    return float(unary[b] + context @ weights["successor_codebook"][b])


def offers(config: Config, unary: Array) -> list[list[int]]:
    """The likeliest tokens of every position, by logits unary [n, V]."""
    k = config["dflash_config"]["selector_top_k"]
    return [np.argsort(-row, kind="stable")[:k].tolist() for row in unary]


def greedy_path(
    tensors: Tensors, config: Config, hidden: Array, unary: Array, anchor: int
) -> list[int]:
    """Return the tokens of the walk that takes the best next candidate every time."""
    path = [anchor]
    for row, state, candidates in zip(unary, hidden, offers(config, unary), strict=True):
        scores = [score(tensors, state, row, path[-1], b) for b in candidates]
        path.append(candidates[int(np.argmax(scores))])
    return path[1:]


def path_law(
    tensors: Tensors, config: Config, hidden: Array, unary: Array, anchor: int, temperature: float
) -> dict[tuple[int, ...], float]:
    """Return the probability of every path of the sampled walk."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for row, state, candidates in zip(unary, hidden, offers(config, unary), strict=True):
        longer = {}
        for path, chance in law.items():
            before = path[-1] if path else anchor
            scores = np.array([score(tensors, state, row, before, b) for b in candidates])
            weights = np.exp((scores - scores.max()) / temperature)
            for b, share in zip(candidates, weights / weights.sum(), strict=True):
                longer[(*path, b)] = chance * share
        law = longer
    return law
