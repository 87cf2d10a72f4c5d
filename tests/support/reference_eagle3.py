"""An EAGLE-3 drafter in straight NumPy float64, and tiny random ones in every published layout.

Written from arXiv 2503.01840 and the layouts of the published files. Row by row, each with its own
attention over all rows before it. Imports no mlx.

Letters: d hidden size, D of the target, m layers read, T committed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from support.family_configs import BASE, VOCAB_SIZE
from support.reference_dflash import (
    DRAFT_IDS,
    Array,
    Config,
    Tensors,
    attention,
    draft_vocabulary,
    layer_shapes,
    mlp,
    over_vocabulary,
    random_weights,
    rms_norm,
)

TAPS = [0, 1, 2]
LAYERS_READ = "eagle_aux_hidden_state_layer_ids"
WIDTH = 64  # of the target


def logits(
    tensors: Mapping[str, Array],
    config: Config,
    tables: tuple[Array, Array],
    tokens: Sequence[int],
    features: Array,
    path: Sequence[int],
) -> Array:
    """[V] for what follows `path`, -inf for tokens that the drafter does not know.

    tables: the target's embedding and head. tokens: T committed ones. features: [T, m*D]. path: the
    anchor and drafted tokens.
    """
    weights = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
    layer = weights_of_layer(weights)
    told = {**config, **config.get("transformer_layer_config", {})}
    embedding = weights.get("embed_tokens.weight", np.asarray(tables[0], np.float64))
    fused = fuse(weights, told, np.asarray(features, np.float64))
    eps, h = told["rms_norm_eps"], fused[-1]
    rows = [
        joined(layer, eps, embedding[token], before)
        for token, before in zip(tokens[1:], fused[:-1], strict=True)
    ]
    for token in path:
        rows.append(joined(layer, eps, embedding[token], h))
        out = layer_output(layer, told, np.stack(rows), h)
        final = rms_norm(out, weights["norm.weight"], eps)
        h = final if told.get("norm_output") else out
    if "lm_head.weight" not in weights:
        return final @ np.asarray(tables[1], np.float64).T
    return over_vocabulary(weights["lm_head.weight"] @ final, tensors)


def weights_of_layer(weights: Mapping[str, Array]) -> dict[str, Array]:
    """The one layer's, by their names in it."""
    parts = {n.removeprefix("midlayer.").removeprefix("layers.0."): w for n, w in weights.items()}
    return {n: w for n, w in parts.items() if n not in weights}


def fuse(weights: Mapping[str, Array], config: Config, features: Array) -> Array:
    """H of the committed tokens, [T, d]."""
    eps = config["rms_norm_eps"]
    if config.get("norm_before_fc"):
        features = rms_norm(features, weights["input_norm.weight"], eps)
    if config.get("fc_norm"):
        parts = np.split(features, len(TAPS), axis=-1)
        normed = [rms_norm(p, weights[f"fc_norm.{i}.weight"], eps) for i, p in enumerate(parts)]
        features = np.concatenate(normed, axis=-1)
    return features @ weights["fc.weight"].T


def joined(layer: Tensors, eps: float, x: Array, h: Array) -> Array:
    """[2 * d] what attention reads of a row: an embedding and a state, each normed."""
    normed = rms_norm(h, layer["hidden_norm.weight"], eps)
    return np.concatenate([rms_norm(x, layer["input_layernorm.weight"], eps), normed])


def layer_output(layer: Tensors, config: Config, rows: Array, h: Array) -> Array:
    """The layer's output [d] for the last of the rows, whose state is h."""
    visible, eps = np.ones((1, len(rows)), dtype=bool), config["rms_norm_eps"]
    if config.get("layer_types") == ["sliding_attention"]:
        visible[:, : -config["sliding_window"]] = False
    before = config.get("norm_before_residual")
    residual = rms_norm(h, layer["hidden_norm.weight"], eps) if before else h
    y = residual + attention(layer, config, rows[-1:], rows[:-1], visible)[0]
    return y + mlp(layer, rms_norm(y, layer["post_attention_layernorm.weight"], eps))


# Tiny drafters for the tiny llama


def raw(**changes: Any) -> dict[str, Any]:
    """A config.json in the authors' layout, of a drafter with a draft vocabulary."""
    layer = {**BASE, "num_hidden_layers": 1, "tie_word_embeddings": False, "hidden_act": "silu"}
    read = {"eagle_config": {LAYERS_READ: TAPS}}
    kind = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    return {**layer, **kind, "draft_vocab_size": len(DRAFT_IDS), **read, **changes}


def inner(**changes: Any) -> dict[str, Any]:
    """As `raw`, with these fields of eagle_config."""
    return raw(eagle_config={**raw()["eagle_config"], **changes})


def speculators(layer: Mapping[str, Any] = {}, **changes: Any) -> dict[str, Any]:
    """A config.json in the layout of vLLM's library. layer: of its `transformer_layer_config`."""
    own = {k: v for k, v in raw().items() if k not in ("architectures", "eagle_config")}
    own["auto_map"] = {"": "config.Eagle3SpeculatorConfig"}  # as the library writes it
    del own["draft_vocab_size"]
    return {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": len(DRAFT_IDS),
        LAYERS_READ: [i + 1 for i in TAPS],
        "embed_requires_grad": False,
        "norm_before_residual": True,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny/llama"}},
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {**own, **layer},
        **changes,
    }


def ours(**changes: Any) -> dict[str, Any]:
    """A config.json as training writes it."""
    return raw(draft_vocab_size=None, block_size=6, num_target_layers=3, **changes)


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Of the tensors that every layout has, by their names in raw files."""
    told = {**config, **config.get("transformer_layer_config", {})}
    d = told["hidden_size"]
    width, m = config.get("target_hidden_size") or d, len(TAPS)
    qwen = "transformer_layer_config" in config and told["model_type"] == "qwen3"
    biases = "qkvo" if told.get("attention_bias") else ""
    layer = layer_shapes(told, 2 * d, "qk" if qwen else "", biases) | {"hidden_norm.weight": (d,)}
    found = {f"midlayer.{name}": shape for name, shape in layer.items()}
    found |= {"fc.weight": (d, m * width), "norm.weight": (d,)}
    if config.get("norm_before_fc"):
        found["input_norm.weight"] = (m * width,)
    if config.get("fc_norm"):
        found |= {f"fc_norm.{i}.weight": (width,) for i in range(m)}
    return found


def random_tensors(config: Config, seed: int = 0, embeds: bool = False) -> dict[str, Array]:
    """Norms near one, matrices that keep variance; head and maps of a draft vocabulary."""
    told = {**config, **config.get("transformer_layer_config", {})}
    wanted, size = shapes(config), config.get("draft_vocab_size")
    if size is not None:
        wanted["lm_head.weight"] = (size, told["hidden_size"])
    if embeds:
        wanted["embed_tokens.weight"] = (VOCAB_SIZE, told["hidden_size"])
    tensors: dict[str, Array] = dict(random_weights(wanted, seed))
    if size == len(DRAFT_IDS):
        tensors |= draft_vocabulary(DRAFT_IDS)
    if "transformer_layer_config" in config:
        tensors = {n.replace("midlayer.", "layers.0."): a for n, a in tensors.items()}
    return tensors


def case(config: dict[str, Any], **more: Any) -> tuple[dict[str, Any], dict[str, Array]]:
    return config, random_tensors(config, **more)


WHOLE = {"draft_vocab_size": VOCAB_SIZE}
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 5}
NARROW = {"hidden_size": 32, "target_hidden_size": WIDTH}
LEFT = {"verifier_norm.weight": np.ones(WIDTH, np.float32)}

FORMATS: dict[str, tuple[dict[str, Any], dict[str, Array]]] = {
    "raw": case(raw()),
    "raw, own embedding": case(raw(), embeds=True),
    "raw, first uploads": case(raw(architectures=["LlamaForCausalLM"])),
    "raw, whole vocabulary": case(raw(**WHOLE)),
    "raw, narrower than its target": case(raw(**NARROW), embeds=True),
    "raw, biased": case(raw(attention_bias=True)),
    "raw, norm named in eagle_config": case(
        {**inner(use_aux_hidden_state=True), "norm_before_residual": True}
    ),
    "speculators": case(speculators()),
    "speculators, of Qwen3": case(speculators({"model_type": "qwen3"}), embeds=True),
    "speculators, norm after residual": case(speculators(norm_before_residual=False)),
    "speculators, sliding": case(speculators(SLIDING)),
    "3.1": case(speculators(norm_before_fc=True, norm_output=True)),
    "3.1, norms per layer": case(speculators(fc_norm=True, norm_output=True)),
    "3.1, what training leaves": (
        (config := speculators(fc_norm=True, norm_output=True, **WHOLE)),
        {**random_tensors(config), **LEFT},
    ),
    "ours": case(ours()),
    "ours, 3.1": case(ours(norm_before_residual=True, fc_norm=True, norm_output=True)),
}
