"""What the configs of all tiny models begin with, in the Hugging Face layout."""

from typing import Any

VOCAB_SIZE = 97
WINDOW = 8

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def config(model_type: str, **changes: Any) -> dict[str, Any]:
    return {**BASE, "model_type": model_type, **changes}


def sliding(pattern: str, window: int) -> dict[str, Any]:
    """Fields of a config.json: S for sliding-window layers, F for full ones."""
    names = {"S": "sliding_attention", "F": "full_attention"}
    return {
        "num_hidden_layers": len(pattern),
        "layer_types": [names[letter] for letter in pattern],
        "sliding_window": window,
    }


QWEN3_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

LATENT_ATTENTION: dict[str, Any] = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
