"""Configurations as people publish them, in tiny, and what is read of each.

The fields stand as in the public file that names the row; sizes are small.
"""

from __future__ import annotations

from typing import Any

from support.assistant_formats import CASES as ASSISTANTS
from support.drafter_formats import GEMMA_4, NATIVE_35, lfm2, specforge, speculators
from support.drafter_formats import version_1 as first
from support.published_parts import (
    BOTH,
    COPIED,
    DEEPSPEC,
    EVERY_ROW,
    FULL,
    MARKOV,
    MUSE,
    NO_HEADS,
    WINDOW,
    method,
    without,
)
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
        second(dflash_config={"selector_vocab_size": 90}), {"selector_vocab_size": 90},
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
        second(architectures=["Qwen3DFlash2DraftModel"]), {"selector_rank": 8, "notes": ""},
    ),
    "NVIDIA Model-Optimizer's DFlash 2": (
        second(dflash_config={"projector_type": "dflash2"}), {"selector_rank": 8, "notes": ""},
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
        {"block_size": 6, "sample_from_anchor": True, "markov_rank": RANK,
         "enable_confidence_head": True},
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
    "LiquidAI/LFM2.5-DSpark": (
        lfm2(), {"sample_from_anchor": True, "confidence_head_with_markov": True},
    ),
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
        {"block_size": 6, "markov_rank": 4, "enable_confidence_head": False, "notes": ""},
    ),
    "dspark_markov_rank alone": (
        without(dspark(dspark_markov_rank=4), "markov_rank"), {"markov_rank": 4},
    ),
    "DSpark under DFlash's name that says which rows draft": (
        dspark(architectures=["DFlashDraftModel"], sample_from_anchor=True, dflash_config={}),
        {**MARKOV, "block_size": 6, "sample_from_anchor": True},
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
         "emb_dim": NARROW, "gru_hidden_dim": STATE, "pure_draft_prefix_len": 1, "notes": ""},
    ),
    "SpecForge's Domino": (
        domino(),
        {"block_size": 6, "pure_draft_prefix_len": 1, "sample_from_anchor": True,
         "gru_hidden_dim": STATE},
    ),
    "NVIDIA Automodel's Domino, without a shift": (
        domino(
            architectures=["Qwen3DFlashDraftModel"],
            dflash_config={"shift_label": False, "pure_draft_prefix_len": 0},
        ),
        {"block_size": 5, "pure_draft_prefix_len": 0, "sample_from_anchor": False,
         "gru_hidden_dim": STATE},
    ),
    "Domino under its first name": (
        domino(architectures=["DFlashDraftModel"], dflash_config={"projector_type": "causal_v5"}),
        {"gru_hidden_dim": STATE, "emb_dim": NARROW, "pure_draft_prefix_len": 1, "block_size": 6,
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
