"""P-EAGLE in straight NumPy float64, and tiny random ones in every published layout.

Written from arXiv 2602.01469 and the layouts of the published files. All rows of text and draft go
through the layers at once, behind each other. Imports no mlx. Letters as in `reference_eagle3.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from support import reference_eagle3
from support.reference_dflash import (
    Array,
    Config,
    attention,
    layer_shapes,
    layer_tensors,
    mlp,
    over_vocabulary,
    random_weights,
    rms_norm,
)

MASK, LAYERS = 5, 3


def logits(
    tensors: Mapping[str, Array],
    config: Config,
    tables: tuple[Array, Array],
    tokens: Sequence[int],
    features: Array,
    path: Sequence[int],
) -> Array:
    """[n, V] for what follows a path's first token, the anchor, and n - 1 masks behind it."""
    anchor, depths = path[0], len(path)
    weights = {n.removeprefix("model."): np.asarray(t, np.float64) for n, t in tensors.items()}
    weights = {n.replace("midlayer.", "layers.0."): t for n, t in weights.items()}
    told = {**config, **config.get("transformer_layer_config", {})}
    learned = np.broadcast_to(
        weights["mask_hidden"].reshape(1, -1), (depths - 1, features.shape[1])
    )
    h = reference_eagle3.fuse(weights, told, np.concatenate([features, learned]))
    embedding = weights.get("embed_tokens.weight", np.asarray(tables[0], np.float64))
    x = embedding[[*tokens[1:], anchor, *[MASK] * (depths - 1)]]
    eps, rows, first = told["rms_norm_eps"], len(x), layer_tensors(weights, 0)
    place = np.arange(rows)
    visible = place[None] <= place[:, None]
    normed = rms_norm(h, first["hidden_norm.weight"], eps)
    given = np.concatenate([rms_norm(x, first["input_layernorm.weight"], eps), normed], axis=-1)
    y = normed if told.get("norm_before_residual") else h
    for i in range(told["num_hidden_layers"]):
        layer, kinds = layer_tensors(weights, i), told.get("layer_types") or []
        seen = visible
        if kinds and kinds[i] == "sliding_attention":
            seen = visible & (place[:, None] - place[None] < told["sliding_window"])
        if i:
            given = rms_norm(y, layer["input_layernorm.weight"], eps)
        y = y + attention(layer, told, given, given[:0], seen)
        y = y + mlp(layer, rms_norm(y, layer["post_attention_layernorm.weight"], eps))
    final = rms_norm(y[-depths:], weights["norm.weight"], eps)
    head = weights.get("lm_head.weight", np.asarray(tables[1], np.float64))
    return over_vocabulary(final @ head.T, tensors)


# Tiny drafters for the tiny llama


def raw(**changes: Any) -> dict[str, Any]:
    """A config.json in the layout of vLLM and of amazon's uploads."""
    kind = {"num_hidden_layers": LAYERS, "ptd_token_id": MASK}
    return reference_eagle3.raw(**{**kind, **changes})


def automodel(**changes: Any) -> dict[str, Any]:
    """In the layout of NVIDIA's Automodel, whose tensors are below `model.`."""
    kind = {"architectures": ["LlamaEagle3DraftModel"], "parallel_drafting": True, "num_depths": 6}
    told = {"mask_token_id": MASK, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2}
    return reference_eagle3.raw(**{**kind, **told, "num_hidden_layers": 2, **changes})


def speculators(layer: Mapping[str, Any] = {}, **changes: Any) -> dict[str, Any]:
    """In the layout of vLLM's library."""
    proposals = [{"proposal_type": "greedy", "speculative_tokens": 6}]
    method = {"algorithm": "peagle", "default_proposal_method": "greedy"}
    kind = {
        "architectures": ["PEagleSpeculator"],
        "mask_token_id": MASK,
        "speculators_config": {**method, "proposal_methods": proposals},
        "speculators_model_type": "peagle",
    }
    layer = {"num_hidden_layers": LAYERS, **layer}
    return reference_eagle3.speculators(layer, **{**kind, **changes})


def random_tensors(config: Config, seed: int = 0, flat: bool = False) -> dict[str, Array]:
    """Random tensors of a P-EAGLE file. flat: whether the learned vector is [1, m*D]."""
    told = {**config, **config.get("transformer_layer_config", {})}
    tensors = reference_eagle3.random_tensors(config, seed, embeds=True)
    norms = "qk" if any("q_norm" in name for name in tensors) else ""
    layer = layer_shapes(told, norms=norms, biases="qkvo" if told.get("attention_bias") else "")
    wanted = {
        f"layers.{i}.{name}": shape
        for i in range(1, told["num_hidden_layers"])
        for name, shape in layer.items()
    }
    tensors |= random_weights(wanted, seed + 1)
    count = tensors["fc.weight"].shape[1]
    learned = np.random.default_rng(seed + 2).standard_normal((1, 1, count)).astype(np.float32)
    tensors["mask_hidden"] = learned[0] if flat else learned
    if config["architectures"] == ["LlamaEagle3DraftModel"]:
        outside = ("mask_hidden", "lm_head.weight", "d2t", "t2d")
        tensors = {n.replace("midlayer", "layers.0"): t for n, t in tensors.items()}
        tensors = {n if n in outside else f"model.{n}": t for n, t in tensors.items()}
    return tensors


def case(config: dict[str, Any], **more: Any) -> tuple[dict[str, Any], dict[str, Array]]:
    return config, random_tensors(config, **more)


SLIDING = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 9}
FORMATS: dict[str, tuple[dict[str, Any], dict[str, Array]]] = {
    "raw": case(raw(), flat=True),
    "raw, biased": case(raw(attention_bias=True, pard_token=MASK)),
    "raw, one layer": case(raw(num_hidden_layers=1)),
    "specforge": case(raw(architectures=["PEagleDraftModel"], norm_before_residual=True)),
    "automodel": case(automodel()),
    "automodel, norms per layer": case(automodel(fc_norm=True, norm_output=True)),
    "speculators": case(speculators()),
    "speculators, of Qwen3": case(speculators({"model_type": "qwen3"}, norm_before_fc=True)),
    "speculators, sliding": case(speculators(SLIDING)),
}
