"""Configs of tiny models with recurrent layers, see `families.py`."""

from typing import Any

from support.family_configs import LATENT_ATTENTION, QWEN3_MOE, WINDOW, config

# What several of them know by the same name; each reads its own
_SHARED: dict[str, Any] = {
    **QWEN3_MOE,
    **{"attention_bias": False, "mlp_bias": False, "use_bias": False, "conv_bias": False},
    **{"conv_kernel": 4, "conv_L_cache": 3, "n_groups": 1, "use_conv_bias": True},
    **{"layer_norm_epsilon": 1e-6, "norm_eps": 1e-6},
    **{"shared_expert_intermediate_size": 32, "shared_intermediate_size": 64},
    **{"num_shared_experts": 1, "first_k_dense_replace": 1},
    # Gated delta nets
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "full_attention_interval": 2},
    # Mamba
    **{"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_d_conv": 4},
    **{"mamba_n_groups": 1, "mamba_proj_bias": False, "mamba_conv_bias": True},
    # Factors
    **{"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
    **{"lm_head_multiplier": 1.0, "attention_out_multiplier": 1.0, "attention_multiplier": 0.25},
}


def recurrent(model_type: str, **changes: Any) -> dict[str, Any]:
    return config(model_type, **{**_SHARED, **changes})


# Families with recurrent layers.
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba2": recurrent(
        "mamba2",
        num_heads=4,
        head_dim=32,
        intermediate_size=128,
        state_size=16,
        time_step_limit=(0.0, 100.0),
        time_step_rank="auto",
    ),
    "qwen3_next": recurrent("qwen3_next", partial_rotary_factor=0.5),
    "qwen3_5": recurrent("qwen3_5", num_experts=0),
    "lfm2": recurrent(
        "lfm2",
        layer_types=["conv", "full_attention", "conv"],
        block_dim=64,
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
    ),
    "lfm2_moe": recurrent(
        "lfm2_moe",
        layer_types=["conv", "full_attention", "conv"],
        use_expert_bias=True,
        num_dense_layers=1,
    ),
    "nemotron_h": recurrent(
        "nemotron_h",
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        hybrid_override_pattern=["M", "-", "*", "-", "M"],
    ),
    "falcon_h1": recurrent("falcon_h1", mamba_d_ssm=128, ssm_multipliers=[1.0] * 5),
    "granitemoehybrid": recurrent(
        "granitemoehybrid", layer_types=["mamba", "attention", "mamba"], num_local_experts=4
    ),
    "jamba": recurrent(
        "jamba",
        attn_layer_offset=1,
        attn_layer_period=3,
        expert_layer_offset=1,
        expert_layer_period=2,
        mamba_d_state=8,
        mamba_expand=2,
    ),
    "plamo2": recurrent(
        "plamo2", hidden_size_per_head=16, mamba_num_heads=8, mamba_step=2, full_attention_idx=[1]
    ),
    "kimi_linear": recurrent(
        "kimi_linear",
        linear_attn_config={
            **{"kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": 4, "head_dim": 16},
            "short_conv_kernel_size": 4,
        },
        model_max_length=512,
        **LATENT_ATTENTION,
        num_experts_per_token=2,
    ),
    "bailing_hybrid": recurrent(
        "bailing_hybrid",
        **LATENT_ATTENTION,
        num_key_value_heads=4,
        n_group=1,
        topk_group=1,
        layer_group_size=2,
        group_norm_size=2,
        routed_scaling_factor=1.0,
        tie_word_embeddings=False,
    ),
    "olmo_hybrid": recurrent(
        "olmo_hybrid",
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_allow_neg_eigval=True,
    ),
    "recurrent_gemma": recurrent(
        "recurrent_gemma",
        conv1d_width=4,
        logits_soft_cap=30.0,
        attention_window_size=WINDOW,
        num_key_value_heads=1,
        block_types=["recurrent", "attention", "recurrent"],
    ),
    "rwkv7": recurrent(
        "rwkv7",
        norm_eps=1e-5,
        a_low_rank_dim=8,
        v_low_rank_dim=8,
        gate_low_rank_dim=8,
        decay_low_rank_dim=8,
    ),
    "gear": recurrent(
        "gear",
        sliding_window=WINDOW,
        layer_types=["conv_mixer", "sliding_attention", "full_attention"],
    ),
}

# Families whose layers hand their recurrent state to no module of its own.
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "baichuan_m1": config(
        "baichuan_m1",
        sliding_window=WINDOW,
        sliding_window_layers=[0, 2],
        conv_window=2,
        num_swa_attention_heads=4,
        num_swa_key_value_heads=2,
        tie_word_embeddings=False,
    ),
}
