"""Fields and tensors that many published configurations have, and what is read of them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from support import reference_domino, reference_eagle3, reference_peagle
from support.drafter_formats import body, is_dspark, own_tables
from support.drafter_formats import version_1 as first
from support.reference_dflash import random_drafter
from support.reference_dspark import RANK

WINDOW = 6


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k not in names}


def method(**changes: Any) -> dict[str, Any]:
    """DFlash, with these fields of dflash_config."""
    return first(dflash_config=changes)


COPIED = {  # what a trainer copies of a target of Qwen3.5's family
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "mtp_num_hidden_layers": 1,
    "output_gate_type": "swish",
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        "rope_type": "default",
    },
}
NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False}
DEEPSPEC = {  # of its EAGLE-3
    "architectures": ["Qwen3Eagle3Model"],
    "draft_num_hidden_layers": 1,
    "draft_vocab_size": None,
    "num_target_layers": 36,
    "step_loss_decay": 0.8,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "ttt_length": 7,
}
MUSE = without(
    first(
        architectures=["MuseGlimmerAssistantModel"],
        layer_types=["sliding_attention"] * 2,
        mask_token_id=5,
        model_type="muse_glimmer_assistant",
        sliding_window=WINDOW,
        target_layer_ids=[0, 2],
    ),
    "dflash_config",
    "num_target_layers",
    "vocab_size",
    "tie_word_embeddings",
)
BOTH = {"layer_windows": (WINDOW, WINDOW), "layer_causal": (False, False)}
FULL = {"layer_windows": (None, None), "layer_causal": (False, False)}
EVERY_ROW = {"sample_from_anchor": True, "markov_rank": 0}

# What decides how a drafter drafts, in configurations that change nothing of the tiny ones
_ALL: dict[str, Any] = {
    "layer_windows": (None, None),
    "layer_causal": (False, False),
    "block_size": 8,
    "sample_from_anchor": False,
    "mask_token_id": 5,
    "aux_layers": (0, 2),
    "num_target_layers": 3,
    "vocab_size": 97,
    "draft_vocab_size": None,
    "head_dim": 16,
    "gated": False,
    "rotary_dims": None,
    "offset_norms": False,
    "gemma_layers": False,
    "markov_rank": 0,
    "selector_rank": 0,
    "gru_hidden_dim": 0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
MARKOV = {"markov_rank": RANK, "enable_confidence_head": True, "confidence_head_with_markov": True}
_BLOCKS: dict[str, dict[str, Any]] = {
    ".*DSpark.*": {"block_size": 6, "sample_from_anchor": True, **MARKOV},
    "Qwen3DFlashModel": {"block_size": 6, "sample_from_anchor": True},
    ".*DFlash2.*": {
        "block_size": 6,
        "selector_rank": 8,
        "selector_top_k": 4,
        "selector_vocab_size": None,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
    },
}
_EAGLE: dict[str, Any] = {
    "layer_windows": (None,),
    "block_size": 8,
    "mask_token_id": None,
    "aux_layers": (0, 1, 2),
    "num_target_layers": None,
    "vocab_size": 97,
    "draft_vocab_size": 40,
    "head_norms": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}


BLOCKS, STEPS = "DFlash|DSpark|Domino|Muse", "[Ee]agle"


def expected_of(raw: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """All that is to be read of a row: what it changes, and what it does not."""
    kind = raw.get("architectures", [""])[0]
    if re.search("[Ee]agle", kind):
        return {**_EAGLE, **fields}
    if not re.search(BLOCKS, kind):
        return fields  # all that matters
    usual = [found for pattern, found in _BLOCKS.items() if re.fullmatch(pattern, kind)]
    known = {**_ALL, **(usual[0] if usual else {})}
    if "transformer_layer_config" in raw:  # of speculators, with six rows of a block
        size = 6 + (raw["speculators_model_type"] == "dspark")
        known |= {"num_target_layers": None, "block_size": size}
    known |= fields
    if fields.get("markov_rank") == 0:  # without its heads
        heads = MARKOV.keys() - fields.keys()
        known = {field: value for field, value in known.items() if field not in heads}
    return known


_BEHIND = {  # fields, and a tensor that a drafter which asks for them has
    "attention_sink_bias": ("layers.0.self_attn.sinks", (4,)),
    "kv_lora_rank": ("layers.0.self_attn.kv_a_proj_with_mqa.weight", (8, 64)),
    "fc_layernorm": ("fc_layernorm.0.weight", (64,)),
}


def tensors_of(raw: dict[str, Any]) -> dict[str, Any]:
    """Random tensors of a row, by the names that its layout has."""
    told = {**raw, **raw.get("transformer_layer_config", {}), **raw.get("dflash_config", {})}
    kind = raw["architectures"][0]
    if re.search("[Ee]agle", kind):
        parallel = told["num_hidden_layers"] > 1 or "ptd_token_id" in told
        known = raw if raw.get("draft_vocab_size") else {**raw, "draft_vocab_size": 97}
        tensors = (reference_peagle if parallel else reference_eagle3).random_tensors(known)
        if layers := raw.get("target_layer_ids"):
            tensors["fc.weight"] = np.ones((64, 64 * len(layers)), np.float32)
        heads = {f"midlayer.self_attn.{n}_norm.weight": np.ones(16, np.float32) for n in "qk"}
        return {**tensors, **(heads if "Qwen3" in kind else {})}
    plain = {**told, "dflash_config": {"target_layer_ids": [0, 2]}}
    if is_dspark(raw):
        sizes = {"markov_rank": raw.get("dspark_markov_rank", 0)}
        sizes["enable_confidence_head"] = told.get("use_confidence_head", True)
        tensors = dict(body({**sizes, **raw}))
    elif "emb_dim" in told and "transformer_layer_config" not in raw:
        tensors = reference_domino.random_tensors(plain)
    elif "conv_kernel_size" in told:
        tensors = dict(body(raw))
    else:
        tensors = dict(random_drafter(plain))
    if kind == MUSE["architectures"][0]:
        theirs = {"fc.weight": "encoder.fc.weight"}
        theirs["hidden_norm.weight"] = "encoder.output_norm_enc.weight"
        tensors = {theirs.get(name, name): tensor for name, tensor in tensors.items()}
    if is_dspark(raw):
        tensors |= own_tables(None)
    for field, (name, shape) in _BEHIND.items():
        if told.get(field):
            tensors[name] = np.ones(shape, np.float32)
    return tensors


def value_of(config: Any, name: str) -> Any:
    """A field of a configuration, or of a part of it; what it does not know says nothing."""
    for part in name.split("."):
        config = getattr(config, part, None)
    return config
