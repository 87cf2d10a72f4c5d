"""Heads at the sizes that are published, without weights: config.json, and names with shapes.

Fields are those of the public files that a head depends on, and what else stands in them about it.
"""

from __future__ import annotations

from typing import Any

from support.published_heads import DeepSeek, Glm, Head, MiMo, NemotronH

_GLM: dict[str, Any] = {
    **{"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_act": "silu"},
    **{"attention_bias": True, "attention_dropout": 0.0, "head_dim": 128, "rms_norm_eps": 1e-5},
    **{"max_position_embeddings": 131072, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    **{"norm_topk_prob": True, "num_attention_heads": 96, "num_key_value_heads": 8},
    **{"num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5},
    **{"rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False},
    **{"vocab_size": 151552, "use_cache": True, "torch_dtype": "bfloat16"},
}
GLM_AIR: dict[str, Any] = {
    **_GLM,
    **{"first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944},
    **{"moe_intermediate_size": 1408, "n_routed_experts": 128, "num_hidden_layers": 46},
    **{"routed_scaling_factor": 1.0, "use_qk_norm": False},
}
GLM_LARGE: dict[str, Any] = {
    **_GLM,
    **{"first_k_dense_replace": 3, "hidden_size": 5120, "intermediate_size": 12288},
    **{"moe_intermediate_size": 1536, "n_routed_experts": 160, "num_hidden_layers": 92},
    **{"routed_scaling_factor": 2.5, "use_qk_norm": True},
}
_LATENT: dict[str, Any] = {
    **{"attention_bias": False, "hidden_act": "silu", "kv_lora_rank": 512, "moe_layer_freq": 1},
    **{"n_shared_experts": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 1},
    **{"qk_rope_head_dim": 64, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    **{"tie_word_embeddings": False, "torch_dtype": "bfloat16"},
}
GLM_FLASH: dict[str, Any] = {
    **_LATENT,
    **{"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"},
    **{"first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10240},
    **{"max_position_embeddings": 202752, "moe_intermediate_size": 1536, "n_group": 1},
    **{"n_routed_experts": 64, "num_attention_heads": 20, "num_experts_per_tok": 4},
    **{"num_hidden_layers": 47, "num_key_value_heads": 20, "q_lora_rank": 768},
    **{"qk_nope_head_dim": 192, "rms_norm_eps": 1e-5, "rope_scaling": None},
    **{"rope_theta": 1000000, "routed_scaling_factor": 1.8, "topk_group": 1},
    **{"v_head_dim": 256, "vocab_size": 154880, "partial_rotary_factor": 1.0},
}
DEEPSEEK_V3: dict[str, Any] = {
    **_LATENT,
    **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "ep_size": 1},
    **{"first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432},
    **{"max_position_embeddings": 163840, "moe_intermediate_size": 2048, "n_group": 8},
    **{"n_routed_experts": 256, "num_attention_heads": 128, "num_experts_per_tok": 8},
    **{"num_hidden_layers": 61, "num_key_value_heads": 128, "q_lora_rank": 1536},
    **{"qk_nope_head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000, "topk_group": 4},
    **{"routed_scaling_factor": 2.5, "v_head_dim": 128, "vocab_size": 129280},
    "rope_scaling": {
        **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
        **{"original_max_position_embeddings": 4096, "type": "yarn"},
    },
    "quantization_config": {
        **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
        "weight_block_size": [128, 128],
    },
}
MIMO_7B: dict[str, Any] = {
    **{"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True},
    **{"attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096},
    **{"intermediate_size": 11008, "max_position_embeddings": 32768, "max_window_layers": 36},
    **{"num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8},
    **{"num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "rope_scaling": None},
    **{"rope_theta": 640000, "sliding_window": 32768, "tie_word_embeddings": False},
    **{"torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151680},
}
NEMOTRON_SUPER: dict[str, Any] = {
    **{"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h"},
    **{"attention_bias": False, "conv_kernel": 4, "head_dim": 128, "hidden_size": 4096},
    **{"intermediate_size": 2688, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64},
    **{"mamba_num_heads": 128, "mamba_proj_bias": False, "max_position_embeddings": 262144},
    **{"mlp_bias": False, "moe_intermediate_size": 2688, "moe_latent_size": 1024},
    **{"moe_shared_expert_intermediate_size": 5376, "n_group": 1, "n_groups": 8},
    **{"mtp_hybrid_override_pattern": "*E", "n_routed_experts": 512, "n_shared_experts": 1},
    **{"norm_eps": 1e-5, "norm_topk_prob": True, "num_attention_heads": 32},
    **{"num_experts_per_tok": 22, "num_hidden_layers": 88, "num_key_value_heads": 2},
    **{"num_nextn_predict_layers": 1, "routed_scaling_factor": 5.0, "ssm_state_size": 128},
    **{"tie_word_embeddings": False, "topk_group": 1, "use_bias": False, "use_conv_bias": True},
    **{"vocab_size": 131072, "hybrid_override_pattern": "MEMEMEM*E" * 8 + "ME" * 8},
}

HEADS: dict[str, Head] = {
    "GLM-4.5-Air": Glm(GLM_AIR, {}),
    "GLM-4.5 to 4.7": Glm(GLM_LARGE, {}),
    "GLM-4.7-Flash": DeepSeek(GLM_FLASH, {}),
    "DeepSeek-V3": DeepSeek(DEEPSEEK_V3, {}),
    "MiMo-7B": MiMo(MIMO_7B, {}),
    "Nemotron-3-Super": NemotronH(NEMOTRON_SUPER, {}),
}

# Rows of the table of published configurations: what is read of each, or why it is refused

_READ: dict[str, Any] = {
    **{"hidden_normed": True, "hidden_first": False, "feeds_normed": True},
    **{"block_size": 8, "own_embedding": False, "own_head": False, "notes": ""},
}
_TURNED = {"hidden_normed": False, "hidden_first": True, "feeds_normed": False, "block_size": 2}
READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zai-org/GLM-4.5-Air": (GLM_AIR, {**_READ, "num_target_layers": 46}),
    "zai-org/GLM-4.7": (GLM_LARGE, {**_READ, "vocab_size": 151552}),
    "zai-org/GLM-4.7-Flash": (GLM_FLASH, {**_READ, "rms_norm_eps": 1e-5}),
    "GLM-4.7-Flash, split by mlx-vlm": (
        {"model_type": "glm4_moe_lite_mtp", "block_size": 2, "text_config": GLM_FLASH},
        _READ,
    ),
    "deepseek-ai/DeepSeek-V3": (DEEPSEEK_V3, {**_READ, "quantization": None}),
    "XiaomiMiMo/MiMo-7B-RL": (MIMO_7B, {**_READ, **_TURNED}),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (
        NEMOTRON_SUPER,
        {**_READ, "rms_norm_eps": 1e-5, "layer_windows": (None,)},
    ),
}
_COUNT = "num_nextn_predict_layers"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stepfun-ai/Step-3.5-Flash": ({"model_type": "step3p5", _COUNT: 3}, "step3p5, whose heads"),
    "XiaomiMiMo/MiMo-V2-Flash": ({"model_type": "mimo_v2_flash", _COUNT: 3}, "windows and"),
    "zai-org/GLM-5": ({"model_type": "glm_moe_dsa", _COUNT: 1}, "glm_moe_dsa, whose heads"),
    "a DeepSeek with a head for each step": ({**DEEPSEEK_V3, _COUNT: 3}, f"{_COUNT} is 3"),
}
