"""Tiny random mlx-lm models, one per attention family, for tests that need no download.

Every config is in the Hugging Face layout that mlx-lm reads. Weights are random float32, scaled so
that logits have a standard deviation near one and depend on the whole context.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from support.family_configs import LATENT_ATTENTION, QWEN3_MOE, VOCAB_SIZE, WINDOW, config, sliding
from support.recurrent_families import RECURRENT, UNSUPPORTED

_GEMMA4: dict[str, Any] = {
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}
_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}
_LONG_ROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
}
_MINISTRAL_ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 4,
}
_DEEPSEEK: dict[str, Any] = {
    **LATENT_ATTENTION,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": config("llama"),
    "llama_sliding": config("llama", **sliding("SFSF", WINDOW)),
    "llama3_rope": config("llama", rope_scaling=_LLAMA3_ROPE),
    "qwen2": config("qwen2"),
    "qwen3": config("qwen3"),
    "qwen3_moe": config("qwen3_moe", **QWEN3_MOE, tie_word_embeddings=False),
    "gemma": config("gemma"),
    "gemma2": config("gemma2", query_pre_attn_scalar=16.0),
    "gemma3_text": config(
        "gemma3_text", query_pre_attn_scalar=16.0, sliding_window=WINDOW, sliding_window_pattern=3
    ),
    "gemma4_text": config("gemma4_text", **_GEMMA4, **sliding("SFSF", WINDOW)),
    "gemma4_text_shared_kv": config(
        "gemma4_text",
        **{**_GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16},
        vocab_size_per_layer_input=VOCAB_SIZE,
        **sliding("SFSFSF", WINDOW),
    ),
    "phi3": config("phi3"),
    "phi3_longrope": config("phi3", rope_scaling=_LONG_ROPE, original_max_position_embeddings=64),
    "gpt_oss": config(
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_scaling=_YARN_ROPE,
        **sliding("SFSF", WINDOW),
    ),
    "olmo2": config("olmo2"),
    "olmo3": config("olmo3", **sliding("SSF", WINDOW)),
    "granite": config(
        "granite",
        logits_scaling=1.25,
        attention_multiplier=0.25,
        embedding_multiplier=2.0,
        residual_multiplier=0.7,
        attention_bias=False,
        mlp_bias=False,
    ),
    "smollm3": config("smollm3", num_hidden_layers=4),
    "starcoder2": config("starcoder2"),
    "cohere": config("cohere", logit_scale=0.9),
    "cohere2": config("cohere2", logit_scale=0.9, sliding_window=WINDOW, sliding_window_pattern=3),
    "glm4": config("glm4", attention_bias=True, partial_rotary_factor=0.5),
    "mixtral": config(
        "mixtral", num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    ),
    "seed_oss": config("seed_oss", attention_bias=True),
    "deepseek_v3": config("deepseek_v3", **_DEEPSEEK),
    "hunyuan_v1_dense": config(
        "hunyuan_v1_dense", rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    ),
    "internlm3": config("internlm3"),
    "internlm3_dynamic_rope": config(
        "internlm3", rope_scaling={"rope_type": "dynamic", "factor": 6.0}
    ),
    "ministral3": config("ministral3", rope_parameters=_MINISTRAL_ROPE, **sliding("SFSF", WINDOW)),
    "exaone4": config(
        "exaone4", rope_scaling=None, sliding_window=WINDOW, sliding_window_pattern="LLG"
    ),
    "mimo": config("mimo", tie_word_embeddings=False),
    "llama4_text": config(
        "llama4_text", intermediate_size_mlp=96, no_rope_layers=[1, 1, 0], use_qk_norm=True
    ),
    "plamo3": config("plamo3", window_size=WINDOW, sliding_window_pattern=3, num_hidden_layers=3),
    "afm7": {
        **{"model_type": "afm7", "vocab_size": VOCAB_SIZE, "hidden_dim": 64, "num_layers": 4},
        **{"num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_size": 64},
    },
    "gemma3n": {
        "model_type": "gemma3n",
        "vocab_size": VOCAB_SIZE,
        "text_config": config(
            "gemma3n_text",
            **{**sliding("SFSF", WINDOW), "num_kv_shared_layers": 2, "laurel_rank": 8},
            vocab_size_per_layer_input=VOCAB_SIZE,
            rope_local_base_freq=10000.0,
            final_logit_softcapping=30.0,
            activation_sparsity_pattern=[0.9, *[0.0] * 3],
            hidden_size_per_layer_input=16,
            altup_num_inputs=2,
            altup_coef_clip=120.0,
            altup_correct_scale=True,
            altup_active_idx=0,
        ),
    },
    "muse_glimmer": config(
        "muse_glimmer",
        qk_scale_factor=1.5,
        output_multiplier=1.0,
        **{**sliding("SSSF", WINDOW), "tie_word_embeddings": False},
    ),
}

# What plain decoding is, only passes of one row over the model's own caches say: plamo3's masks are
# wider by one than its caches, and gemma3n's last layers have keys of their own without caches.
ONE_BY_ONE = frozenset({"plamo3", "gemma3n"})

# Families with RotatingKVCache layers in make_cache().
SLIDING = frozenset(
    name
    for name, settings in FAMILIES.items()
    if "sliding_window" in settings.get("text_config", settings)
)

# Families that use the cache offset for more than mx.fast.rope, so a vector of offsets breaks them:
# afm7 counts the positions of its last layers, ministral3 scales queries by arange(L) + offset,
# dynamic rope compares the offset with a limit.
POSITION_DEPENDENT = frozenset({"afm7", "ministral3", "internlm3_dynamic_rope"})

# RMSNorm classes of these model types multiply by (1 + weight).
_CENTRED_NORMS = frozenset({"gemma", "gemma2", "gemma3_text", "muse_glimmer"})
# mlx-lm drops the head of these while loading a checkpoint that has none.
_TIED_ON_LOAD = frozenset({"gemma3_text"})
# These multiply embeddings by sqrt(hidden_size); a smaller table, made up for in the final norm,
# keeps the residual stream from being mostly the current token.
_SCALED_EMBEDDINGS = frozenset({"gemma", "gemma2", "gemma3_text", "gemma4_text"})
_EMBEDDING_SHRINK = 4.0
_LINEAR_GAIN = 1.5


def make_model(name: str, seed: int = 0, layers: int | None = None, **more: Any) -> nn.Module:
    """Build the tiny model called `name` (a key of the tables above), in float32.

    The same name and seed give the same weights. layers: how many, if not the table's; more: of
    its settings. Skips the test if the installed mlx-lm is too old to know the family; raises
    KeyError for an unknown name.
    """
    settings = {**FAMILIES, **RECURRENT, **UNSUPPORTED}[name] | more
    if layers is not None:
        settings = {**settings, "num_hidden_layers": layers}
    family = settings["model_type"]
    pytest.importorskip(f"mlx_lm.models.{family}", reason=f"this mlx-lm has no {family}")
    model_class, args_class = _get_classes(settings)
    model = model_class(args_class.from_dict(settings))
    if family in _TIED_ON_LOAD:
        model.sanitize({})
    parameters = dict(tree_flatten(model.parameters()))
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    centres = _norm_centres(model, family)
    weights = {
        path: _random_weight(path, parameters[path].shape, key, centres.get(path))
        for path, key in zip(sorted(parameters), keys, strict=True)
    }
    if family in _SCALED_EMBEDDINGS:
        weights["model.embed_tokens.weight"] /= _EMBEDDING_SHRINK
        weights["model.norm.weight"] += _EMBEDDING_SHRINK - 1.0
    model.update(tree_unflatten(list(weights.items())))
    model.eval()
    mx.eval(model.parameters())
    return model


def _norm_centres(model: nn.Module, model_type: str) -> dict[str, float]:
    """Map the path of every norm weight to the value that makes the norm an identity scale."""
    centres = {}
    for path, module in model.named_modules():
        if "norm" not in type(module).__name__.lower():
            continue
        standard = isinstance(module, nn.RMSNorm | nn.LayerNorm)
        centred = model_type in _CENTRED_NORMS and not standard
        centres[f"{path}.weight"] = 0.0 if centred else 1.0
    return centres


def _random_weight(
    path: str, shape: tuple[int, ...], key: mx.array, norm_centre: float | None
) -> mx.array:
    noise = mx.random.normal(shape, key=key)
    if norm_centre is not None:
        return norm_centre + 0.1 * noise
    if path.endswith("layer_scalar") or not shape:
        return 1.0 + 0.1 * noise
    is_table = "embed_tokens" in path or path.endswith("embeddings.weight")
    if is_table or path.startswith(("lm_head", "output")):
        return noise * shape[-1] ** -0.5
    if len(shape) == 1:
        return 0.1 * noise
    return noise * _LINEAR_GAIN * shape[-1] ** -0.5
