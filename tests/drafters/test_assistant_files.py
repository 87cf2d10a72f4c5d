"""The files of Gemma 4's assistants: what is read, and what is refused before weights are."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import DFlashError, PairConfig, generate
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.assistant.checkpoint import FILES
from dflash_mlx.drafters.methods import format_of
from dflash_mlx.drafters.networks.files import Quantization
from dflash_mlx.models.check import check_drafter, check_pair, check_target, language_model
from dflash_mlx.models.load import load_pair
from support.assistant_formats import CASES, ORDERED, ROPES, text_of
from support.assistants import (
    assistant,
    logits_along,
    make_target,
    state_of,
    target_of,
    tensors,
)
from support.configs import config_with
from support.drafter_formats import loaded
from support.drafting import difference
from support.models import edit_config, write_model
from support.reference_dflash import write_drafter_folder

DENSE, SMALL = CASES["dense"][0], CASES["small"][0]


def changed(raw: dict[str, Any], text: dict[str, Any] | None = None, **file: Any) -> dict[str, Any]:
    """A configuration with other fields; None for fields that it does not have."""
    inner = {**raw["text_config"], **(text or {})}
    inner = {name: value for name, value in inner.items() if value is not None}
    return {k: v for k, v in {**raw, "text_config": inner, **file}.items() if v is not None}


def parsed(raw: dict[str, Any]) -> Any:
    files = format_of(raw)
    assert files is FILES and files.family == "assistant"
    return files.parse_config(raw, "it")


def test_all_that_the_files_say_is_read():
    dense, small = parsed(DENSE), parsed(SMALL)
    assert dense.layer_windows == (8, 8, 8, None) and dense.centroids is None
    assert dense.heads("full_attention") == (64, 1) and dense.heads("sliding_attention") == (32, 2)
    assert small.heads("full_attention") == (64, 1) and small.heads("sliding_attention") == (32, 1)
    assert (small.centroids, small.chosen) == (14, 4)
    assert dense.block_size == 8 and dense.aux_layers == () and dense.notes == ()
    assert dense.layers_read(30) == (29,) and dense.target_width == 64


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no class": (DENSE, changed(DENSE, architectures=None)),
    "as newer files list full attention": (
        DENSE,
        changed(
            DENSE,
            {
                "global_head_dim": None,
                "num_global_key_value_heads": None,
                "per_layer_config": {"3": {"head_dim": 64, "num_key_value_heads": 1}},
            },
        ),
    ),
    "full heads of the others' number": (
        SMALL, changed(SMALL, {"num_global_key_value_heads": 3}),
    ),
    "shared by all without a word": (DENSE, changed(DENSE, {"num_kv_shared_layers": 0})),
    "what libraries write": (
        DENSE,
        changed(
            DENSE,
            {"use_cache": True, "num_experts": None, "use_bidirectional_attention": "vision"},
            audio_token_id=9, transformers_version="5.7.0.dev0",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_the_same_is_read_of_other_layouts(name):
    raw, other = SAME[name]
    assert parsed(other) == parsed(raw)


REFUSED = {
    "inputs of each layer": ({"hidden_size_per_layer_input": 16}, {}, "per_layer_input is 16"),
    "experts": ({"enable_moe_block": True}, {}, "enable_moe_block is True"),
    "twice as wide": ({"use_double_wide_mlp": True}, {}, "use_double_wide_mlp is True"),
    "looking ahead": ({"use_bidirectional_attention": "all"}, {}, "attention is 'all'"),
    "another activation": ({"hidden_activation": "silu"}, {}, "hidden_activation is 'silu'"),
    "a head of its own": ({}, {"tie_word_embeddings": False}, "tie_word_embeddings is False"),
    "some layers share": ({"num_kv_shared_layers": 2}, {}, "num_kv_shared_layers is 2, .* 4"),
    "no rope of a kind": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, {}, "of sliding_attention",
    ),
    "a window of one": ({"sliding_window": 1}, {}, "sliding_window is 1"),
    "layers that differ": (
        {"per_layer_config": {"0": {"head_dim": 64}}}, {}, "per_layer_config is .*full attention",
    ),
    "a layer that it does not have": (
        {"per_layer_config": {"9": {"head_dim": 64}}}, {}, "per_layer_config is .*full attention",
    ),
    "centroids that do not divide": ({}, {"use_ordered_embeddings": True}, "14, which 97 tokens"),
    "more centroids than there are": (
        {"vocab_size": ORDERED},
        {"use_ordered_embeddings": True, "centroid_intermediate_top_k": 15},
        "top_k is 15 of 14",
    ),
    "no width": ({}, {"backbone_hidden_size": None}, "lacks.*backbone_hidden_size"),
    "a part of each head that is less than nothing": (
        {"rope_parameters": {
            kind: {**rope, "partial_rotary_factor": -0.25} for kind, rope in ROPES.items()
        }}, {}, "partial_rotary_factor is -0.25",
    ),
    "a rope that nobody knows": (
        {"rope_parameters": dict.fromkeys(
            ("full_attention", "sliding_attention"), {"rope_theta": 1e6, "rope_type": "spiral"}
        )},
        {},
        "RoPE type spiral",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_its_name(tmp_path, name):
    text, file, said = REFUSED[name]
    raw = changed(DENSE, text, **file)
    folder = write_drafter_folder(tmp_path, raw, tensors("dense"))
    with pytest.raises(DFlashError, match=said) as failure:
        loaded(folder, target_of("dense"))
    assert failure.value.next_step
    assert check_drafter(folder).errors


@pytest.mark.parametrize("value", [True, 3, 0.5, "gru", [1], {"rank": 4}])
@pytest.mark.parametrize("inside", [False, True])
def test_a_field_that_nobody_knows_is_refused_by_its_name(inside, value):
    new = {"new_head_kind": value}
    raw = changed(DENSE, new) if inside else changed(DENSE, **new)
    with pytest.raises(DFlashError, match="new_head_kind is"):
        parsed(raw)
    nothing = {"new_head_kind": False}
    raw = changed(DENSE, nothing) if inside else changed(DENSE, **nothing)
    assert "new_head_kind" in " ".join(parsed(raw).notes)


# With a target


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another family": ({"model_type": "gemma3_text"}, "Gemma 4, but it is of gemma3_text"),
    "another width": ({"hidden_size": 48}, "hidden_size 64, but it has 48"),
    "another vocabulary": ({"vocab_size": 99}, "vocab_size 97, but it has 99"),
    "no layer of a kind": (
        {"layer_types": ["sliding_attention"] * 6}, "full_attention, but it has none",
    ),
    "none that has keys": ({"num_kv_shared_layers": 4}, "full_attention, but it has none"),
    "other heads": ({"global_head_dim": 9}, "1 heads of 64 in .*full.*, but it has 1 heads of 9"),
    "more heads": ({"num_key_value_heads": 4}, "2 heads of 32 in .*sliding.*, but it has 4 heads"),
    "a shorter window": ({"sliding_window": 4}, "last 8 keys .*, but it keeps 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_an_assistant_of_another_target_is_refused_with_both_values(name):
    target, said = OTHERS[name]
    theirs = {**CASES["dense"][1], **target}
    found = [each.what for each in FILES.misfits(parsed(DENSE), theirs, "it")]
    assert any(re.search(said, what) for what in found), found


@pytest.mark.parametrize("name", CASES)
def test_an_assistant_fits_its_own_target(name):
    raw, theirs = CASES[name]
    assert not [*FILES.misfits(parsed(raw), language_model(theirs), "it")]


def test_a_target_of_another_family_is_refused_when_it_is_bound_as_well(tmp_path):
    with pytest.raises(DFlashError, match="reads a layer of full_attention, and .* has none"):
        sizes = {"layer_types": ["sliding_attention"] * 6}
        assistant(tmp_path, "dense", make_target("dense", **sizes))


def test_an_ordering_that_lacks_tokens_is_refused(tmp_path):
    stored = tensors("small")
    stored["masked_embedding.token_ordering"] = np.zeros(ORDERED, np.int64)
    folder = write_drafter_folder(tmp_path, SMALL, stored)
    with pytest.raises(DFlashError, match=f"token_ordering in .* {ORDERED} tokens once"):
        loaded(folder, target_of("small"))


def test_a_head_beside_the_embedding_is_passed_over_and_other_tensors_are_refused(tmp_path):
    stored = tensors("dense")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    loaded(write_drafter_folder(tmp_path, DENSE, stored), target_of("dense"))
    stored["model.layers.0.self_attn.k_proj.weight"] = np.zeros((64, 32), np.float32)
    with pytest.raises(DFlashError, match=r"k_proj.weight in .*no such tensor"):
        loaded(write_drafter_folder(tmp_path, DENSE, stored), target_of("dense"))


@pytest.mark.parametrize("name", ["dense", "small"])
@pytest.mark.parametrize("bits", [4, 8])
def test_folders_that_mlx_has_packed_draft_as_what_loading_packs(tmp_path, name, bits):
    target, tokens = target_of(name), text_of(21)
    at_load = assistant(tmp_path / "whole", name, drafter_bits=bits)
    packed, raw = FILES.read_drafter(tmp_path / "whole").converted(None, bits, 32)
    folder = tmp_path / "packed"
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), packed)
    (folder / "config.json").write_text(json.dumps(raw))
    models = at_load, loaded(folder, target), assistant(tmp_path / "whole", name)
    assert models[1].config.quantization == Quantization(32, bits)
    first, second, whole = (
        logits_along(model, state_of(model, target, tokens), [tokens[-1], 3]) for model in models
    )
    assert difference(first, second) < 1e-4
    assert not np.allclose(first, whole, atol=1e-4)


# Loading a pair


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    """A target's and its assistant's."""
    model = write_model(tmp_path / "model", make_target("dense").model, **CASES["dense"][1])
    return model, write_drafter_folder(tmp_path / "drafter", DENSE, tensors("dense"))


def test_a_pair_with_one_is_loaded_by_name_and_answers_as_plain_decoding(folders):
    model, drafter = map(str, folders)
    pair = load_pair(PairConfig(model, drafter))
    assert [each.family for each in pair.drafters] == ["assistant"]
    uses = [DecodeConfig("none"), DecodeConfig("assistant", block_size=4), DecodeConfig()]
    uses += [config_with("assistant", budget=12, branches=3)]
    answers = [generate(pair, "hello", replace(use, max_tokens=16)) for use in uses]
    assert len({answer.tokens for answer in answers}) == 1
    assert sum(answers[1].statistics.drafted.values()) > 0


def test_a_pair_that_does_not_fit_is_refused_before_weights_are_read(folders):
    model, drafter = folders
    edit_config(model, num_kv_shared_layers=4)
    (model / "model.safetensors").write_bytes(b"")
    report = check_pair(check_target(model), check_drafter(drafter))
    assert "none with keys of its own" in report.errors[0].what
    with pytest.raises(DFlashError):
        load_pair(PairConfig(str(model), str(drafter)))
