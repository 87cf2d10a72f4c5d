"""Heads for multi-token prediction in straight NumPy float64, and tiny ones as published.

Written from the publishers' model code in vLLM (deepseek_mtp, glm4_moe_mtp, mimo_mtp and its
target mimo, nemotron_h_mtp), SGLang (deepseek_nextn) and the models' own modules. A head computes
all its rows anew for every token, each with attention over all rows before it; its experts one by
one; latent keys and values in full, as DeepSeek's own module does. Imports no mlx.

Letters: d hidden size, n rows, H and G query and key-value heads, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from support.family_configs import BASE, LATENT_ATTENTION, VOCAB_SIZE, WINDOW, sliding
from support.reference_dflash import Array, Config, mlp, random_weights, rms_norm, rotate
from support.reference_layers import (
    Shapes,
    attention,
    attention_shapes,
    causal,
    expert_shapes,
    experts,
    part,
)


class Head:
    """A head: its config.json, which is its target's, and its tensors by their published names."""

    norms: ClassVar[tuple[str, str]]  # of the embedding, of the state
    projection: ClassVar[str]
    last_norm: ClassVar[str]
    hidden_first = False  # whether the state's half comes before the embedding's
    reads_normed = True  # whether the state is read behind the target's last norm
    feeds_normed = True  # whether a drafted row's state is what goes to the head

    def __init__(
        self, raw: Mapping[str, Any], tensors: Mapping[str, Array] | None = None, seed: int = 0
    ) -> None:
        self.raw = raw
        self.tensors = self.drawn(seed) if tensors is None else tensors

    def drawn(self, seed: int) -> dict[str, Array]:
        """Random ones; below 0 programs differ in what a bias of experts does."""
        found: dict[str, Array] = dict(random_weights(self.shapes(), seed))
        return {n: np.abs(a) if "correction_bias" in n else a for n, a in found.items()}

    @property
    @abstractmethod
    def prefix(self) -> str:
        """Of its tensors."""

    @abstractmethod
    def body(self) -> Shapes:
        """Tensors of the layer, by the rest of their names."""

    @abstractmethod
    def layer(self, weights: Mapping[str, Array], x: Array) -> Array:
        """[n, d] -> [n, d], each row seeing those before it."""

    def extra(self) -> Shapes:
        """Copies of the target's tables, which nobody reads."""
        return {}

    def shapes(self) -> Shapes:
        around: Shapes = {f"{name}.weight": (self.d,) for name in (*self.norms, self.last_norm)}
        around[f"{self.projection}.weight"] = (self.d, 2 * self.d)
        return {self.prefix + n: s for n, s in {**around, **self.body(), **self.extra()}.items()}

    @property
    def eps(self) -> float:
        return float(self.raw["rms_norm_eps"])

    @property
    def d(self) -> int:
        return int(self.raw["hidden_size"])

    def logits(
        self, tables: tuple[Array, Array, Array], tokens: Sequence[int], features: Array, path: Any
    ) -> Array:
        """[V] for what follows `path`, the anchor and drafted tokens.

        tables: the target's embedding, head and last norm. tokens: committed ones. features: the
        output of the target's last layer for each of them.
        """
        embedding, head, norm = (np.asarray(table, np.float64) for table in tables)
        own = {
            name.removeprefix(self.prefix): np.asarray(array, np.float64)
            for name, array in self.tensors.items()
        }
        states = np.asarray(features, np.float64)
        if self.reads_normed:
            states = rms_norm(states, norm, self.raw["rms_norm_eps"])  # the tiny llama's
        pairs = [*zip(tokens[1:], states[:-1], strict=True)]
        h = states[-1]
        for token in path:
            pairs.append((token, h))
            rows = np.stack([self.paired(own, embedding[t], state) for t, state in pairs])
            out = self.layer(own, rows)[-1]
            final = rms_norm(out, own[f"{self.last_norm}.weight"], self.eps)
            h = final if self.feeds_normed else out
        return final @ head.T

    def paired(self, own: Mapping[str, Array], embedded: Array, state: Array) -> Array:
        """[d] what the layer reads of a row."""
        inputs = embedded, state
        halves = [
            rms_norm(half, own[f"{name}.weight"], self.eps)
            for half, name in zip(inputs, self.norms, strict=True)
        ]
        both = np.concatenate(halves[::-1] if self.hidden_first else halves)
        return own[f"{self.projection}.weight"] @ both


class PreNorm(Head):
    """A decoder layer with a norm before attention and one before the MLP."""

    def body(self) -> Shapes:
        names = "input_layernorm.weight", "post_attention_layernorm.weight"
        return {**dict.fromkeys(names, (self.d,)), **self.attention_shapes(), **self.mlp_shapes()}

    @abstractmethod
    def attention_shapes(self) -> Shapes:
        """Of `self_attn`."""

    @abstractmethod
    def mlp_shapes(self) -> Shapes:
        """Of `mlp`."""

    def layer(self, weights: Mapping[str, Array], x: Array) -> Array:
        normed = rms_norm(x, weights["input_layernorm.weight"], self.eps)
        x = x + self.attention(part(weights, "self_attn."), normed)
        normed = rms_norm(x, weights["post_attention_layernorm.weight"], self.eps)
        return x + self.feed(weights, normed)

    def attention(self, weights: Mapping[str, Array], x: Array) -> Array:
        return attention(weights, self.raw, x)

    def feed(self, weights: Mapping[str, Array], x: Array) -> Array:
        return experts(part(weights, "mlp."), self.raw, x, gated=True)


class Glm(PreNorm):
    """GLM 4.5 to 4.7: layer `num_hidden_layers` of the target, with experts."""

    norms, projection, last_norm = ("enorm", "hnorm"), "eh_proj", "shared_head.norm"

    @property
    def prefix(self) -> str:
        return f"model.layers.{self.raw['num_hidden_layers']}."

    def extra(self) -> Shapes:
        return dict.fromkeys(
            ("embed_tokens.weight", "shared_head.head.weight"), (self.raw["vocab_size"], self.d)
        )

    def attention_shapes(self) -> Shapes:
        return attention_shapes(self.raw, "qk" if self.raw["use_qk_norm"] else "")

    def mlp_shapes(self) -> Shapes:
        return expert_shapes(self.raw, ("gate_proj", "up_proj", "down_proj"), "mlp.")


class DeepSeek(Glm):
    """DeepSeek V3, and GLM-4-MoE-lite: as GLM, with attention over latent keys and values."""

    def attention_shapes(self) -> Shapes:
        raw, heads = self.raw, self.raw["num_attention_heads"]
        rank, turns = raw["kv_lora_rank"], raw["qk_rope_head_dim"]
        keys, values = raw["qk_nope_head_dim"], raw["v_head_dim"]
        shapes: Shapes = {
            "q_a_proj.weight": (raw["q_lora_rank"], self.d),
            "q_a_layernorm.weight": (raw["q_lora_rank"],),
            "q_b_proj.weight": (heads * (keys + turns), raw["q_lora_rank"]),
            "kv_a_proj_with_mqa.weight": (rank + turns, self.d),
            "kv_a_layernorm.weight": (rank,),
            "kv_b_proj.weight": (heads * (keys + values), rank),
            "o_proj.weight": (self.d, heads * values),
        }
        return {f"self_attn.{name}": shape for name, shape in shapes.items()}

    def attention(self, weights: Mapping[str, Array], x: Array) -> Array:
        raw, heads, n = self.raw, self.raw["num_attention_heads"], len(x)
        rank, keys = raw["kv_lora_rank"], raw["qk_nope_head_dim"]
        places = np.arange(n)
        low = rms_norm(x @ weights["q_a_proj.weight"].T, weights["q_a_layernorm.weight"], self.eps)
        queries = (low @ weights["q_b_proj.weight"].T).reshape(n, heads, -1)
        latent = x @ weights["kv_a_proj_with_mqa.weight"].T
        normed = rms_norm(latent[:, :rank], weights["kv_a_layernorm.weight"], self.eps)
        both = (normed @ weights["kv_b_proj.weight"].T).reshape(n, heads, -1)
        theta = raw["rope_theta"]
        turned = rotate(queries[..., keys:], places, theta, interleaved=True)
        shared = rotate(latent[:, None, rank:], places, theta, interleaved=True)
        outputs = []
        for head in range(heads):
            scores = queries[:, head, :keys] @ both[:, head, :keys].T
            scores = (scores + turned[:, head] @ shared[:, 0].T) / np.sqrt(queries.shape[-1])
            outputs.append(causal(scores) @ both[:, head, keys:])
        return np.concatenate(outputs, axis=-1) @ weights["o_proj.weight"].T


class MiMo(PreNorm):
    """MiMo: Qwen2's layer, the state's half first, the state before the target's last norm."""

    norms, projection = ("token_layernorm", "hidden_layernorm"), "input_proj"
    last_norm, prefix = "final_layernorm", "model.mtp_layers.0."
    hidden_first, reads_normed, feeds_normed = True, False, False

    def attention_shapes(self) -> Shapes:
        return attention_shapes(self.raw)

    def mlp_shapes(self) -> Shapes:
        rows = self.raw["intermediate_size"]
        shapes = {"gate": (rows, self.d), "up": (rows, self.d), "down": (self.d, rows)}
        return {f"mlp.{name}_proj.weight": shape for name, shape in shapes.items()}

    def feed(self, weights: Mapping[str, Array], x: Array) -> Array:
        return mlp(weights, x)


class Exaone(MiMo):
    """K-EXAONE: a dense layer, which does not turn since its target has sliding windows."""

    norms, projection = ("pre_fc_norm_embedding", "pre_fc_norm_hidden"), "fc"
    last_norm, prefix = "norm", "mtp."
    hidden_first, reads_normed, feeds_normed = False, True, True

    def body(self) -> Shapes:
        return {f"layers.0.{name}": shape for name, shape in super().body().items()}

    def attention_shapes(self) -> Shapes:
        return attention_shapes(self.raw, "qk")

    def layer(self, weights: Mapping[str, Array], x: Array) -> Array:
        return super().layer(part(weights, "layers.0."), x)

    def attention(self, weights: Mapping[str, Array], x: Array) -> Array:
        return attention(weights, {**self.raw, "partial_rotary_factor": 0}, x)


class NemotronH(Head):
    """Nemotron-H: two blocks, attention without positions and experts behind one activation."""

    norms, projection, prefix = ("layers.0.enorm", "layers.0.hnorm"), "layers.0.eh_proj", "mtp."
    last_norm = "layers.1.final_layernorm"

    @property
    def eps(self) -> float:
        return float(self.raw["layer_norm_epsilon"])

    def body(self) -> Shapes:
        first = attention_shapes({**self.raw, "attention_bias": False}, place="mixer.")
        second = expert_shapes(self.raw, ("up_proj", "down_proj"), "mixer.")
        return {
            **{f"layers.0.{name}": shape for name, shape in first.items()},
            **{f"layers.1.{name}": shape for name, shape in second.items()},
            **dict.fromkeys(("layers.0.norm.weight", "layers.1.norm.weight"), (self.d,)),
        }

    def layer(self, weights: Mapping[str, Array], x: Array) -> Array:
        first, second = part(weights, "layers.0."), part(weights, "layers.1.")
        normed = rms_norm(x, first["norm.weight"], self.eps)
        x = x + attention(part(first, "mixer."), {**self.raw, "partial_rotary_factor": 0}, normed)
        normed = rms_norm(x, second["norm.weight"], self.eps)
        return x + experts(part(second, "mixer."), self.raw, normed, gated=False)


# Tiny ones, each the config.json of a target that mlx-lm loads

D, EXPERTS = BASE["hidden_size"], 4
_EXPERTS: dict[str, Any] = {
    **{"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **{"moe_intermediate_size": 32, "routed_scaling_factor": 1.5, "norm_topk_prob": True},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
_COMMON: dict[str, Any] = {
    **BASE,
    **{"tie_word_embeddings": False, "attention_bias": False, "rope_scaling": None},
    "num_nextn_predict_layers": 1,
}
GLM: dict[str, Any] = {
    **_COMMON,
    **_EXPERTS,
    **{"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]},
    **{"attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5},
}
DEEPSEEK: dict[str, Any] = {
    **_COMMON,
    **_EXPERTS,
    **LATENT_ATTENTION,
    **{"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
    **{"num_key_value_heads": 4, "moe_layer_freq": 1},
    **{"q_lora_rank": 96, "qk_nope_head_dim": 32, "v_head_dim": 64},
}
GLM_LITE: dict[str, Any] = {
    **DEEPSEEK,
    **{"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"]},
}
MIMO: dict[str, Any] = {
    **_COMMON,
    **{"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True},
}
EXAONE: dict[str, Any] = {
    **_COMMON,
    **_EXPERTS,
    **sliding("SFS", WINDOW),
    **{"model_type": "exaone_moe", "architectures": ["ExaoneMoEForCausalLM"]},
    **{"num_experts": EXPERTS, "num_shared_experts": 1, "is_moe_layer": [False, True, True]},
    "mtp_layer_types": ["full_attention"],
}
NEMOTRON: dict[str, Any] = {
    **_COMMON,
    **_EXPERTS,
    **{"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"]},
    **{"hybrid_override_pattern": "M*EM", "mtp_hybrid_override_pattern": "*E"},
    **{"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "conv_kernel": 4},
    **{"n_groups": 1, "mamba_proj_bias": False, "mlp_bias": False, "use_bias": False},
    **{"use_conv_bias": True, "layer_norm_epsilon": 1e-5, "num_hidden_layers": 4},
    "moe_shared_expert_intermediate_size": 48,
}

HEADS: dict[str, Head] = {
    "glm": Glm(GLM),
    "glm, no norms of queries": Glm({**GLM, "use_qk_norm": False, "attention_bias": False}),
    "glm lite": DeepSeek(GLM_LITE),
    "deepseek": DeepSeek(DEEPSEEK),
    "mimo": MiMo(MIMO),
    "exaone": Exaone(EXAONE),
    "nemotron": NemotronH(NEMOTRON),
    "nemotron, latent experts": NemotronH({**NEMOTRON, "moe_latent_size": 24}),
}
_KINDS = {head.raw["model_type"]: type(head) for head in HEADS.values()}
_OF_TARGET = {  # which a checkpoint has beside a head, and which nobody takes for one
    "model.embed_tokens.weight": (VOCAB_SIZE, D),
    "model.layers.2.input_layernorm.weight": (D,),
    "model.norm.weight": (D,),
    "lm_head.weight": (VOCAB_SIZE, D),
}


def head_of(raw: Config, tensors: Mapping[str, Array]) -> Head:
    """The one in a folder."""
    return _KINDS[raw["model_type"]](raw, tensors)


FORMATS: dict[str, tuple[Config, dict[str, Array]]] = {
    name: (head.raw, {**random_weights(_OF_TARGET, 9), **head.tensors})
    for name, head in HEADS.items()
}
