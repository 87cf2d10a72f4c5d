"""Configurations as people publish them, in tiny: what is read of each, or why it is refused.

The fields stand as in the public file that names the row; sizes are small.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from dflash_mlx.drafters.dflash.domino import DominoConfig
from support import reference_domino, reference_eagle3, reference_peagle
from support.assistant_formats import CASES as ASSISTANTS
from support.drafter_formats import (
    GEMMA_4,
    NATIVE_35,
    body,
    is_dspark,
    lfm2,
    own_tables,
    specforge,
    speculators,
)
from support.drafter_formats import version_1 as first
from support.reference_dflash import random_drafter
from support.reference_dflash2 import tiny_config as second
from support.reference_domino import NARROW, STATE
from support.reference_domino import tiny_config as domino
from support.reference_dspark import RANK
from support.reference_dspark import tiny_config as dspark
from support.reference_eagle3 import inner
from support.reference_eagle3 import raw as eagle
from support.reference_eagle3 import speculators as speculators_3
from support.reference_peagle import MASK, automodel
from support.reference_peagle import raw as peagle
from support.reference_peagle import speculators as speculators_p

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
EVERY_ROW = {"sample_from_anchor": True, "markov": None}

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
    "markov": None,
    "selector": None,
    "domino": None,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
_MARKOV = {"markov.rank": RANK, "markov.confidence": True, "markov.reads_token": True}
_BLOCKS: dict[str, dict[str, Any]] = {
    ".*DSpark.*": {"block_size": 6, "sample_from_anchor": True, **_MARKOV},
    "Qwen3DFlashModel": {"block_size": 6, "sample_from_anchor": True},
    ".*DFlash2.*": {
        "block_size": 6,
        "selector.rank": 8,
        "selector.top_k": 4,
        "selector.vocab_size": None,
        "convolution.kernel_size": 2,
        "convolution.group_size": 16,
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
    whole = {field for field in known if "." not in field and known[field] is None}
    if fields.get("markov", known) is None:  # without its heads
        known = {field: value for field, value in known.items() if field not in _MARKOV}
    parts = {field.split(".")[0] for field in known if "." in field}
    return {field: value for field, value in known.items() if field not in whole & parts}


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


# The configuration, what is read of it, and of the notes what they match, "" for none
READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "z-lab/Qwen3-4B-DFlash-b16": (
        first(use_sliding_window=False, max_window_layers=2, sliding_window=None),
        {**FULL, "block_size": 8, "sample_from_anchor": False, "notes": ""},
    ),
    "z-lab/Qwen3.8-27B-DFlash2": (
        second(layer_types=["sliding_attention"] * 2, sliding_window=WINDOW, is_causal=False),
        {**BOTH, "block_size": 6, "notes": ""},
    ),
    "windows by max_window_layers, the first layers full": (
        first(use_sliding_window=True, max_window_layers=1, sliding_window=WINDOW),
        {"layer_windows": (None, WINDOW), "layer_causal": (False, True)},
    ),
    "windows by max_window_layers, all layers": (
        first(use_sliding_window=True, max_window_layers=0, sliding_window=WINDOW, is_causal=False),
        BOTH,
    ),
    "layer_types before max_window_layers": (
        first(
            layer_types=["sliding_attention"] * 2, sliding_window=WINDOW, is_causal=False,
            max_window_layers=2, use_sliding_window=True,
        ),
        BOTH,
    ),
    "use_sliding_window without the layers, as transformers has it": (
        first(use_sliding_window=True, sliding_window=WINDOW), FULL,
    ),
    "use_sliding_window without a window, as transformers has it": (
        first(use_sliding_window=True, max_window_layers=0, sliding_window=None), FULL,
    ),
    "a window by layer": (
        first(layer_sliding_windows=[4, None]),
        {"layer_windows": (4, None), "layer_causal": (True, False)},
    ),
    "windows by layer, of other lengths than sliding_window": (
        first(
            layer_types=["sliding_attention"] * 2, sliding_window=WINDOW, sliding_windows=[4, 8]
        ),
        {"layer_windows": (4, 8), "layer_causal": (True, True)},
    ),
    "XiaomiMiMo/MiMo-V2.5-Pro-DFlash, without its sinks": (
        method(use_swa=True, swa_window_size=WINDOW), BOTH,
    ),
    "NVIDIA Model-Optimizer's windows": (
        first(
            layer_types=["full_attention"] * 2,
            dflash_config={"use_swa": True, "swa_window_size": WINDOW, "causal": False},
        ),
        BOTH,
    ),
    "PixelML/Qwen3.8-Flash-Next-DFlash": (
        method(query_zero_predicts_next=True), {"block_size": 9, "sample_from_anchor": True},
    ),
    "the same beside dflash_config": (
        first(query_zero_predicts_next=True), {"block_size": 9, "sample_from_anchor": True},
    ),
    "z-lab/Qwen3.8-Flash-Next-DFlash2": (
        second(dflash_config={"selector_vocab_size": 90}), {"selector.vocab_size": 90},
    ),
    "JetSpec/jetspec-qwen3-8b": (
        method(causal_head=True, block_size=8), {"layer_causal": (True, True), "block_size": 8},
    ),
    "NVIDIA Automodel's JetSpec": (
        first(architectures=["Qwen3DFlashDraftModel"], dflash_config={"causal": True}),
        {"layer_causal": (True, True), "sample_from_anchor": False},
    ),
    "causal by dflash_query_causal": (
        dspark(dflash_query_causal=True), {"layer_causal": (True, True)},
    ),
    "is_causal within dflash_config": (
        first(
            layer_types=["sliding_attention"] * 2, sliding_window=WINDOW,
            dflash_config={"is_causal": False},
        ),
        BOTH,
    ),
    "is_causal before what dflash_config says": (
        first(is_causal=False, dflash_config={"causal": True}), FULL,
    ),
    "a DFlash 2 of speculators that says it is causal": (
        speculators("dflash2", dflash_config={"causal": True}), {"layer_causal": (True, True)},
    ),
    "NVIDIA Automodel's DFlash 2": (
        second(architectures=["Qwen3DFlash2DraftModel"]), {"selector.rank": 8, "notes": ""},
    ),
    "NVIDIA Model-Optimizer's DFlash 2": (
        second(dflash_config={"projector_type": "dflash2"}), {"selector.rank": 8, "notes": ""},
    ),
    "DFlash without num_target_layers": (
        without(first(), "num_target_layers"), {"num_target_layers": None},
    ),
    "layer_ids, as vLLM takes them": (
        first(dflash_config={"layer_ids": [0, 1], "target_layer_ids": None}),
        {"aux_layers": (0, 1)},
    ),
    "mlx-vlm's advice": (
        method(runtime_block_size=4, draft_window_size=512),
        {"notes": "runtime_block_size, .*draft_window_size"},
    ),
    "deepseek-ai/dspark_qwen3_8b_block7": (
        dspark(),
        {"block_size": 6, "sample_from_anchor": True, "markov.rank": RANK,
         "markov.confidence": True},
    ),
    "deepseek-ai/dflash_qwen3_8b_block7": (dspark(**NO_HEADS), {**EVERY_ROW, "block_size": 6}),
    "lightllm's Qwen3DFlashModel": (
        without(
            dspark(architectures=["Qwen3DFlashModel"]),
            "markov_rank", "markov_head_type", "enable_confidence_head",
        ),
        EVERY_ROW,
    ),
    "DSpark without a word of its confidence head": (
        without(dspark(markov_rank=0), "enable_confidence_head"), EVERY_ROW,
    ),
    "satgeze/Qwen3.6-27B-DSpark": (
        dspark(**COPIED),
        {"gated": False, "offset_norms": False, "rotary_dims": None,
         "notes": "attn_output_gate, output_gate_type, partial_rotary_factor"},
    ),
    "satgeze/Qwen3.5-0.8B-DSpark": (
        dspark(**COPIED, model_type="qwen3_5_text"),
        {"gated": False, "offset_norms": False, "rotary_dims": None},
    ),
    "Qwen35DSparkModel of Qwen3's layers": (
        dspark(architectures=["Qwen35DSparkModel"], model_type="qwen3_5_text"),
        {"gated": False, "offset_norms": False, "rotary_dims": None},
    ),
    "stanleyphoong/Ornith-1.0-9B-DSpark": (
        dspark(**NATIVE_35, confidence_temperatures=[1.5], text_config={}),
        {"gated": True, "offset_norms": True, "rotary_dims": 8,
         "notes": "it: confidence_temperatures$"},
    ),
    "Qwen3DSparkModel with norms of 1 + w": (
        dspark(model_type="qwen3_5"), {"gated": False, "offset_norms": True, "rotary_dims": 16},
    ),
    "deepseek-ai/dspark_gemma4_12b_block7": (
        dspark(**GEMMA_4),
        {"head_dim": 32, "num_key_value_heads": 1, "gemma_layers": True, "block_size": 6,
         "final_logit_softcapping": 30.0, "rope": GEMMA_4["rope_parameters"]["full_attention"]},
    ),
    "RadixArk/Qwen3.8-27B-DSpark": (
        specforge(), {"block_size": 6, "sample_from_anchor": True, "notes": ""},
    ),
    "LiquidAI/LFM2.5-DSpark": (lfm2(), {"sample_from_anchor": True, "markov.reads_token": True}),
    "NVIDIA's dspark_bonus_anchor": (
        dspark(dspark_bonus_anchor=True), {"block_size": 5, "sample_from_anchor": False},
    ),
    "NVIDIA Model-Optimizer's DSpark": (
        without(
            dspark(
                dflash_config={
                    "causal": False, "markov_rank": 4, "projector_type": "dspark",
                    "shift_label": True, "use_confidence_head": False,
                },
            ),
            "enable_confidence_head", "markov_rank",
        ),
        {"block_size": 6, "markov.rank": 4, "markov.confidence": False, "notes": ""},
    ),
    "dspark_markov_rank alone": (
        without(dspark(dspark_markov_rank=4), "markov_rank"), {"markov.rank": 4},
    ),
    "DSpark under DFlash's name that says which rows draft": (
        dspark(architectures=["DFlashDraftModel"], sample_from_anchor=True, dflash_config={}),
        {**_MARKOV, "block_size": 6, "sample_from_anchor": True},
    ),
    "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark": (
        speculators("dspark"),
        {"block_size": 7, "sample_from_anchor": True, "num_target_layers": None},
    ),
    "DFlash of speculators 0.5 and 0.6": (
        speculators(max_anchors=256, speculators_version="0.5.0"),
        {"block_size": 6, "sample_from_anchor": False},
    ),
    "speculators with windows beside the layers, as vLLM takes them": (
        speculators(
            layer_types=["sliding_attention", "full_attention"], max_window_layers=2,
            sliding_window=WINDOW, use_sliding_window=True,
        ),
        {"layer_windows": (WINDOW, None), "layer_causal": (True, False)},
    ),
    "DSpark of speculators, with the weights of its losses": (
        speculators("dspark", ce_loss_alpha=0.1, l1_loss_alpha=0.9, loss_decay_gamma=4.0),
        {"sample_from_anchor": True},
    ),
    "meta-models/Muse-Glimmer-30B-assistant": (
        MUSE,
        {**BOTH, "block_size": 8, "vocab_size": 202_048, "final_logit_softcapping": 20.0,
         "output_multiplier": 0.19611613513818404, "num_target_layers": None},
    ),
    "Huang2020/Qwen3-8B-Domino-b16": (
        domino(architectures=["DFlashDraftModel"], block_size=16),
        {"block_size": 17, "sample_from_anchor": True, "layer_causal": (False, False),
         "domino": DominoConfig(NARROW, STATE, 1), "notes": ""},
    ),
    "SpecForge's Domino": (
        domino(), {"block_size": 6, "domino.pure": 1, "sample_from_anchor": True},
    ),
    "NVIDIA Automodel's Domino, without a shift": (
        domino(
            architectures=["Qwen3DFlashDraftModel"],
            dflash_config={"shift_label": False, "pure_draft_prefix_len": 0},
        ),
        {"block_size": 5, "domino.pure": 0, "sample_from_anchor": False},
    ),
    "Domino under its first name": (
        domino(architectures=["DFlashDraftModel"], dflash_config={"projector_type": "causal_v5"}),
        {"domino.state": STATE, "domino.width": NARROW, "domino.pure": 1, "block_size": 6,
         "sample_from_anchor": True},
    ),
    "SGLang's EAGLE-3": (eagle(), {"aux_layers": (0, 1, 2), "head_norms": False, "notes": ""}),
    "deepseek-ai/eagle3_qwen3_8b_ttt7": (
        without(eagle(**DEEPSPEC), "eagle_config"),
        {"aux_layers": (1, 9, 17, 25, 33), "head_norms": True, "num_target_layers": 36,
         "draft_vocab_size": None, "notes": ""},
    ),
    "vLLM's Qwen3 EAGLE-3": (
        eagle(architectures=["Eagle3Qwen3ForCausalLM"], num_aux_layers=3), {"head_norms": True},
    ),
    **{
        f"EAGLE-3 under the name of {name}": (eagle(architectures=[name]), {"head_norms": False})
        for name in ("Eagle3DraftModel", "Eagle3MiniMaxM2ForCausalLM", "LlamaEagle3DraftModel")
    },
    "TensorRT-LLM's return_hidden_post_norm": (
        inner(return_hidden_post_norm=True), {"norm_output": True},
    ),
    "EAGLE-3 with a target's fields": (
        eagle(partial_rotary_factor=0.25), {"notes": "partial_rotary_factor"},
    ),
    "P-EAGLE for vLLM, by ptd_token_id": (
        peagle(),
        {"mask_token_id": MASK, "block_size": 8, "layer_windows": (None,) * 3,
         "aux_layers": (0, 1, 2), "notes": ""},
    ),
    "P-EAGLE for vLLM, by pard_token": (
        without(peagle(pard_token=6), "ptd_token_id"),
        {"mask_token_id": 6, "layer_windows": (None,) * 3},
    ),
    "SpecForge's P-EAGLE, with a mask": (
        without(
            peagle(architectures=["PEagleDraftModel"], mask_token_id=MASK, max_window_layers=36,
                   use_sliding_window=False, sliding_window=None),
            "ptd_token_id", "eagle_config",
        ),
        {"mask_token_id": MASK, "aux_layers": None, "layer_windows": (None,) * 3},
    ),
    "NVIDIA Automodel's P-EAGLE": (
        automodel(), {"block_size": 7, "mask_token_id": MASK, "layer_windows": (None, None)},
    ),
    "P-EAGLE of speculators": (
        speculators_p(),
        {"block_size": 7, "mask_token_id": MASK, "layer_windows": (None,) * 3,
         "norm_before_residual": True},
    ),
    "P-EAGLE of one layer": (
        peagle(num_hidden_layers=1, parallel_drafting=True), {"mask_token_id": MASK},
    ),
    "RedHatAI/Qwen3-8B-speculator.eagle3": (
        speculators_3(has_no_defaults_at_init=False, speculators_version="0.1.0"),
        {"aux_layers": (0, 1, 2), "norm_before_residual": True},
    ),
    "google/gemma-4-31B-it-assistant": (
        ASSISTANTS["dense"][0],
        {"layer_windows": (8, 8, 8, None), "full_head_dim": 64, "full_kv_heads": 1,
         "num_key_value_heads": 2, "centroids": None, "backbone_hidden_size": 64, "notes": ""},
    ),
    "google/gemma-4-E2B-it-assistant": (
        ASSISTANTS["small"][0],
        {"full_head_dim": 64, "full_kv_heads": 1, "centroids": 14, "chosen": 4, "notes": ""},
    ),
    "google/gemma-4-12B-it-assistant": (
        ASSISTANTS["unified"][0],
        {"layer_windows": (8, 8, None), "full_kv_heads": 1, "centroids": None, "notes": ""},
    ),
}  # fmt: skip


PACKED, SQUEEZED = {"quant_method": "compressed-tensors"}, "quantization_config is .*compressed"
SINKS = "attention sinks are not supported"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nvidia/Nemotron-3.5-Lightning-DSpark": (
        dspark(
            attention_sink_bias=True, dflash_query_causal=True, dspark_bonus_anchor=True,
            dflash_config={"causal": True, "swa_window_size": WINDOW, "use_swa": True},
        ),
        f"attention_sink_bias is True.*{SINKS}",
    ),
    "XiaomiMiMo/MiMo-V2.5-Pro-DFlash": (method(attention_sink_bias=True), SINKS),
    "PrismML's Bonsai": (dspark(log_snr_conditioning=True), "log_snr_conditioning is True"),
    "Domino's fields without its projector": (
        method(emb_dim=64, gru_hidden_dim=8), "emb_dim is 64, of Domino",
    ),
    "Domino with a gate": (
        domino(dflash_config={"use_bias_gate": True}), "dflash_config.use_bias_gate is True",
    ),
    "Domino of DFlare's fusion": (
        domino(dflash_config={"fusion_mode": "flare"}), "fusion_mode is 'flare'",
    ),
    "Domino of speculators": (
        speculators(dflash_config={"projector_type": "domino", "emb_dim": 8}),
        "projector_type is 'domino', supported is 'dflash'",
    ),
    "Domino with a draft vocabulary": (
        domino(draft_vocab_size=40), "draft_vocab_size is 40, but",
    ),
    "Domino that contradicts itself": (
        domino(dflash_config={"sample_from_anchor": False}), "shift_label is True, which .*False",
    ),
    "Domino whose corrections begin nowhere": (
        domino(dflash_config={"pure_draft_prefix_len": 6}), "prefix_len is 6, more than the 5",
    ),
    "a gated Markov head": (dspark(markov_head_type="gated"), "markov_head_type is 'gated'"),
    "latent attention": (specforge(kv_lora_rank=512), "kv_lora_rank is 512.*MLA"),
    "norms of each layer": (method(fc_layernorm=True), "fc_layernorm is True"),
    "Hikari07jp/DSpark-Gemma-4-31B-draft": (
        dspark(architectures=["DFlashDraftModel"], block_size=16, dflash_config={}),
        "markov_rank is 8 in a DFlashDraftModel, .*which rows draft",
    ),
    "the same under NVIDIA's name of DFlash": (
        dspark(architectures=["Qwen3DFlashDraftModel"], dflash_config={}),
        "markov_rank is 8 in a Qwen3DFlashDraftModel, .*which rows draft",
    ),
    "a projector of another version": (
        method(projector_type="dflash2"), "projector_type is 'dflash2', supported is 'dflash'",
    ),
    "experts of Gemma 4": (
        dspark(**GEMMA_4 | {"enable_moe_block": True}), "enable_moe_block is True",
    ),
    "windows of Gemma 4, whose layers have another rope": (
        dspark(
            **GEMMA_4, layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW
        ),
        "layer_types holds 'sliding_attention'",
    ),
    "lightllm's Qwen3_5DFlashModel": (
        first(architectures=["Qwen3_5DFlashModel"]), "Qwen3_5DFlashModel",
    ),
    "JetSpec of speculators": (
        speculators(speculators_model_type="jetspec"), "speculators_model_type is 'jetspec'",
    ),
    "TensorRT Edge's jetspec_config": (first(jetspec_config={"causal_head": True}), "jetspec_conf"),
    "P-EAGLE of SpecForge, without a mask": (
        without(peagle(architectures=["PEagleDraftModel"]), "ptd_token_id"),
        "does not say which token its masks are",
    ),
    "P-EAGLE with two masks": (
        peagle(pard_token=6), "pard_token and ptd_token_id contradict",
    ),
    "P-EAGLE with a mask that is no token": (
        peagle(ptd_token_id=97), "mask_token_id is 97, outside the vocabulary of 97",
    ),
    "P-EAGLE and not": (
        eagle(parallel_drafting=False, mask_token_id=5), "parallel_drafting is false, but .*P-EAG",
    ),
    "EAGLE-3 of more layers": (eagle(num_hidden_layers=2), "num_hidden_layers is 2, supported"),
    "TensorRT-LLM's parallel heads": (
        inner(parallel_draft_step=2), "parallel_draft_step is 2, supported is 1",
    ),
    "another order in EAGLE-3": (inner(eh_proj_before_attn=True), "eh_proj_before_attn is True"),
    # fields that contradict each other
    "two answers to which rows draft": (
        method(query_zero_predicts_next=True, sample_from_anchor=False),
        "sample_from_anchor and query_zero_predicts_next contradict",
    ),
    "other layers under another name": (
        eagle(target_layer_ids=[0, 2]), "eagle_config.*are \\[0, 1, 2\\] and target_layer_ids are",
    ),
    "another number of layers": (eagle(num_aux_layers=5), "num_aux_layers is 5, but 3 layers"),
    "another number of layers than the usual three": (
        eagle(num_aux_layers=5, eagle_config={}), "num_aux_layers is 5, but 3 layers are read",
    ),
    "windows for other layers": (
        first(layer_sliding_windows=[4]), "layer_sliding_windows is \\[4\\].* 2 layers",
    ),
    "windows where there are none": (
        first(layer_types=["full_attention"] * 2, sliding_windows=[4, None]),
        "sliding_windows is .*but layer_types",
    ),
    "windows of no length": (
        first(use_sliding_window=True, max_window_layers=0), "lacks.*sliding_window",
    ),
    "use_swa without a window": (method(use_swa=True), "use_swa is true, but neither swa_window"),
    "a selector of more tokens": (
        second(dflash_config={"selector_vocab_size": 98}), "selector_vocab_size is 98.* 97",
    ),
    "a selector of fewer tokens than it offers": (
        second(dflash_config={"selector_vocab_size": 1}), "selector_vocab_size is 1, not from",
    ),
    "packed DFlash of speculators": (speculators(quantization_config=PACKED), SQUEEZED),
    "packed EAGLE-3 of speculators": (speculators_3(quantization_config=PACKED), SQUEEZED),
    "a drafter of another width": (
        method(target_hidden_size=128), "target_hidden_size is 128 and hidden_size 64",
    ),
    "a head of which nothing turns": (
        dspark(**NATIVE_35 | {"rope_parameters": {"partial_rotary_factor": 0.01}}),
        "partial_rotary_factor is 0.01",
    ),
}  # fmt: skip
