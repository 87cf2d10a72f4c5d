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
from support.reference_dflash import Array, Config, mlp, rms_norm, rope_theta, rotate

DRAFT_IDS = np.sort(np.random.default_rng(3).permutation(VOCAB_SIZE)[:40])
TAPS = [0, 1, 2]
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
    keys: list[Array] = []
    values: list[Array] = []
    for token, h in zip(tokens[1:], fused[:-1], strict=True):
        enter(layer, told, embedding[token], h, keys, values)
    h = fused[-1]
    for token in path:
        out = row(layer, told, embedding[token], h, keys, values)
        final = rms_norm(out, weights["norm.weight"], told["rms_norm_eps"])
        h = final if told.get("norm_output") else out
    if "lm_head.weight" not in weights:
        return final @ np.asarray(tables[1], np.float64).T
    own = weights["lm_head.weight"] @ final
    if len(own) == VOCAB_SIZE:
        return own
    whole = np.full(VOCAB_SIZE, -np.inf)
    for draft_id, offset in enumerate(tensors["d2t"]):
        whole[draft_id + offset] = own[draft_id]
    return whole


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


def enter(
    layer: Mapping[str, Array],
    config: Config,
    x: Array,
    h: Array,
    keys: list[Array],
    values: list[Array],
) -> Array:
    """The queries [H, D] of one more row, whose key and value join those before it."""
    eps, position = config["rms_norm_eps"], len(keys)
    normed = rms_norm(h, layer["hidden_norm.weight"], eps)
    both = np.concatenate([rms_norm(x, layer["input_layernorm.weight"], eps), normed])

    def heads(name: str, turns: bool) -> Array:
        found = layer[f"self_attn.{name}_proj.weight"] @ both
        found = found + layer.get(f"self_attn.{name}_proj.bias", 0)
        found = found.reshape(-1, config["head_dim"])
        if turns and f"self_attn.{name}_norm.weight" in layer:
            found = rms_norm(found, layer[f"self_attn.{name}_norm.weight"], eps)
        return rotate(found[None], np.array([position]), rope_theta(config))[0] if turns else found

    keys.append(heads("k", True))
    values.append(heads("v", False))
    return heads("q", True)


def row(
    layer: Mapping[str, Array],
    config: Config,
    x: Array,
    h: Array,
    keys: list[Array],
    values: list[Array],
) -> Array:
    """The layer's output [d] for one more row, which joins those before it."""
    queries = enter(layer, config, x, h, keys, values)
    slides = config.get("layer_types") == ["sliding_attention"]
    first = max(0, len(keys) - config["sliding_window"]) if slides else 0
    groups, outputs = len(queries) // len(keys[0]), []
    for i, query in enumerate(queries):
        scores = np.array([key[i // groups] @ query for key in keys[first:]])
        chances = np.exp((scores - scores.max()) / np.sqrt(config["head_dim"]))
        seen = np.array([value[i // groups] for value in values[first:]])
        outputs.append(chances / chances.sum() @ seen)
    eps, before = config["rms_norm_eps"], config.get("norm_before_residual")
    residual = rms_norm(h, layer["hidden_norm.weight"], eps) if before else h
    mixed = layer["self_attn.o_proj.weight"] @ np.concatenate(outputs)
    y = residual + mixed + layer.get("self_attn.o_proj.bias", 0)
    return y + mlp(layer, rms_norm(y, layer["post_attention_layernorm.weight"], eps))


# Tiny drafters for the tiny llama


def raw(**changes: Any) -> dict[str, Any]:
    """A config.json in the authors' layout, of a drafter with a draft vocabulary."""
    layer = {**BASE, "num_hidden_layers": 1, "tie_word_embeddings": False, "hidden_act": "silu"}
    read = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": TAPS}}
    kind = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    return {**layer, **kind, "draft_vocab_size": len(DRAFT_IDS), **read, **changes}


def speculators(layer: Mapping[str, Any] = {}, **changes: Any) -> dict[str, Any]:
    """A config.json in the layout of vLLM's library. layer: of its `transformer_layer_config`."""
    own = {k: v for k, v in raw().items() if k not in ("architectures", "eagle_config")}
    own["auto_map"] = {"": "config.Eagle3SpeculatorConfig"}  # as the library writes it
    del own["draft_vocab_size"]
    return {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": len(DRAFT_IDS),
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in TAPS],
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
    d, ff, dim = told["hidden_size"], told["intermediate_size"], told["head_dim"]
    width, m = config.get("target_hidden_size") or d, len(TAPS)
    q, kv = told["num_attention_heads"] * dim, told["num_key_value_heads"] * dim
    layer = {
        "hidden_norm": (d,), "input_layernorm": (d,), "post_attention_layernorm": (d,),
        "self_attn.q_proj": (q, 2 * d), "self_attn.k_proj": (kv, 2 * d),
        "self_attn.v_proj": (kv, 2 * d), "self_attn.o_proj": (d, q),
        "mlp.gate_proj": (ff, d), "mlp.up_proj": (ff, d), "mlp.down_proj": (d, ff),
    }  # fmt: skip
    if "transformer_layer_config" in config and told["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
    found = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    if told.get("attention_bias"):
        rows = {"q": q, "k": kv, "v": kv, "o": d}
        found |= {f"midlayer.self_attn.{n}_proj.bias": (size,) for n, size in rows.items()}
    found |= {"fc.weight": (d, m * width), "norm.weight": (d,)}
    if config.get("norm_before_fc"):
        found["input_norm.weight"] = (m * width,)
    if config.get("fc_norm"):
        found |= {f"fc_norm.{i}.weight": (width,) for i in range(m)}
    return found


def random_tensors(config: Config, seed: int = 0, embeds: bool = False) -> dict[str, Array]:
    """Norms near one, matrices that keep variance; head and maps of a draft vocabulary."""
    rng = np.random.default_rng(seed)
    told = {**config, **config.get("transformer_layer_config", {})}
    wanted, size = shapes(config), config.get("draft_vocab_size")
    if size is not None:
        wanted["lm_head.weight"] = (size, told["hidden_size"])
    if embeds:
        wanted["embed_tokens.weight"] = (VOCAB_SIZE, told["hidden_size"])
    tensors = {}
    for name, shape in wanted.items():
        noise = rng.standard_normal(shape)
        value = 1.0 + 0.1 * noise if len(shape) == 1 else noise * 1.5 / np.sqrt(shape[-1])
        tensors[name] = value.astype(np.float32)
    if size == len(DRAFT_IDS):
        tensors["d2t"] = np.asarray(DRAFT_IDS - np.arange(size), np.int64)
        tensors["t2d"] = np.isin(np.arange(VOCAB_SIZE), DRAFT_IDS)
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
        raw(
            eagle_config={"eagle_aux_hidden_state_layer_ids": TAPS, "use_aux_hidden_state": True},
            norm_before_residual=True,
        )
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
