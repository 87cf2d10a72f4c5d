"""What is read of drafter folders, and which cannot be used, refused before a weight is read."""

from __future__ import annotations

import json
import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.dflash.network import NetworkConfig
from dflash_mlx.drafters.networks.tensors import parameters_of
from dflash_mlx.models.check import check_drafter
from support.converted import assert_same_tensors
from support.drafter_formats import (
    FORMATS,
    FULL,
    HALVES,
    REDUCED,
    SCALES,
    specforge,
    speculators,
    version_1,
    write_shards,
)
from support.reference_dflash import random_drafter, write_drafter_folder
from support.reference_dflash2 import tiny_config as version_2
from support.reference_dspark import tiny_config as dspark

NAN, INFINITY = float("nan"), float("inf")


def method(**changes: Any) -> dict[str, Any]:
    """Of the first version, with these fields of dflash_config."""
    return version_1(dflash_config=changes)


def second(**changes: Any) -> dict[str, Any]:
    """Of the second version, likewise."""
    return version_2(dflash_config=changes)


def layers(**changes: Any) -> dict[str, Any]:
    """Of speculators, with these fields of transformer_layer_config."""
    return speculators(transformer_layer_config=changes)


def without(name: str) -> dict[str, Any]:
    """Of the first version without a field; a dot leads into dflash_config."""
    raw = version_1()
    del (raw["dflash_config"] if "." in name else raw)[name.rpartition(".")[2]]
    return raw


REQUIRED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers",
    "num_target_layers", "rms_norm_eps", "max_position_embeddings", "vocab_size", "block_size",
    "dflash_config", "dflash_config.mask_token_id", "dflash_config.target_layer_ids",
)  # fmt: skip

# A config.json, and the field and value that the sentence must name
REFUSED: list[tuple[Any, str]] = [
    *((without(name), f"lacks.*{name.rpartition('.')[2]}") for name in REQUIRED),
    # what it describes
    ([], "unknown"),
    (version_1(architectures=[]), "unknown"),
    (version_1(architectures=["Qwen3ForCausalLM"]), "Qwen3ForCausalLM"),
    (version_1(architectures=["DFlash2DraftModel"]), "lacks.*conv_kernel_size"),
    (speculators(speculators_model_type="mtp"), "'mtp'.*; dflash, dflash2, dspark, eagle3 are"),
    ({**speculators(), "transformer_layer_config": [1]}, r"transformer_layer_config is \[1\]"),
    (version_1(dflash_config={}) | {"dflash_config": None}, "dflash_config is None"),
    # what our network does not do
    (version_1(hidden_act="gelu"), "hidden_act is 'gelu'.*'silu'"),
    (method(projector_type="domino"), "projector_type is 'domino'.*'dflash'"),
    (speculators(projector_type="domino"), "projector_type is 'domino'.*'dflash'"),
    (method(shift_label=True), "shift_label is true"),
    (speculators(shift_label=True), "shift_label is true"),
    (dspark(architectures=["Gemma4DSparkModel"]), "Gemma4DSparkModel"),
    (dspark(markov_head_type="rnn"), "markov_head_type is 'rnn'.*'vanilla'"),
    (speculators("dspark", markov_head_type="gated"), "markov_head_type is 'gated'.*'vanilla'"),
    (dspark(markov_rank=0), "markov_rank is 0, but enable_confidence_head"),
    (dspark(projector_type="domino"), "projector_type is 'domino'.*'dspark'"),
    (dspark(sample_from_anchor=False, shift_label=True), "shift_label is true"),
    (speculators(target_hidden_size=128), "target_hidden_size is 128 and hidden_size 64"),
    (version_1(layer_types=["full_attention", "linear_attention"]), "linear_attention"),
    (version_1(quantization_config={"quant_method": "fp8"}), "quantization_config is .*fp8"),
    (version_1(quantization={"group_size": 32, "bits": 4, "mode": "mxfp4"}), "mode is 'mxfp4'"),
    (version_1(quantization={"group_size": 32, "bits": 3}), "bits .* 3"),
    # flags and numbers
    *((raw, f"{field} is {value!r}, not true or false") for raw, field, value in (
        (version_1(attention_bias="false"), "attention_bias", "false"),
        (version_1(is_causal="false"), "is_causal", "false"),
        (method(causal=0), "causal", 0),
        (method(use_swa="false"), "use_swa", "false"),
        (method(own_head="false"), "own_head", "false"),
        (method(own_embedding="no"), "own_embedding", "no"),
        (speculators(sample_from_anchor="false"), "sample_from_anchor", "false"),
        (speculators(sliding_window_non_causal="false"), "sliding_window_non_causal", "false"),
        (dspark(enable_confidence_head="no"), "enable_confidence_head", "no"),
        (dspark(confidence_head_with_markov=1), "confidence_head_with_markov", 1),
        (dspark(rope_is_neox_style="no"), "rope_is_neox_style", "no"),
    )),
    (version_1(hidden_size="wide"), "hidden_size is 'wide'"),
    (layers(hidden_size="wide"), "hidden_size is 'wide'"),
    (version_1(block_size=7.9), "block_size is 7.9"),
    (version_1(block_size=INFINITY), "block_size is inf"),
    ({**without("head_dim"), "num_attention_heads": 0}, "num_attention_heads is 0"),
    (version_1(num_hidden_layers=0), "num_hidden_layers is 0"),
    (version_1(num_hidden_layers=1025), "num_hidden_layers is 1025"),
    (version_1(draft_vocab_size=0), "draft_vocab_size is 0"),
    (version_1(rms_norm_eps=NAN), "rms_norm_eps is nan"),
    (version_1(rms_norm_eps=-1.0), "rms_norm_eps is -1.0"),
    (method(output_multiplier=0), "output_multiplier is 0"),
    (method(input_embedding_scale=NAN), "input_embedding_scale is nan"),
    (method(final_logit_softcapping=NAN), "final_logit_softcapping is nan"),
    (second(selector_top_k=0), "selector_top_k is 0"),
    (dspark(markov_rank=-1), "markov_rank is -1"),
    (dspark(markov_rank=None), "markov_rank"),
    (dspark(num_target_layers=None), "num_target_layers"),
    ({**specforge(), "dflash_config": [1]}, r"dflash_config is \[1\]"),
    *((version_1(**{name: 2**31}), f"{name} is 2147483648") for name in (
        "hidden_size", "intermediate_size", "vocab_size", "head_dim"
    )),
    # numbers that contradict each other
    (version_1(num_key_value_heads=3), "4 attention heads .* 3 key/value heads"),
    *((raw, f"block_size is {raw.get('block_size') or 1}") for raw in (
        version_1(block_size=1), version_1(block_size=-8), version_1(block_size=1025)
    )),
    (dspark(block_size=0), "block_size is 0, not from 1 to 1023"),
    (dspark(draft_vocab_size=98), "draft_vocab_size is 98.* 97"),
    (dspark(target_layer_ids=[-1, 2]), r"\[-1, 2\].* 3 layers"),
    (method(mask_token_id=97), "mask_token_id is 97.* 97"),
    (method(mask_token_id=-1), "mask_token_id is -1.* 97"),
    (speculators(mask_token_id=None), "mask_token_id"),
    (method(target_layer_ids=[]), r"target_layer_ids are \[\]"),
    (method(target_layer_ids=[0, 3]), r"\[0, 3\].* 3 layers"),
    (method(target_layer_ids=[-1, 2]), r"\[-1, 2\].* 3 layers"),
    (method(target_layer_ids=3), "target_layer_ids are 3"),
    (speculators(aux_hidden_state_layer_ids=[0, 2]), r"\[0, 2\].*dflash_config.target_layer_ids"),
    (speculators(aux_hidden_state_layer_ids=None), "layer_ids are None"),
    (version_1(layer_types=["full_attention"]), "layer_types: 1 .* 2 layers"),
    (version_1(layer_types=5), "config.json"),
    (version_1(layer_types=["sliding_attention"] * 2), "lacks.*sliding_window"),
    (method(use_swa=True), "use_swa is true.* layer_types"),
    (speculators(draft_vocab_size=98), "draft_vocab_size is 98.* 97"),
    (version_1(draft_vocab_size=40), "draft_vocab_size is 40.*own_head is false"),
    (speculators("dflash2", draft_vocab_size=40), "draft_vocab_size is 40.*selector"),
    (second(conv_group_size=24), "hidden_size 64 .* conv_group_size 24"),
    (second(conv_kernel_size=7), "conv_kernel_size is 7.* block_size 6"),
    (second(selector_top_k=98), "selector_top_k is 98.* 97"),
    (version_1(num_attention_heads=2**20, num_key_value_heads=1, head_dim=2**20),
     "1048576 attention heads of 1048576 .* 2147483647"),
    (version_1(num_attention_heads=2**16, num_key_value_heads=2**16, head_dim=2**15),
     "65536 attention heads of 32768 .* 2147483647"),
    (version_1(hidden_size=2**30), "2 tapped layers of hidden_size 1073741824 .* 2147483647"),
    (version_2(hidden_size=2**24,
               dflash_config={"block_size": 256, "conv_group_size": 1, "conv_kernel_size": 256}),
     "kernel_size 256 over 16777216 groups .* 2147483647"),
    # ropes
    (version_1(rope_scaling={"rope_type": "magic"}), "magic"),
    (version_1(rope_scaling={"rope_type": "linear"}), "rope lacks 'factor'"),
    (version_1(rope_scaling={"rope_type": "linear", "factor": NAN}), "factor .* is nan"),
    (version_1(rope_theta=NAN), "rope_theta is nan"),
    (version_1(rope_theta=0), "rope_theta is 0"),
    (version_1(rope_parameters={"full_attention": {"rope_theta": 5e5}}), "rope_parameters are"),
    (version_1(rope_parameters=[1]), r"rope_parameters are \[1\]"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "value"), REFUSED, ids=[value for _, value in REFUSED])
def test_a_config_that_cannot_be_drafted_with_is_refused(tmp_path, raw, value):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(DFlashError, match=value) as failure:
        FILES.read_drafter(tmp_path)
    assert failure.value.next_step
    assert str(tmp_path) in failure.value.what or "bits" in failure.value.what


@pytest.mark.parametrize(
    "contents",
    [None, b"", b'{"architectures": ["DFlashDraftModel"]', b"\xff\xfe{}"],
    ids=["missing", "empty", "cut off", "not text"],
)
def test_a_config_that_cannot_be_read_is_refused(tmp_path, contents):
    if contents is not None:
        (tmp_path / "config.json").write_bytes(contents)
    with pytest.raises(DFlashError, match=str(tmp_path)) as failure:
        FILES.read_drafter(tmp_path)
    assert "drafter" in failure.value.next_step


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


# A format, tensors in place of its own (None for none), the tensor's name and both values
D2T, HEAD, FC = REDUCED["d2t"], "lm_head.weight", "fc.weight"
UP = "layers.0.mlp.up_proj.weight"
W1, W2, SURE = (f"{n}.weight" for n in (
    "markov_head.markov_w1", "markov_head.markov_w2", "confidence_head.proj"
))  # fmt: skip
TENSORS: list[tuple[str, dict[str, Any], str]] = [
    ("version 1", {"norm.weight": None}, r"norm.weight .* missing.*\(64,\)"),
    ("version 1", {HEAD: FULL[HEAD]}, r"lm_head.weight .*\(97, 64\).*no such tensor"),
    ("version 1", {"layers.2.mlp.up_proj.weight": zeros(4)}, "layers.2.mlp.up_proj.* no such"),
    ("version 1", {FC: zeros(64, 64)}, r"fc.weight .*\(64, 64\).*\(64, 128\)"),
    ("version 1", {UP: zeros(64, 96)}, r"up_proj.weight .*\(64, 96\).*\(96, 64\)"),
    ("version 1", {FC: zeros(64, 128, dtype=np.int32)}, "fc.weight .* of whole numbers"),
    ("version 1", {"layers.0.mlp_conv.base_kernel": zeros(2, 2, 64)}, "base_kernel .* no such"),
    ("version 2", {"candidate_selector.predecessor_codebook": None}, "decessor_codebook .* missin"),
    ("speculators", {"verifier_norm.weight": zeros(32)}, r"verifier_norm.*\(32,\).*\(64,\)"),
    ("dspark", {W1: None}, r"markov_w1.weight .* missing.*\(97, 8\)"),
    ("dspark", {W2: zeros(97, 4)}, r"markov_w2.weight .*\(97, 4\).*\(97, 8\)"),
    ("dspark", {SURE: None}, r"confidence_head.proj.weight .* missing.*\(1, 72\)"),
    ("dspark", {SURE: zeros(1, 64)}, r"confidence_head.proj.weight .*\(1, 64\).*\(1, 72\)"),
    ("dspark, no heads", {W1: zeros(97, 8)}, r"markov_w1.weight .*\(97, 8\).*no such tensor"),
    ("dspark, draft vocabulary", {W2: zeros(97, 8)}, r"markov_w2.*\(97, 8\).*\(40, 8\)"),
    (HALVES, {HEAD: FULL[HEAD]}, r"lm_head.weight .*\(97, 64\).*\(40, 64\)"),
    (HALVES, {HEAD: None}, "lm_head.weight .* missing"),
    (HALVES, {"d2t": None}, "d2t .* missing"),
    (HALVES, {"d2t": D2T.astype(np.float32)}, r"d2t .*\(40,\).*\(40,\) of whole numbers"),
    (HALVES, {"d2t": D2T + 60, "t2d": None}, "d2t .* draft token [0-9]+ to [0-9]+, .* 97"),
    (HALVES, {"d2t": -np.arange(40), "t2d": None}, "d2t .* 40 draft tokens to only 1 tokens"),
    (HALVES, {"t2d": ~REDUCED["t2d"]}, "t2d .* 57 tokens, .* the 40"),
]


@pytest.mark.parametrize(("name", "changes", "values"), TENSORS, ids=[t[2] for t in TENSORS])
def test_tensors_other_than_the_config_asks_for_are_refused_unread(
    tmp_path, monkeypatch, name, changes, values
):
    raw, tensors = FORMATS[name]
    kept = {k: v for k, v in {**tensors, **changes}.items() if v is not None}
    write_drafter_folder(tmp_path, raw, kept)
    monkeypatch.setattr(mx, "eval", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(DFlashError, match=values) as failure:
        FILES.read_drafter(tmp_path)
    assert "--drafter" in failure.value.next_step
    if "draft token" not in values and "t2d" not in values:  # what the heads alone show
        assert check_drafter(tmp_path).errors


@pytest.mark.parametrize(
    "field", ["intermediate_size", "vocab_size", "head_dim", "num_attention_heads", "hidden_size"]
)
def test_the_largest_sizes_are_compared_with_the_tensors_and_never_made(tmp_path, field):
    raw = {**method(target_layer_ids=[0]), "num_attention_heads": 1, "num_key_value_heads": 1}
    raw |= {field: 2**31 - 1, **({"head_dim": 1} if field == "num_attention_heads" else {})}
    write_drafter_folder(tmp_path, raw, FORMATS["version 1"][1])
    with pytest.raises(DFlashError, match="tensor .* is .* asks for"):
        FILES.read_drafter(tmp_path)
    assert check_drafter(tmp_path).errors


# Whether a drafter fits a target

TARGET = {"hidden_size": 64, "vocab_size": 97, "num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("raw", "field", "value", "values"),
    [
        (version_1(), "hidden_size", 128, "hidden_size 64, but tiny has 128"),
        (version_1(), "vocab_size", 98, "vocab_size 97, but tiny has 98"),
        (version_1(), "num_hidden_layers", 5, "layers 3, but tiny has 5"),
        (speculators(), "num_hidden_layers", 2, "no layer 2"),
    ],
)
def test_a_drafter_of_another_target_is_refused_with_both_values(raw, field, value, values):
    config = FILES.parse_config(raw, "tiny")
    assert not [*FILES.misfits(config, TARGET, "tiny")]
    (found,) = FILES.misfits(config, {**TARGET, field: value}, "tiny")
    assert re.search(values, found.what)
    assert "--drafter" in found.next_step and "--method none" in found.next_step


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def parse(raw: dict[str, Any]) -> NetworkConfig:
    return FILES.parse_config(raw, "test")


@pytest.mark.parametrize("write", [write_drafter_folder, write_shards])
@pytest.mark.parametrize(
    ("attention_bias", "dtype"), [(False, mx.float32), (True, mx.float32), (False, mx.bfloat16)]
)
def test_weights_come_back_in_the_type_of_the_target(tmp_path, write, attention_bias, dtype):
    raw = version_1(attention_bias=attention_bias)
    written = random_drafter(raw)
    if attention_bias:
        for layer in range(raw["num_hidden_layers"]):
            for name, rows in {"q": 64, "k": 32, "v": 32, "o": 64}.items():
                bias = np.arange(rows, dtype=np.float32)
                written[f"layers.{layer}.self_attn.{name}_proj.bias"] = bias
    folder = write(tmp_path, raw, written)
    read = parameters_of(FILES.load_network(folder, FILES.read_config(folder), dtype))
    expected = {name: mx.array(tensor).astype(dtype) for name, tensor in written.items()}
    assert_same_tensors(read, expected)


def lacking(*names: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in version_1(**changes).items() if k not in names}


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        (None, {"rope_type": "default", "rope_theta": 5e5}),
        (YARN, {**YARN, "rope_theta": 5e5}),
        (
            {"type": "linear", "factor": 2.0},
            {"rope_type": "linear", "type": "linear", "factor": 2.0},
        ),
    ],
)
def test_rope_is_read_in_both_layouts(scaling, rope):
    expected = parse(version_1(rope_theta=5e5, rope_scaling=scaling))
    assert expected.rope == {"rope_theta": 5e5, **rope}
    given = {**(scaling or {}), **rope, "rope_theta": 5e5}
    newer = lacking("rope_theta", "rope_scaling", rope_parameters=given)
    assert parse(newer) == expected


INSIDE = {"block_size": 6}
ROPES = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 2e4}}
LIBRARY = speculators(transformer_layer_config={"rope_parameters": ROPES, **SLIDING})


@pytest.mark.parametrize(
    ("raw", "fields"),
    [
        (version_1(), {"block_size": 8, "final_logit_softcapping": None, "notes": ()}),
        (version_1(dflash_config=INSIDE), {"block_size": 6}),
        (lacking("block_size", dflash_config=INSIDE), {"block_size": 6}),
        (lacking("head_dim", "num_key_value_heads"), {"head_dim": 16, "num_key_value_heads": 4}),
        (lacking("attention_bias"), {"attention_bias": False}),
        (version_1(), {"input_embedding_scale": 1.0, "output_multiplier": 1.0}),
        (version_1(dflash_config=SCALES), SCALES),
        (version_1(final_logit_softcapping=9.0), {"final_logit_softcapping": 9.0}),
        (LIBRARY, {"rope": {"rope_theta": 2e4, "rope_type": "default"}}),
    ],
)
def test_fields_are_read_in_each_of_their_places_and_follow_from_others(raw, fields):
    read = parse(raw)
    assert {name: getattr(read, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("raw", "windows", "causal"),
    [
        (version_1(), (None, None), (False, False)),
        (version_1(is_causal=True), (None, None), (True, True)),
        (version_1(dflash_config={"causal": True}), (None, None), (True, True)),
        (version_1(dflash_config={"causal": True}, is_causal=False), (None,) * 2, (False, False)),
        (version_1(**SLIDING), (6, None), (True, False)),
        (version_1(**SLIDING, is_causal=True), (6, None), (True, True)),
        (version_1(**SLIDING, is_causal=False), (6, None), (False, False)),
        (version_1(layer_types=None, sliding_window=6), (None, None), (False, False)),
        (LIBRARY, (6, None), (True, False)),
        ({**LIBRARY, "sliding_window_non_causal": True}, (6, None), (False, False)),
        ({**LIBRARY, "sliding_window_non_causal": None}, (6, None), (True, False)),
    ],
)
def test_windows_and_causality_follow_from_layer_types_and_flags(raw, windows, causal):
    read = parse(raw)
    assert (read.layer_windows, read.layer_causal) == (windows, causal)
