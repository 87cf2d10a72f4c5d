"""Configurations as people publish them, in tiny, that are refused, and what is said of each.

The fields stand as in the public file that names the row; sizes are small.
"""

from __future__ import annotations

from typing import Any

from support.drafter_formats import GEMMA_4, NATIVE_35, specforge, speculators
from support.drafter_formats import version_1 as first
from support.published_parts import WINDOW, method, without
from support.reference_dflash2 import tiny_config as second
from support.reference_domino import tiny_config as domino
from support.reference_dspark import tiny_config as dspark
from support.reference_eagle3 import inner
from support.reference_eagle3 import raw as eagle
from support.reference_eagle3 import speculators as speculators_3
from support.reference_peagle import raw as peagle

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
