"""Configurations of heads for multi-token prediction as people publish them, in tiny.

As in `published_configs`, whose table these rows join.
"""

from __future__ import annotations

from typing import Any

from support.reference_mtp import MOE, NEXT, QWEN, UNTOLD, split, target

QUANTIZED = {"group_size": 64, "bits": 8, "mode": "affine"}
USUAL = {"hidden_normed": True, "hidden_first": False, "feeds_normed": True, "block_size": 8}
MTPLX = {  # what its packs have beside a target's configuration
    "mtplx_mtp_quantization": {"group_size": 64, "bits": 4, "mode": "affine"},
    "mlx_lm_extra_tensors": {"mtp_file": "mtp.safetensors"},
}
DEDICATED = {**QWEN, "mtp_use_dedicated_embeddings": True}

READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen/Qwen3.6-27B": (target(QWEN), {**USUAL, "layout": "inside", "num_target_layers": 3}),
    "Qwen/Qwen3.6-35B-A3B": (target(MOE), {**USUAL, "kind.count": "mtp_num_hidden_layers"}),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (UNTOLD, {**USUAL, "vocab_size": 97}),
    "a Qwen3-Next that counts its head": (NEXT, {**USUAL, "vocab_size": 97}),
    "mlx-community/Qwen3.6-27B-4bit": (
        {**target(QWEN), "quantization": QUANTIZED}, {**USUAL, "quantization": None},
    ),
    "youssofal's packs of Qwen3.8-27B": ({**target(QWEN), **MTPLX}, {**USUAL, "notes": ""}),
    "mlx-community/Qwen3.6-35B-A3B-MTP-bf16": (split(MOE), {**USUAL, "layout": "split"}),
    "mlx-community/Qwen3.8-27B-MTP-8bit": (
        split(QWEN, quantization=QUANTIZED, quantization_config=QUANTIZED),
        {**USUAL, "notes": ""},
    ),
    "a Qwen3.5 whose head has an embedding": (target(DEDICATED), {"own_embedding": True}),
    "a head trained with a loss of its own": (
        target({**QWEN, "mtp_loss_scaling_factor": 0.1}), {"notes": ""},
    ),
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen4-exp, whose head is another": (
        split({**QWEN, "model_type": "qwen4_exp", "mtp_layer_types": ["full_attention"]}),
        "model_type is 'qwen4_exp', whose heads are not known",
    ),
    "states of an inner layer": (
        split({**QWEN, "mtp_use_hidden_state_from_layer": 3}),
        "mtp_use_hidden_state_from_layer is 3",
    ),
    "two layers one behind the other": (
        split({**QWEN, "mtp_num_hidden_layers": 2}), "mtp_num_hidden_layers is 2",
    ),
}  # fmt: skip
