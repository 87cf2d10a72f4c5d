"""Tiny random assistants of Gemma 4 and targets for them, in the layouts of Google's files.

Plain NumPy, so that the script which asks transformers what they draft has the same numbers.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np

from support.family_configs import VOCAB_SIZE, sliding

WINDOW, WIDTH = 8, 64  # the target's
CENTROIDS, CHOSEN = 14, 4  # of the ordered head, of seven tokens each
ORDERED = 7 * CENTROIDS  # tokens, one more than the others have
LENGTHS = (5, 21)  # of a text: within the window, and behind its end
STEPS = 4  # of a draft

ROPES = {
    "full_attention": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
        "rope_type": "proportional",
    },
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
COMMON: dict[str, Any] = {
    "attention_bias": False,
    "enable_moe_block": False,
    "global_head_dim": 64,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPES,
    "tie_word_embeddings": True,
    "use_double_wide_mlp": False,
    "vocab_size": VOCAB_SIZE,
}
DENSE = {"attention_k_eq_v": True, "num_key_value_heads": 2, "num_global_key_value_heads": 1}
SMALL = {
    "attention_k_eq_v": False,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": None,
}


def text_config(pattern: str, heads: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A language model's part of a config.json. pattern: as of `sliding`."""
    return {**COMMON, **heads, **sliding(pattern, WINDOW), "model_type": "gemma4_text", **changes}


def target_config(pattern: str, heads: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The config.json of a target that is a language model alone."""
    sizes: dict[str, Any] = {
        "architectures": ["Gemma4ForCausalLM"],
        "final_logit_softcapping": 30.0,
        "hidden_size": WIDTH,
        "intermediate_size": 80,
        "num_kv_shared_layers": 0,
    }
    return text_config(pattern, heads, **{**sizes, **changes})


def assistant_config(
    pattern: str, heads: dict[str, Any], ordered: bool = False, kind: str = "gemma4", **more: Any
) -> dict[str, Any]:
    """The config.json of an assistant. kind: "gemma4" or "gemma4_unified"."""
    name = kind.title().replace("_", "")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_kv_shared_layers": len(pattern)}
    text = text_config(pattern, heads, **shape, vocab_size_per_layer_input=0)
    return {
        "architectures": [f"{name}AssistantForCausalLM"],
        "backbone_hidden_size": WIDTH,
        "centroid_intermediate_top_k": CHOSEN,
        "model_type": f"{kind}_assistant",
        "num_centroids": CENTROIDS,
        "text_config": {**text, "model_type": f"{kind}_text", **more},
        "tie_word_embeddings": True,
        "use_ordered_embeddings": ordered,
    }


_PER_LAYER = {
    "hidden_size_per_layer_input": 16,
    "use_double_wide_mlp": True,
    "vocab_size": ORDERED,
    "vocab_size_per_layer_input": ORDERED,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # assistants with their targets
    "dense": (assistant_config("SSSF", DENSE), target_config("SSFSSF", DENSE)),
    "small": (
        assistant_config("SFSF", SMALL, ordered=True, vocab_size=ORDERED),
        target_config("SFSSFSF", SMALL, num_kv_shared_layers=2, **_PER_LAYER),
    ),
    "unified": (
        assistant_config("SSF", DENSE, kind="gemma4_unified"),
        {
            "architectures": ["Gemma4UnifiedForConditionalGeneration"],
            "model_type": "gemma4_unified",
            "text_config": target_config("SFSF", DENSE, model_type="gemma4_unified_text"),
            "vocab_size": VOCAB_SIZE,
        },
    ),
}


def weight(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """The tensor that a published file calls so; the same in every program."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith("token_ordering"):
        return rng.permutation(shape[0])
    noise = rng.standard_normal(shape).astype(np.float32)
    if "norm" in name or name.endswith("layer_scalar"):
        of_heads = "q_norm" in name or "k_norm" in name  # so that no key outweighs all others
        return (1 + noise / 5) * (shape[-1] ** -0.2 if of_heads else 1)
    gain = 1.0 if "embed_tokens" in name else 1.5
    return (gain / math.sqrt(shape[-1]) * noise).astype(np.float32)


def text_of(length: int) -> list[int]:
    """Committed tokens, and behind them the anchor."""
    return np.random.default_rng(length).integers(VOCAB_SIZE, size=length + 1).tolist()
