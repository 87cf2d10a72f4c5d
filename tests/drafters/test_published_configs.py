"""What is read of published configurations: all that matters, or a refusal by name."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.methods import format_as_drafter, format_of
from dflash_mlx.drafters.networks.files import parameters_of
from dflash_mlx.models.check import check_drafter
from support import published_mtp, published_sizes
from support.converted import assert_same_tensors
from support.drafter_formats import FORMATS, NATIVE_35, body, specforge, speculators
from support.drafter_formats import version_1 as first
from support.published_configs import READ
from support.published_parts import DEEPSPEC, MUSE, WINDOW, expected_of, value_of, without
from support.published_refusals import REFUSED
from support.reference_dflash import random_drafter, write_drafter_folder
from support.reference_dflash2 import tiny_config as second
from support.reference_domino import tiny_config as domino
from support.reference_dspark import tiny_config as dspark
from support.reference_eagle3 import random_tensors
from support.reference_eagle3 import raw as eagle
from support.reference_eagle3 import speculators as speculators_3
from support.reference_peagle import raw as peagle
from support.reference_peagle import speculators as speculators_p


def parsed(raw: dict[str, Any], stored: Any = ()) -> Any:
    files = format_as_drafter(raw)
    assert files is not None
    return files.parse_config(raw, "it", stored)


READ = {**READ, **published_mtp.READ, **published_sizes.READ}
REFUSED = {**REFUSED, **published_mtp.REFUSED, **published_sizes.REFUSED}


@pytest.mark.parametrize("name", READ)
def test_what_matters_is_read_wherever_it_is_published(name):
    config, fields = parsed(READ[name][0]), dict(expected_of(*READ[name]))
    notes = " ".join(config.notes)
    if (note := fields.pop("notes", None)) is not None:
        assert re.search(note, notes) if note else not notes
    assert {field: value_of(config, field) for field in fields} == fields


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_its_name_with_the_next_step(tmp_path, name):
    raw, said = REFUSED[name]
    with pytest.raises(DFlashError, match=said) as failure:
        parsed(raw)
    assert failure.value.next_step
    if format_of(raw) is None:  # a target's, in whose folder there would have to be a head
        return
    tensors = {
        "norm.weight": np.zeros(64, np.float32),
        "lm_head.weight": np.zeros((97, 64), np.float32),
        "layers.0.self_attn.sinks": np.zeros(4, np.float32),
        "layers.0.self_attn.kv_a_proj_with_mqa.weight": np.zeros((8, 64), np.float32),
        "prefix_gru.weight_ih_l0": np.zeros((24, 64), np.float32),
    }
    folder = write_drafter_folder(tmp_path, raw, tensors)
    assert any(re.search(said, error.what) for error in check_drafter(folder).errors)


# That nothing is passed over

PARTS = {  # a configuration, and the part of it in which a field is planted, "" for the file
    "dflash_config": (first(), "dflash_config"),
    "dflash_config of DFlash 2": (second(), "dflash_config"),
    "dflash_config of SpecForge's": (specforge(), "dflash_config"),
    "dflash_config of Domino": (domino(), "dflash_config"),
    "eagle_config": (eagle(), "eagle_config"),
    "eagle_config of P-EAGLE": (peagle(), "eagle_config"),
    "speculators' P-EAGLE": (speculators_p(), ""),
    "speculators": (speculators(), ""),
    "speculators' DSpark": (speculators("dspark"), ""),
    "speculators' EAGLE-3": (speculators_3(), ""),
}


def planted(part: str, value: Any) -> dict[str, Any]:
    raw, place = PARTS[part]
    new = {"new_head_kind": value}
    return {**raw, **(new if not place else {place: {**raw[place], **new}})}


@pytest.mark.parametrize("value", [True, 3, 0.5, "gru", [1], {"rank": 4}])
@pytest.mark.parametrize("part", PARTS)
def test_a_field_that_nobody_knows_is_refused_by_its_name(part, value):
    parsed(PARTS[part][0])
    with pytest.raises(DFlashError, match=f"new_head_kind is {re.escape(repr(value))}") as failure:
        parsed(planted(part, value))
    assert "--drafter" in failure.value.next_step


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
@pytest.mark.parametrize("part", PARTS)
def test_one_that_asks_for_nothing_is_noted(part, value):
    assert "new_head_kind" in " ".join(parsed(planted(part, value)).notes)


LAYERS = {  # a configuration, and the part of it in which its network's fields are
    "DFlash": (first(), ""),
    "DSpark": (dspark(), ""),
    "Domino": (domino(), ""),
    "EAGLE-3": (eagle(), ""),
    "P-EAGLE": (peagle(), ""),
    "speculators' P-EAGLE": (speculators_p(), "transformer_layer_config"),
    "speculators": (speculators(), "transformer_layer_config"),
    "speculators' EAGLE-3": (speculators_3(), "transformer_layer_config"),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("attention_sink_bias", True, False),
        ("add_swa_attention_sink_bias", True, None),
        ("kv_lora_rank", 512, 0),
        ("logit_scale", 0.5, 1.0),
        ("mlp_bias", True, False),
    ],
)
def test_a_field_of_the_layers_that_changes_them_is_refused(kind, name, value, harmless):
    raw, place = LAYERS[kind]

    def changed(value: Any) -> dict[str, Any]:
        return {**raw, **({place: {**raw[place], name: value}} if place else {name: value})}

    with pytest.raises(DFlashError, match=f"{name} is {value}, but"):
        parsed(changed(value))
    assert parsed(changed(harmless)) == parsed(raw)


@pytest.mark.parametrize("name", ["attention_sink_bias", "kv_lora_rank", "q_lora_rank", "mlp_bias"])
def test_one_that_the_tensors_contradict_is_the_target_s_and_noted(name):
    raw, tensors = FORMATS["dspark"]
    found = parsed({**raw, name: 8}, tensors)
    assert name in " ".join(found.notes)
    assert replace(found, notes=()) == parsed(raw, tensors)
    shown = {
        **tensors,
        "layers.0.self_attn.sinks": None,
        "layers.0.self_attn.kv_a_proj.weight": None,
    }
    with pytest.raises(DFlashError, match=f"{name} is 8, but"):
        parsed({**raw, name: 8}, {**shown, "layers.0.mlp.down_proj.bias": None})


def test_sizes_of_domino_s_head_in_a_dflash_without_one_are_noted():
    """A version of speculators writes them into every DFlash."""
    sizes = {"emb_dim": 256, "gru_hidden_dim": 1024, "pure_draft_prefix_len": 1}
    raw, tensors = FORMATS["speculators"]
    found = parsed({**raw, "projector_type": "dflash", "shift_label": False, **sizes}, tensors)
    assert all(name in " ".join(found.notes) for name in sizes)
    with pytest.raises(DFlashError, match="emb_dim is 256, of Domino"):
        parsed({**raw, **sizes}, {**tensors, "prefix_gru.weight_hh_l0": None})


def test_a_long_value_is_cut_in_the_sentence():
    with pytest.raises(DFlashError, match="new_head_kind is 'x+ [.]{3},") as failure:
        parsed(planted("dflash_config", "x" * 3000))
    assert len(failure.value.what) < 300


# Tensors


def test_the_width_of_q_proj_shows_whether_queries_are_gated():
    raw = dspark(**NATIVE_35)
    del raw["enable_qwen35_gated_q_proj"]
    assert parsed(raw, body(dspark(**NATIVE_35))).gated
    assert not parsed(raw, body(raw)).gated


def test_tensors_show_what_a_file_does_not_say_of_its_confidence_head():
    tensors = body(dspark())
    raw = without(dspark(), "enable_confidence_head", "confidence_head_with_markov")
    assert parsed(raw, tensors).enable_confidence_head
    assert parsed(raw, tensors).confidence_head_with_markov
    alone = body(dspark(confidence_head_with_markov=False))
    assert not parsed(raw, alone).confidence_head_with_markov
    none = {n: t for n, t in tensors.items() if "confidence" not in n}
    assert not parsed(raw, none).enable_confidence_head


def test_norms_of_1_plus_w_are_those_of_the_same_network_with_1_added(tmp_path):
    plain, tensors = FORMATS["dspark"]
    offset = {n: t - 1 if "norm" in n else t for n, t in tensors.items()}
    folders = (
        write_drafter_folder(tmp_path / "plain", plain, tensors),
        write_drafter_folder(tmp_path / "offset", {**plain, "model_type": "qwen3_5"}, offset),
    )
    networks = [FILES.load_network(f, FILES.read_drafter(f).config, mx.float32) for f in folders]
    one, other = (parameters_of(network) for network in networks)
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert np.allclose(np.array(array), np.array(other[name]), atol=1e-6), name


def test_the_assistant_of_muse_glimmer_is_a_dflash_under_other_names(tmp_path):
    muse = {**MUSE, "vocab_size": 97}
    plain = first(
        layer_types=muse["layer_types"], sliding_window=WINDOW, is_causal=False,
        output_multiplier=0.19611613513818404, final_logit_softcapping=20.0,
    )  # fmt: skip
    tensors = random_drafter(plain)
    theirs = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    renamed = {theirs.get(name, name): tensor for name, tensor in tensors.items()}
    found = FILES.read_drafter(write_drafter_folder(tmp_path / "muse", muse, renamed))
    same = FILES.read_drafter(write_drafter_folder(tmp_path / "plain", plain, tensors))
    assert_same_tensors(found.tensors, same.tensors)
    for name in ("layer_windows", "layer_causal", "aux_layers", "mask_token_id", "block_size",
                 "output_multiplier", "final_logit_softcapping"):  # fmt: skip
        assert getattr(found.config, name) == getattr(same.config, name), name
    assert found.files.family == "dflash" and not check_drafter(tmp_path / "muse").errors


def test_specforge_s_first_names_of_dspark_s_heads_are_read(tmp_path):
    raw, tensors = FORMATS["dspark, specforge"]
    renamed = {f"logit_head.{n}" if "_head." in n else n: t for n, t in tensors.items()}
    assert renamed.keys() != tensors.keys()
    found = FILES.read_drafter(write_drafter_folder(tmp_path / "renamed", raw, renamed))
    same = FILES.read_drafter(write_drafter_folder(tmp_path / "plain", raw, tensors))
    assert_same_tensors(found.tensors, same.tensors)


def test_deepspec_s_eagle_reads_as_many_layers_as_it_names(tmp_path):
    raw = without(eagle(**DEEPSPEC | {"target_layer_ids": [0, 1, 2]}), "eagle_config")
    tensors = random_tensors({**raw, "draft_vocab_size": 97}, embeds=True)
    heads = {f"midlayer.self_attn.{n}_norm.weight": np.ones(16, np.float32) for n in "qk"}
    named = {n.replace("midlayer.", "layers.0."): t for n, t in {**tensors, **heads}.items()}
    folder = write_drafter_folder(tmp_path, raw, named)
    drafter = format_of(raw).read_drafter(folder)
    assert drafter.config.head_norms and drafter.config.own_head and drafter.config.own_embedding
    assert not check_drafter(folder).errors


def test_the_selector_offers_no_padding_of_the_vocabulary(drafting):
    padded, plain = drafting("version 2, padded vocabulary"), drafting("version 2")
    walks = []
    for subject in (padded, plain):
        rows = subject.model.block_size
        context = subject.context(subject.text(9, 0))
        candidates = subject.model.candidates(context, mx.array([7]), rows)
        walks.append(candidates.at(candidates.likeliest()[0]).tolist())
        assert walks[-1] == subject.block(0, 7).greedy()
    assert max(walks[0]) < 60 <= max(walks[1])
