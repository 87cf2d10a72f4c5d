"""Drafter folders of every format that contradict themselves, refused before a weight is read."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import (
    check_fit,
    parse_config,
    read_drafter,
)
from support import reference_dflash2
from support.drafter_formats import (
    FORMATS,
    FULL,
    HALVES,
    REDUCED,
    speculators,
    version_1,
)
from support.reference_dflash import write_drafter_folder

REFUSED: dict[str, tuple[Any, str]] = {
    "eagle3": (speculators(speculators_model_type="eagle3"), "'eagle3', .* not supported"),
    "dspark": (speculators(speculators_model_type="dspark"), "'dspark', .* not supported"),
    "no network": (speculators(transformer_layer_config={"hidden_size": "wide"}), "hidden_size"),
    "a network that is a list": (
        {**speculators(), "transformer_layer_config": [1]},
        r"transformer_layer_config is \[1\]",
    ),
    "another width": (
        speculators(target_hidden_size=128),
        "target_hidden_size is 128 and hidden_size 64",
    ),
    "samples from the anchor": (speculators(sample_from_anchor=True), "sample_from_anchor"),
    "a sampled anchor in words": (
        speculators(sample_from_anchor="false"),
        "sample_from_anchor is 'false', not true or false",
    ),
    "windows in words": (
        speculators(sliding_window_non_causal="false"),
        "sliding_window_non_causal is 'false', not true or false",
    ),
    "shifted labels": (speculators(shift_label=True), "shift_label is true, supported is false"),
    "another projector": (
        speculators(projector_type="domino"),
        "projector_type is 'domino', supported is 'dflash'",
    ),
    "another activation": (
        speculators(transformer_layer_config={"hidden_act": "gelu_pytorch_tanh"}),
        "hidden_act is 'gelu_pytorch_tanh', supported is 'silu'",
    ),
    "the embedding as a tap": (
        speculators(aux_hidden_state_layer_ids=[0, 2]),
        r"\[0, 2\]; .*the embedding, 0, .*dflash_config.target_layer_ids",
    ),
    "taps in words": (speculators(aux_hidden_state_layer_ids="all"), "'all'"),
    "no taps": (speculators(aux_hidden_state_layer_ids=None), "None"),
    "no mask": (speculators(mask_token_id=None), "mask_token_id"),
    "a mask outside": (speculators(mask_token_id=97), "mask_token_id is 97, .* 97"),
    "a larger draft vocabulary": (
        speculators(draft_vocab_size=98),
        "draft_vocab_size is 98, not less than the vocabulary of 97",
    ),
    "a draft vocabulary with a selector": (
        speculators("dflash2", draft_vocab_size=40),
        "draft_vocab_size is 40, but the selector needs",
    ),
    "groups that do not divide": (
        reference_dflash2.tiny_config(dflash_config={"conv_group_size": 24}),
        "hidden_size 64 does not divide by conv_group_size 24",
    ),
    "more taps than rows": (
        reference_dflash2.tiny_config(dflash_config={"conv_kernel_size": 7}),
        "conv_kernel_size is 7, more than the block_size 6",
    ),
    "more candidates than tokens": (
        reference_dflash2.tiny_config(dflash_config={"selector_top_k": 98}),
        "selector_top_k is 98, more than the vocabulary of 97",
    ),
    "no candidates": (
        reference_dflash2.tiny_config(dflash_config={"selector_top_k": 0}),
        "selector_top_k is 0",
    ),
    "packed by another tool": (
        version_1(quantization_config={"quant_method": "fp8"}),
        "quantization_config is .*fp8.* not MLX's",
    ),
    "packed in another mode": (
        version_1(quantization={"group_size": 32, "bits": 4, "mode": "mxfp4"}),
        "quantization.mode is 'mxfp4'",
    ),
    "packed in three bits": (version_1(quantization={"group_size": 32, "bits": 3}), "bits .* 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_cannot_be_drafted_with_is_refused(tmp_path, name):
    raw, message = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(DFlashError, match=message) as failure:
        read_drafter(tmp_path)
    assert failure.value.next_step
    assert str(tmp_path) in failure.value.what or "bits" in failure.value.what


def changed(name: str, **tensors: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    raw, written = FORMATS[name]
    return raw, {k: v for k, v in {**written, **tensors}.items() if v is not None}


D2T = REDUCED["d2t"]
TENSORS = {
    "a head of the whole vocabulary": (
        changed(HALVES, **{"lm_head.weight": FULL["lm_head.weight"]}),
        r"lm_head.weight in .* is \(97, 64\), .* asks for \(40, 64\)",
    ),
    "no draft vocabulary": (changed(HALVES, d2t=None), "d2t in .* is missing"),
    "no head": (changed(HALVES, **{"lm_head.weight": None}), "lm_head.weight in .* is missing"),
    "a fractional draft vocabulary": (
        changed(HALVES, d2t=D2T.astype(np.float32)),
        r"d2t in .* is \(40,\), .* asks for \(40,\) of whole numbers",
    ),
    "a draft token outside": (
        changed(HALVES, d2t=D2T + 60, t2d=None),
        "d2t in .* leads from draft token [0-9]+ to [0-9]+, but the vocabulary has 97",
    ),
    "two draft tokens that are one": (
        changed(HALVES, d2t=-np.arange(40), t2d=None),
        "d2t in .* leads from 40 draft tokens to only 1 tokens",
    ),
    "a mask of other tokens": (
        changed(HALVES, t2d=~REDUCED["t2d"]),
        "t2d in .* marks 57 tokens, which are not the 40",
    ),
    "a verifier's norm of another width": (
        changed("speculators", **{"verifier_norm.weight": np.ones(32, np.float32)}),
        r"verifier_norm.weight in .* is \(32,\), .* asks for \(64,\)",
    ),
    "no selector": (
        changed("version 2", **{"candidate_selector.predecessor_codebook": None}),
        "candidate_selector.predecessor_codebook in .* is missing",
    ),
    "a convolution in the first version": (
        changed("version 1", **{"layers.0.mlp_conv.base_kernel": np.ones((2, 2, 64), np.float32)}),
        "mlp_conv.base_kernel in .* no such tensor",
    ),
    "a head that nobody asked for": (
        changed("version 1", **{"lm_head.weight": FULL["lm_head.weight"]}),
        "lm_head.weight .* no such tensor",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_contradict_the_config_are_refused(tmp_path, name):
    (raw, tensors), message = TENSORS[name]
    write_drafter_folder(tmp_path, raw, tensors)
    with pytest.raises(DFlashError, match=message) as failure:
        read_drafter(tmp_path)
    assert "--drafter" in failure.value.next_step


def test_a_drafter_that_does_not_know_its_targets_depth_must_still_read_layers_that_are_there():
    config = parse_config(speculators(), "tiny")
    assert config.num_target_layers is None
    target = {"hidden_size": 64, "vocab_size": 97, "num_hidden_layers": 3}
    check_fit(config, target, "tiny")
    with pytest.raises(DFlashError, match=r"reads layer 2 .* tiny has 2 layers") as failure:
        check_fit(config, {**target, "num_hidden_layers": 2}, "tiny")
    assert "--drafter" in failure.value.next_step
