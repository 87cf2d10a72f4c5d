"""The layers of DeepSpec's drafters for Gemma 4 in straight NumPy float64.

Written from the published module's equations; one head at a time. Letters as in
`reference_dflash.py`.
"""

from typing import Any

import numpy as np

from support.reference_dflash import (
    Array,
    Config,
    Tensors,
    layer_tensors,
    random_weights,
    rms_norm,
    softmax,
)

NAME = "Gemma4DSparkModel"
CONFIG: dict[str, Any] = {  # fields that such a file has beside DSpark's
    "architectures": [NAME],
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 32,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "model_type": "gemma4_text",
    "num_global_key_value_heads": 1,
    "num_key_value_heads": 2,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}


def is_gemma(config: Config) -> bool:
    return bool(config.get("architectures") == [NAME])


def kv_heads(config: Config) -> int:
    shares = "global_" if config["attention_k_eq_v"] else ""
    return int(config[f"num_{shares}key_value_heads"])


def random_tensors(config: Config, seed: int = 0) -> dict[str, Array]:
    """Draw float32 weights of the network without heads and tables."""
    d, ff, dim = config["hidden_size"], config["intermediate_size"], config["global_head_dim"]
    queries, keys = config["num_attention_heads"] * dim, kv_heads(config) * dim
    layer = {
        **{f"{n}_layernorm.weight": (d,) for n in ("input", "post_attention")},
        **{f"{n}_feedforward_layernorm.weight": (d,) for n in ("pre", "post")},
        "self_attn.q_proj.weight": (queries, d),
        "self_attn.k_proj.weight": (keys, d),
        **({} if config["attention_k_eq_v"] else {"self_attn.v_proj.weight": (keys, d)}),
        "self_attn.o_proj.weight": (d, queries),
        **{f"self_attn.{n}_norm.weight": (dim,) for n in "qk"},
        "mlp.gate_proj.weight": (ff, d),
        "mlp.up_proj.weight": (ff, d),
        "mlp.down_proj.weight": (d, ff),
    }
    shapes = {"fc.weight": (d, 2 * d), "hidden_norm.weight": (d,), "norm.weight": (d,)}
    layers = range(config["num_hidden_layers"])
    shapes |= {f"layers.{i}.{name}": shape for i in layers for name, shape in layer.items()}
    tensors: dict[str, Array] = dict(random_weights(shapes, seed))
    scalars = {f"layers.{i}.layer_scalar": np.array([0.75 + i], np.float32) for i in layers}
    return tensors | scalars


def hidden_states(tensors: Tensors, config: Config, x: Array, features: Array) -> Array:
    """Return the final states [B, d] of a block with embeddings x [B, d] after features [T, m*d].

    Every row sees the context and the whole block.
    """
    eps = config["rms_norm_eps"]
    context = rms_norm(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    for index in range(config["num_hidden_layers"]):
        layer = layer_tensors(tensors, index)

        def norm(name: str, rows: Array, layer: Tensors = layer) -> Array:
            return rms_norm(rows, layer[f"{name}_layernorm.weight"], eps)

        attended = _attention(layer, config, norm("input", x), context)
        x = x + norm("post_attention", attended)
        x = x + norm("post_feedforward", _mlp(layer, norm("pre_feedforward", x)))
        x = x * layer["layer_scalar"]
    return rms_norm(x, tensors["norm.weight"], eps)


def _mlp(layer: Tensors, x: Array) -> Array:
    gate, up = x @ layer["mlp.gate_proj.weight"].T, x @ layer["mlp.up_proj.weight"].T
    bent = np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))
    return 0.5 * gate * (1 + bent) * up @ layer["mlp.down_proj.weight"].T


def _attention(layer: Tensors, config: Config, x: Array, context: Array) -> Array:
    heads, groups, dim = config["num_attention_heads"], kv_heads(config), config["global_head_dim"]
    eps, sources = config["rms_norm_eps"], np.concatenate([context, x])
    places, values_of = np.arange(len(sources)), "k" if config["attention_k_eq_v"] else "v"

    def projected(name: str, rows: Array, count: int) -> Array:
        return (rows @ layer[f"self_attn.{name}_proj.weight"].T).reshape(-1, count, dim)

    def turned(name: str, rows: Array, count: int) -> Array:
        normed = rms_norm(projected(name, rows, count), layer[f"self_attn.{name}_norm.weight"], eps)
        return _rotate(normed, places[-len(rows) :], config)

    queries, keys = turned("q", x, heads), turned("k", sources, groups)
    values = rms_norm(projected(values_of, sources, groups), np.ones(dim), eps)
    outputs = []
    for head in range(heads):
        shared = head // (heads // groups)
        outputs.append(softmax(queries[:, head] @ keys[:, shared].T) @ values[:, shared])
    return np.concatenate(outputs, axis=-1) @ layer["self_attn.o_proj.weight"].T


def _rotate(x: Array, positions: Array, config: Config) -> Array:
    """Dimension i of x [T, heads, D] turns with i + D/2; only the first of them turn at all."""
    rope, dim = config["rope_parameters"]["full_attention"], x.shape[-1]
    turning = int(rope["partial_rotary_factor"] * dim) // 2
    frequencies = np.zeros(dim // 2)
    frequencies[:turning] = rope["rope_theta"] ** (-2 * np.arange(turning) / dim)
    angles = (positions[:, None] * frequencies)[:, None, :]
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
