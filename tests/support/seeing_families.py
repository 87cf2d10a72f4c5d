"""Configurations of tiny models of mlx-vlm's families."""

from __future__ import annotations

from typing import Any

VOCABULARY = 128  # a token is a character's number
IMAGE, START, END, USER, ASSISTANT = range(1, 6)
PATCH, SIDE = 4, 8  # pixels of a patch, of a placeholder's square of patches

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": PATCH,
    "image_size": 8 * PATCH,
}
_QWEN_TOWER = {
    **{name: value for name, value in _TOWER.items() if "num" not in name},
    "depth": 3,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}
_TURNED = {"type": "default", "mrope_section": [2, 1, 1]}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 0,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "eos_token_id": [0],
}
_NETS = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rope_parameters": {
        **_TURNED, "rope_theta": 10000.0, "partial_rotary_factor": 0.5
    },
}  # fmt: skip
_IDEFICS = {
    "text_config": {**_TEXT, "num_hidden_layers": 3},
    "vision_config": {**_TOWER, "image_size": 4 * PATCH},
    "image_token_id": IMAGE,
    "scale_factor": 2,
    "vocab_size": VOCABULARY,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "text_config": {**_TEXT, **_NETS},
        "vision_config": _QWEN_TOWER,
        **_QWEN_IDS,
    },
    "qwen3_5_moe": {
        "text_config": {
            **_TEXT,
            **_NETS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        "vision_config": _QWEN_TOWER,
        **_QWEN_IDS,
    },
    "qwen3_vl": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 3,
            "rope_scaling": {**_TURNED, "mrope_section": [4, 2, 2]},
        },
        "vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": [0, 1]},
        **_QWEN_IDS,
    },
    "gemma3": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
            "mm_tokens_per_image": 16,
        },
        "vision_config": _TOWER,
        "image_token_index": IMAGE,
        "hidden_size": 64,
        "vocab_size": VOCABULARY,
    },
    "gemma4": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 6,
            "global_head_dim": 16,
            "sliding_window": 16,
            "sliding_window_pattern": 3,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
        "vision_config": {
            **_TOWER,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 8,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
            "default_output_length": 16,
        },
        "image_token_id": IMAGE,
        "audio_token_id": 0,
        "vocab_size": VOCABULARY,
    },
    "muse_glimmer": {
        "text_config": {**_TEXT, "num_hidden_layers": 4, "sliding_window": 24},
        "vision_config": {**_TOWER, "pos_emb_height": 8, "pos_emb_width": 8},
        "image_token_id": IMAGE,
        "video_token_id": 0,
        "out_hidden_size": 64,
        "projector_hidden_size": 24,
    },
    "smolvlm": {
        **_IDEFICS,
        "vision_config": {**_IDEFICS["vision_config"], "model_type": "siglip_vision_model"},
    },
    "idefics3": {
        **_IDEFICS,
        "text_config": {**_IDEFICS["text_config"], "model_type": "llama"},
        "vision_config": {**_IDEFICS["vision_config"], "model_type": "idefics3"},
    },
    "lfm2_vl": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "block_dim": 64,
            "block_ff_dim": 48,
            "block_multiple_of": 8,
            "conv_dim": 64,
        },
        "vision_config": {**_TOWER, "num_patches": 64},
        "image_token_id": IMAGE,
        "projector_hidden_size": 24,
    },
    "glm4v": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 3,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        },
        "vision_config": {**_QWEN_TOWER, "out_hidden_size": 64},
        **_QWEN_IDS,
        "image_token_index": IMAGE,
        "video_token_index": 0,
    },
}
FAMILIES["gemma4_large"] = {
    **FAMILIES["gemma4"],
    "text_config": {
        **FAMILIES["gemma4"]["text_config"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
        "sliding_window": 24,
    },
}
TURNING = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "glm4v")  # positions in three dimensions
