"""Heads for multi-token prediction in straight NumPy float64, and tiny ones in every layout.

Written from arXiv 2412.19437 (section 2.2) and from what the published model code of Qwen3-Next and
Qwen3.5 does (transformers for the layer, vLLM for the head). Row by row, each with its own
attention over all rows before it. Tensors are in the layout of the published checkpoints. Imports
no mlx.

Letters: d hidden size, D head dim, T committed tokens, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from support.family_configs import BASE, VOCAB_SIZE
from support.recurrent_families import recurrent
from support.reference_dflash import (
    Array,
    Config,
    layer_shapes,
    random_weights,
    rms_norm,
    rotate,
    softmax,
)

USUAL = {"hidden_normed": True, "hidden_first": False, "feeds_normed": True}
ENDS = ("norm.weight", "norm_embedding.weight", "norm_hidden.weight")  # of names of norms


def logits(
    tensors: Mapping[str, Array],
    config: Config,
    tables: tuple[Array, Array, Array],
    tokens: Sequence[int],
    features: Array,
    path: Sequence[int],
) -> Array:
    """[V] for what follows `path`, the anchor and drafted tokens.

    tables: the target's embedding, head and last norm. tokens: T committed ones. features: [T, d]
    the outputs of the target's last layer.
    """
    head = weights_of(tensors, config)
    text, told = text_of(config), {**USUAL, **config}
    embedding, table, last_norm = (np.asarray(t, np.float64) for t in tables)
    embedding, table = head.get("embed_tokens", embedding), head.get("lm_head", table)
    eps, states = text["rms_norm_eps"], np.asarray(features, np.float64)
    if told["hidden_normed"]:
        states = rms_norm(states, last_norm, eps)

    def pair(token: int, state: Array) -> Array:
        x = rms_norm(embedding[token], head["pre_fc_norm_embedding"], eps)
        h = rms_norm(state, head["pre_fc_norm_hidden"], eps)
        return head["fc"] @ np.concatenate([h, x] if told["hidden_first"] else [x, h])

    layer = {n.removeprefix("layers.0."): w for n, w in head.items() if n.startswith("layers.")}
    committed = [pair(t, h) for t, h in zip(tokens[1:], states[:-1], strict=True)]
    drafted: list[Array] = []
    h = states[-1]
    for depth, token in enumerate(path):
        row = pair(token, h)
        seen = [*committed, *drafted, row]
        places = np.array([*range(len(seen) - 1), len(committed) + depth])
        near = slice(-told.get("sliding_window", len(seen)), None)
        y = decoder_layer(layer, text, np.stack(seen)[near], places[near])
        final = rms_norm(y, head["norm"], eps)
        h = final if told["feeds_normed"] else y
        drafted.append(row)
    return table @ final  # type: ignore[no-any-return]


def text_of(config: Config) -> Config:
    return {**config, **config.get("text_config", {})}


def weights_of(tensors: Mapping[str, Array], config: Config) -> dict[str, Array]:
    """The head's, by names without `mtp.` and `.weight`; norms of 1 + w are worked out here."""
    inside = any(name.startswith("mtp.") for name in tensors)
    found = {}
    for name, array in tensors.items():
        if name.startswith("mtp.") or not inside:
            value = np.asarray(array, np.float64) + (inside and name.endswith(ENDS))
            found[name.removeprefix("mtp.").removesuffix(".weight")] = value
    return found


def decoder_layer(layer: Mapping[str, Array], text: Config, rows: Array, places: Array) -> Array:
    """The output [d] for the last of the rows [n, d], which sees all of them."""
    eps = text["rms_norm_eps"]
    normed = rms_norm(rows, layer["input_layernorm"], eps)
    y = rows[-1] + attention(layer, text, normed, places)
    normed = rms_norm(y, layer["post_attention_layernorm"], eps)
    return y + (experts if "mlp.gate" in layer else swiglu)(layer, text, normed)


def attention(layer: Mapping[str, Array], text: Config, rows: Array, places: Array) -> Array:
    heads, groups, dim = (
        text[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    query, gate = layer["self_attn.q_proj"] @ rows[-1], None
    if "self_attn.q_norm" in layer:  # Qwen3-Next: behind each head's query stands its gate
        query, gate = np.split(query.reshape(heads, 2 * dim), 2, axis=-1)
    queries = query.reshape(1, heads, dim)
    keys = (rows @ layer["self_attn.k_proj"].T).reshape(-1, groups, dim)
    values = (rows @ layer["self_attn.v_proj"].T).reshape(-1, groups, dim)
    share = 1.0
    if gate is not None:
        queries = rms_norm(queries, layer["self_attn.q_norm"], text["rms_norm_eps"])
        keys = rms_norm(keys, layer["self_attn.k_norm"], text["rms_norm_eps"])
        share = rope(text).get("partial_rotary_factor", 0.25)
    queries, keys = turned(queries, places[-1:], share, text), turned(keys, places, share, text)
    out = []
    for i in range(heads):
        k, v = keys[:, i // (heads // groups)], values[:, i // (heads // groups)]
        out.append(softmax(queries[0, i] @ k.T / np.sqrt(dim)) @ v)
    joined = np.concatenate(out)
    if gate is not None:
        joined = joined / (1 + np.exp(-gate.ravel()))
    return layer["self_attn.o_proj"] @ joined  # type: ignore[no-any-return]


def rope(text: Config) -> Config:
    return text.get("rope_parameters") or text


def turned(x: Array, places: Array, share: float, text: Config) -> Array:
    """Heads [n, H, D] of which the first part turns."""
    some = int(x.shape[-1] * share)
    theta = rope(text)["rope_theta"]
    return np.concatenate([rotate(x[..., :some], places, theta), x[..., some:]], axis=-1)


def swiglu(layer: Mapping[str, Array], text: Config, x: Array, place: str = "mlp.") -> Array:
    parts = (layer[f"{place}{n}_proj"] for n in ("gate", "up", "down"))
    return gated(*parts, x)


def gated(gate: Array, up: Array, down: Array, x: Array) -> Array:
    product = gate @ x
    return down @ (product / (1 + np.exp(-product)) * (up @ x))  # type: ignore[no-any-return]


def experts(layer: Mapping[str, Array], text: Config, x: Array) -> Array:
    """The likeliest experts by their weights, and the shared one by its gate."""
    chances = softmax(layer["mlp.gate"] @ x)
    best = np.argsort(-chances)[: text["num_experts_per_tok"]]
    weights = chances[best] / chances[best].sum()
    shared = swiglu(layer, text, x, "mlp.shared_expert.")
    total = shared / (1 + np.exp(-(layer["mlp.shared_expert_gate"] @ x)))
    for expert, weight in zip(best, weights, strict=True):
        total = total + weight * one_expert(layer, int(expert), x)
    return total  # type: ignore[no-any-return]


def one_expert(layer: Mapping[str, Array], expert: int, x: Array) -> Array:
    if "mlp.experts.gate_up_proj" in layer:
        gate, up = np.split(layer["mlp.experts.gate_up_proj"][expert], 2)
        return gated(gate, up, layer["mlp.experts.down_proj"][expert], x)
    if "mlp.switch_mlp.up_proj" in layer:
        return gated(
            *(layer[f"mlp.switch_mlp.{n}_proj"][expert] for n in ("gate", "up", "down")), x
        )
    return swiglu(layer, {}, x, f"mlp.experts.{expert}.")


# Tiny heads for the tiny llama, and for a tiny Qwen3.5

LLAMA: dict[str, Any] = {**BASE, "model_type": "llama"}
QWEN: dict[str, Any] = recurrent(
    "qwen3_5_text",
    num_experts=0,
    mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    rope_parameters={
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000.0,
        "rope_type": "default",
    },
)
MOE = {**recurrent("qwen3_5_moe_text"), **{k: v for k, v in QWEN.items() if "num_exp" not in k}}
MOE = {**MOE, "model_type": "qwen3_5_moe_text"}
UNTOLD = recurrent("qwen3_next", partial_rotary_factor=0.5)  # published so, with a head
NEXT = {**UNTOLD, "mtp_num_hidden_layers": 1}


def ours(text: Mapping[str, Any] = LLAMA, **changes: Any) -> dict[str, Any]:
    """A config.json as training and conversion write it."""
    usual = {"architectures": ["MTPDraftModel"], "text_config": dict(text), "block_size": 6}
    return {**usual, **changes}


def target(text: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of the whole model, as Qwen publishes it."""
    kind = str(text["model_type"]).removesuffix("_text")
    name = "Qwen3_5MoeForConditionalGeneration" if "moe" in kind else "Qwen3_5ForCausalLM"
    return {"architectures": [name], "model_type": kind, "text_config": dict(text)}


def split(text: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A config.json as mlx-vlm writes it for a head by itself."""
    usual = {"block_size": 3, "tie_word_embeddings": False, "text_config": dict(text)}
    return {"model_type": "qwen3_5_mtp", **usual, **changes}


def shapes(text: Config, fused: bool = True) -> dict[str, tuple[int, ...]]:
    """Of the tensors of a head, by their names in split folders; experts as published."""
    d, qwen = text["hidden_size"], str(text["model_type"]).startswith("qwen3_")
    layer = layer_shapes({**text, "enable_qwen35_gated_q_proj": qwen}, norms="qk" if qwen else "")
    if qwen and text["num_experts"]:
        layer = {name: shape for name, shape in layer.items() if "mlp" not in name}
        layer |= expert_shapes(text, fused)
    head = {"fc.weight": (d, 2 * d), "norm.weight": (d,)}
    head |= {f"pre_fc_norm_{name}.weight": (d,) for name in ("embedding", "hidden")}
    return head | {f"layers.0.{name}": shape for name, shape in layer.items()}


def expert_shapes(text: Config, fused: bool) -> dict[str, tuple[int, ...]]:
    d, width, count = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    shared = text["shared_expert_intermediate_size"]
    found = {"mlp.gate.weight": (count, d), "mlp.shared_expert_gate.weight": (1, d)}
    places = {"mlp.shared_expert": shared}
    if fused:
        found["mlp.experts.gate_up_proj"] = (count, 2 * width, d)
        found["mlp.experts.down_proj"] = (count, d, width)
    else:
        places |= {f"mlp.experts.{i}": width for i in range(count)}
    for place, size in places.items():
        found |= {f"{place}.{n}_proj.weight": (size, d) for n in ("gate", "up")}
        found[f"{place}.down_proj.weight"] = (d, size)
    return found


def random_head(text: Config, fused: bool = True, seed: int = 0) -> dict[str, Array]:
    """Norms as far from one as published ones are, matrices that keep variance."""
    found: dict[str, Array] = dict(random_weights(shapes(text, fused), seed))
    for name, array in found.items():
        if array.ndim > 1:  # so that float32 keeps six steps of it exact to 1e-4
            found[name] = array * np.float32(0.7)
        if "q_norm" in name or "k_norm" in name:
            found[name] = array + np.float32(0.75)
        if "pre_fc_norm_embedding" in name:
            found[name] = array - np.float32(0.45)
    return found


def inside(head: Mapping[str, Array]) -> dict[str, Array]:
    """Tensors of a target's folder: norms as weight - 1, and some of the target's own."""
    found = {f"mtp.{n}": a - np.float32(n.endswith(ENDS)) for n, a in head.items()}
    norm = np.zeros(64, np.float32)
    names = ("norm.weight", "layers.1.input_layernorm.weight")
    return {**found, **{f"model.language_model.{name}": norm for name in names}}


def switched(head: Mapping[str, Array]) -> dict[str, Array]:
    """With experts as mlx-lm has them."""
    found = {name: a for name, a in head.items() if "experts." not in name}
    place = "layers.0.mlp.experts."
    both, down = head[f"{place}gate_up_proj"], head[f"{place}down_proj"]
    gate, up = np.split(both, 2, axis=1)
    parts = {"gate": gate, "up": up, "down": down}
    return found | {f"layers.0.mlp.switch_mlp.{n}_proj.weight": a for n, a in parts.items()}


Case = tuple[dict[str, Any], dict[str, Array]]


def case(config: dict[str, Any], head: Callable[[Config], dict[str, Array]] = random_head) -> Case:
    return config, head(text_of(config))


VARIANTS = {name: not usual for name, usual in USUAL.items()}
OWN = {"own_embedding": True, "own_head": True}


def with_tables(text: Config) -> dict[str, Array]:
    """A head that brings embedding and vocabulary matrix."""
    rng, size = np.random.default_rng(5), (VOCAB_SIZE, 64)
    names = ("embed_tokens.weight", "lm_head.weight")
    tables = {name: (rng.standard_normal(size) / 8).astype(np.float32) for name in names}
    return random_head(text) | tables


FORMATS: dict[str, Case] = {
    "ours": case(ours()),
    "ours, own tables": case(ours(**OWN), with_tables),
    **{f"ours, {name}": case(ours(**{name: not usual})) for name, usual in USUAL.items()},
    "ours, all variants": case(ours(**VARIANTS)),
    "ours, qwen3_5": case(ours(QWEN)),
    "qwen3_5": case(target(QWEN), lambda text: inside(random_head(text))),
    "qwen3_5, split": case(split(QWEN)),
    "qwen3_5_moe": case(target(MOE), lambda text: inside(random_head(text))),
    "qwen3_5_moe, split": case(split(MOE), lambda text: switched(random_head(text))),
    "qwen3_next": case(UNTOLD, lambda text: inside(random_head(text, False))),
}
