"""A DFlash v1 drafter in straight NumPy float64, to test the real one against.

Written from the equations of arXiv 2602.06036 and the published checkpoint layout; it recomputes
the whole context on every call, loops where that is clearer, and imports no mlx.

Letters: d hidden size, D head dim, H and G query and key-value heads, T context positions (all
positions before the anchor), B block positions (the anchor and masks), m taps, V vocabulary.
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from support.family_configs import BASE, VOCAB_SIZE

Array = NDArray[Any]
Config = Mapping[str, Any]
Tensors = Mapping[str, Array]
DRAFT_IDS = np.sort(np.random.default_rng(3).permutation(VOCAB_SIZE)[:40])  # a draft vocabulary
Around = Callable[[Tensors, Config, str, Array, Any], Array]
GATED = "enable_qwen35_gated_q_proj"


class Given(NamedTuple):
    """What a block is drafted from."""

    features: Array  # [T, m*d], the target's hidden states at positions 0..T-1, taps side by side
    anchor: int  # the token at position T
    rows: int | None = None  # of the block, the anchor's too; None for the checkpoint's block size
    prefix: tuple[int, ...] = ()  # drafted tokens behind the anchor that the block shows unmasked


def draft_logits(
    tensors: Tensors,
    config: Config,
    tables: tuple[Array, Array],
    given: Given,
    around: Around | None = None,
) -> Array:
    """Draft one block and return the logits of its masks, [n, V], float64.

    tables: the target's embedding and head, [V, d]. around: applies a sub-layer to its input.
    """
    embedding, lm_head = tables
    method = config["dflash_config"]
    hidden = draft_states(tensors, config, embedding, given, around)
    logits = hidden @ np.asarray(lm_head, np.float64).T * method.get("output_multiplier", 1.0)
    return capped(logits, {**config, **method})


def capped(logits: Array, config: Config) -> Array:
    """Logits under the soft cap of a config that has one."""
    cap = config.get("final_logit_softcapping")
    return np.tanh(logits / cap) * cap if cap else logits


def draft_vocabulary(ids: Array) -> dict[str, Array]:
    """The two maps between a draft vocabulary of these tokens and the whole one."""
    maps = np.asarray(ids - np.arange(len(ids)), np.int64), np.isin(np.arange(VOCAB_SIZE), ids)
    return dict(zip(("d2t", "t2d"), maps, strict=True))


def over_vocabulary(logits: Array, tensors: Tensors) -> Array:
    """[..., V] from what a drafter says of the tokens that it knows, -inf for others."""
    if "d2t" not in tensors:
        return logits
    whole = np.full((*logits.shape[:-1], VOCAB_SIZE), -np.inf)
    whole[..., np.arange(len(tensors["d2t"])) + tensors["d2t"]] = logits
    return whole


def draft_states(
    tensors: Tensors,
    config: Config,
    embedding: Array,
    given: Given,
    around: Around | None = None,
) -> Array:
    """Return the final states of the masks of a block; row k predicts the token at its position."""
    features, anchor, rows, prefix = given
    weights = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    method = config["dflash_config"]
    size = rows or method.get("block_size") or config["block_size"]
    tokens = [anchor, *prefix, *[method["mask_token_id"]] * (size - 1 - len(prefix))]
    x = np.asarray(embedding, np.float64)[tokens] * method.get("input_embedding_scale", 1.0)
    return hidden_states(weights, config, x, features, around or _alone)[1 + len(prefix) :]


def _alone(layer: Tensors, config: Config, name: str, x: Array, sub_layer: Any) -> Array:
    """What the first version does around a sub-layer: nothing."""
    return sub_layer(x)  # type: ignore[no-any-return]


def hidden_states(
    tensors: Tensors, config: Config, x: Array, features: Array, around: Around = _alone
) -> Array:
    """Return the final states [B, d] of a block with embeddings x [B, d] after features [T, m*d].

    Computes in the type of what it is given. around: applies a sub-layer to its normed input.
    """
    eps = config["rms_norm_eps"]
    context = rms_norm(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    lengths = len(context), len(x)
    return decoded(tensors, config, x, context, lambda i: visible_keys(config, i, *lengths), around)


def decoded(
    tensors: Tensors,
    config: Config,
    x: Array,
    context: Array,
    visible: Callable[[int], Array],
    around: Around = _alone,
) -> Array:
    """Return the final states of rows x [B, d]; context [T, d] has keys and values alone.

    visible: for each layer, which of the T + B keys each row sees.
    """
    eps = config["rms_norm_eps"]
    for index in range(config["num_hidden_layers"]):
        layer = layer_tensors(tensors, index)
        normed = rms_norm(x, layer["input_layernorm.weight"], eps)
        attend = partial(attention, layer, config, context=context, visible=visible(index))
        x = x + around(layer, config, "attention", normed, attend)
        normed = rms_norm(x, layer["post_attention_layernorm.weight"], eps)
        x = x + around(layer, config, "mlp", normed, partial(mlp, layer))
    return rms_norm(x, tensors["norm.weight"], eps)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Scale the last axis to unit root mean square, then by weight."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: Array, positions: Array, theta: float, interleaved: bool = False) -> Array:
    """Apply rotary embedding to x [T, heads, D]: dimension i turns with i + D/2 (half-split).

    interleaved: dimension 2i turns with 2i + 1 instead.
    """
    if interleaved:
        apart = np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
        first, second = np.split(rotate(apart, positions, theta), 2, axis=-1)
        return np.stack([first, second], axis=-1).reshape(x.shape)
    half = x.shape[-1] // 2
    frequencies = theta ** (-np.arange(half) / half)
    angles = (positions[:, None] * frequencies)[:, None, :]
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rope_theta(config: Config) -> float:
    """Read the rope base from either published layout; raises ValueError for scaled rope."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"the reference knows default rope only, the config asks for {kind!r}")
    return float(config.get("rope_theta", rope.get("rope_theta", 10000.0)))


def visible_keys(config: Config, layer: int, context_length: int, block_length: int) -> Array:
    """Tell which keys [context, block] each block position of a layer may attend to.

    Returns booleans [B, T + B]. A layer with a sliding window is causal unless the config says
    otherwise, a full layer is not. A window of w reaches w - 1 positions back and, where the layer
    is not causal, w - 1 positions ahead. (The published PyTorch and MLX modules differ when the
    window is shorter than the block: MLX does not apply it inside the block. This is PyTorch's.)
    """
    layer_types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    sliding = layer_types[layer] == "sliding_attention"
    is_causal = config.get("is_causal")
    causal = sliding if is_causal is None else is_causal
    query = context_length + np.arange(block_length)[:, None]
    key = np.arange(context_length + block_length)[None, :]
    visible = np.ones((block_length, context_length + block_length), dtype=bool)
    if causal:
        visible &= key <= query
    if sliding:
        visible &= np.abs(query - key) < config["sliding_window"]
    return visible


def layer_tensors(weights: Tensors, index: int) -> dict[str, Array]:
    """Select one layer's tensors, their names without its prefix."""
    prefix = f"layers.{index}."
    return {n.removeprefix(prefix): weight for n, weight in weights.items() if n.startswith(prefix)}


def mlp(layer: Tensors, x: Array) -> Array:
    """Apply a layer's gated MLP to x [B, d]."""
    gate, up = x @ layer["mlp.gate_proj.weight"].T, x @ layer["mlp.up_proj.weight"].T
    return (gate / (1.0 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T


def attention(layer: Tensors, config: Config, x: Array, context: Array, visible: Array) -> Array:
    """Attend from x [B, d] to the context [T, d] and to x, where visible [B, T + B].

    Biases, and norms of queries and keys, are applied where the layer has them.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    layer, gate = _without_gate(layer, config, x, heads, head_dim)
    turning = int(head_dim * _share_that_turns(config))
    # The context has keys and values in every layer, but no queries and no residual stream.
    sources = np.concatenate([context, x])
    positions, interleaved = np.arange(len(sources)), not config.get("rope_is_neox_style", True)

    def projected(name: str, rows: Array, count: int, turns: bool) -> Array:
        y = rows @ layer[f"self_attn.{name}_proj.weight"].T
        y = (y + layer.get(f"self_attn.{name}_proj.bias", 0)).reshape(-1, count, head_dim)
        if (norm := layer.get(f"self_attn.{name}_norm.weight")) is not None:
            y = rms_norm(y, norm, config["rms_norm_eps"])
        places = positions[len(sources) - len(rows) :]
        if not turns:
            return y
        turned = rotate(y[..., :turning], places, rope_theta(config), interleaved)
        return np.concatenate([turned, y[..., turning:]], axis=-1)

    queries = projected("q", x, heads, True)
    keys, values = projected("k", sources, kv_heads, True), projected("v", sources, kv_heads, False)
    outputs = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = queries[:, head] @ keys[:, shared].T / np.sqrt(head_dim)
        outputs.append(softmax(np.where(visible, scores, -np.inf)) @ values[:, shared])
    out = np.concatenate(outputs, axis=-1) * gate @ layer["self_attn.o_proj.weight"].T
    return out + layer.get("self_attn.o_proj.bias", 0)


def _without_gate(
    layer: Tensors, config: Config, x: Array, heads: int, head_dim: int
) -> tuple[Tensors, Any]:
    """The layer with a projection of queries alone, and what scales the output of heads [B, H*D].

    In Qwen3.5's own layers every head's query is followed by its gate.
    """
    if not config.get(GATED):
        return layer, 1.0
    name = "self_attn.q_proj.weight"
    both = layer[name].reshape(heads, 2, head_dim, -1)
    query, gate = (both[:, i].reshape(heads * head_dim, -1) for i in (0, 1))
    return {**layer, name: query}, 1.0 / (1.0 + np.exp(-(x @ gate.T)))


def _share_that_turns(config: Config) -> float:
    rope = config.get("rope_parameters") or {}
    return float(rope.get("partial_rotary_factor", 1.0)) if config.get(GATED) else 1.0


def softmax(scores: Array) -> Array:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


class LinkedBlock:
    """What a drafter that knows the token before each position says of a block: its walks.

    states: [n, d] of the drafted positions. logits: [n, V] without what is known of that token.
    before: the token that is shown last.
    """

    states: Array
    logits: Array
    before: int

    @abstractmethod
    def scores(self, t: int, before: int) -> dict[int, float]:
        """Of every token that can be drafted at position t after a token."""

    def law(self, t: int, before: int, temperature: float = 1.0) -> dict[int, float]:
        """The probability of every such token."""
        known = self.scores(t, before)
        scores = np.array([*known.values()]) / temperature
        weights = np.exp(scores - scores.max())
        return dict(zip(known, (weights / weights.sum()).tolist(), strict=True))

    def greedy(self) -> list[int]:
        """The walk that takes the best token every time."""
        path = [self.before]
        for t in range(len(self.states)):
            scores = self.scores(t, path[-1])
            path.append(max(scores, key=lambda token: scores[token]))
        return path[1:]

    def path_law(self, temperature: float) -> dict[tuple[int, ...], float]:
        """The probability of every path of the sampled walk; of short blocks only."""
        law: dict[tuple[int, ...], float] = {(): 1.0}
        for t in range(len(self.states)):
            law = {
                (*path, token): chance * share
                for path, chance in law.items()
                for token, share in self.law(t, (self.before, *path)[-1], temperature).items()
            }
        return law


def tiny_drafter_config(**changes: Any) -> dict[str, Any]:
    """Return a small v1 config in the published layout, for the tiny llama.

    Top-level fields are replaced, those of `dflash_config` field by field.
    """
    method = {"mask_token_id": 5, "target_layer_ids": [0, 2], **changes.pop("dflash_config", {})}
    return {
        **BASE,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": 8,
        "dflash_config": method,
        "hidden_act": "silu",
        "num_hidden_layers": 2,
        "num_target_layers": 3,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        **changes,
    }


def layer_shapes(
    config: Config, reads: int = 0, norms: str = "qk", biases: str = ""
) -> dict[str, tuple[int, ...]]:
    """List the tensors of a layer. reads: numbers that attention reads of a position, d without.

    norms, biases: which of q, k, v and o have one.
    """
    d, ff, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", d // heads)
    kv_rows = config["num_key_value_heads"] * head_dim
    outputs = heads * head_dim
    rows = {"q": outputs * (1 + bool(config.get(GATED))), "k": kv_rows, "v": kv_rows}
    return {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        **{f"self_attn.{name}_proj.weight": (size, reads or d) for name, size in rows.items()},
        "self_attn.o_proj.weight": (d, outputs),
        **{f"self_attn.{name}_norm.weight": (head_dim,) for name in norms},
        **{f"self_attn.{name}_proj.bias": (rows.get(name, d),) for name in biases},
        "mlp.gate_proj.weight": (ff, d),
        "mlp.up_proj.weight": (ff, d),
        "mlp.down_proj.weight": (d, ff),
    }


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """List the name and shape of every tensor of a v1 checkpoint."""
    d, aux_layers = config["hidden_size"], len(config["dflash_config"]["target_layer_ids"])
    layer = layer_shapes(config, biases="qkvo" if config["attention_bias"] else "")
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, aux_layers * d),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
    }
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def random_weights(
    shapes: Mapping[str, tuple[int, ...]], seed: int = 0
) -> dict[str, NDArray[np.float32]]:
    """Draw float32 weights: norms near one, small biases, matrices that keep variance."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        scale = 0.3 if len(shape) == 1 else 1.5 / np.sqrt(shape[-1])
        value = 1.0 + 0.1 * noise if "norm" in name else noise * scale
        tensors[name] = value.astype(np.float32)
    return tensors


def random_drafter(config: Config, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Draw weights for every tensor of a v1 checkpoint."""
    return random_weights(tensor_shapes(config), seed)


def write_drafter_folder(folder: Path, config: Config, tensors: Tensors) -> Path:
    """Write config.json and model.safetensors into folder (made if missing); return folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2))
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
