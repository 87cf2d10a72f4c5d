"""Which files of draft models are refused, in every format of every family.

All is refused before a weight is read, in a sentence with the field, its value and what to do next.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import DFlashError
from dflash_mlx.drafters.dflash import checkpoint as dflash
from dflash_mlx.drafters.eagle3 import checkpoint as eagle3
from dflash_mlx.drafters.methods import format_of
from dflash_mlx.models.check import check_drafter
from support import drafter_formats, reference_eagle3
from support.converted import convert
from support.drafter_formats import FULL, HALVES, REDUCED, speculators, version_1
from support.drafting import CASES
from support.families import VOCAB_SIZE
from support.masked_formats import a2d_qwen3, dream, ours, published, sdar
from support.reference_dflash import write_drafter_folder
from support.reference_dflash2 import tiny_config as version_2
from support.reference_dspark import tiny_config as dspark
from support.reference_eagle3 import LAYERS_READ as IDS
from support.reference_eagle3 import inner
from support.reference_eagle3 import raw as eagle
from support.reference_eagle3 import speculators as speculators_3

NAN, INFINITY = float("nan"), float("inf")


def without(name: str, raw: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k != name}


def method(**changes: Any) -> dict[str, Any]:
    """DFlash, with these fields of dflash_config."""
    return version_1(dflash_config=changes)


def second(**changes: Any) -> dict[str, Any]:
    """DFlash 2, likewise."""
    return version_2(dflash_config=changes)


# Fields


def places(raw: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Of all fields, also of those in other fields."""
    for name, value in raw.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, own) for own in value)


def changed(raw: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    holder = raw if len(place) == 1 else raw[place[0]]
    if value is places:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return raw


REQUIRED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "rms_norm_eps",
    "max_position_embeddings", "vocab_size",
)  # fmt: skip
# What can stand in no field that has a value of this kind
OTHER = ("x", [1], NAN, INFINITY)
NEVER: dict[type, tuple[Any, ...]] = {
    bool: (*OTHER, -1, 0, 0.5, 2**31, {}, []),
    int: (*OTHER, -1, 0.5, 2**31, {}, [], True),
    float: (*OTHER, {}, [], True),
}
UNREAD = (
    "use_cache", "use_mrope", "tie_word_embeddings", "embed_requires_grad", "num_anchors",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "version 2, scaled and capped", "dspark", HALVES, "eagle3, raw", "eagle3, speculators",
        "specdiff, ours, own tables", "specdiff, dream",
    ],
)  # fmt: skip
def test_every_field_of_another_kind_is_refused_by_its_name(name):
    """Whatever else stands there, nothing but a sentence or a configuration comes of it."""
    raw, stored = CASES[name][1]
    files = format_of(raw)
    assert files is not None
    refused = 0
    for place in places(raw):
        sound = raw[place[0]] if len(place) == 1 else raw[place[0]][place[-1]]
        never = () if place[-1] in UNREAD else NEVER.get(type(sound), ())
        for value in (*NEVER[bool], None, True, places):
            is_wrong = repr(value) in map(repr, never)
            is_wrong |= value is places and place[-1] in REQUIRED
            try:
                files.parse_config(changed(raw, place, value), "it", stored)
            except DFlashError as error:
                assert error.next_step and "it" in error.what and "\n" not in error.what
                refused += 1
                assert not is_wrong or place[-1] in error.what, (place, value, error.what)
            else:
                assert not is_wrong, (place, value)
    assert refused > 50


ROPE = {"rope_type": "spiral", "factor": 2.0}

# A config.json, and the field and value that the sentence must name
REFUSED: list[tuple[Any, str]] = [
    *((without(name, version_1()), f"lacks.*{name}")
      for name in ("block_size", "dflash_config")),
    *((method() | {"dflash_config": without(name, method()["dflash_config"])}, f"lacks.*{name}")
      for name in ("mask_token_id", "target_layer_ids")),
    *((without(name, ours()), f"lacks.*{name}") for name in ("block_size", "mask_token_id")),
    # what it describes
    (version_1(architectures=["Qwen3ForCausalLM"]), "Qwen3ForCausalLM"),
    (version_1(architectures=["DFlash2DraftModel"]), "lacks.*conv_kernel_size"),
    (speculators(speculators_model_type="mtp"), "'mtp'.*; dflash, .*, eagle3, peagle are"),
    ({**speculators(), "transformer_layer_config": [1]}, r"transformer_layer_config is \[1\]"),
    ({**speculators_3(), "transformer_layer_config": 3}, "transformer_layer_config is 3"),
    (version_1(dflash_config={}) | {"dflash_config": None}, "dflash_config is None"),
    (dspark(architectures=["Gemma4DSparkModel"]), "lacks.*global_head_dim"),
    (eagle(architectures=["Eagle3DeepseekV2ForCausalLM"]), "'Eagle3Deepse.*LlamaForCausalLMEagl"),
    (eagle(eagle_config=3), "eagle_config is 3"),
    (published("LLaDAModelLM"), "LLaDAModelLM, whose layers are not known.*A2DQwen3LMHeadModel"),
    (published("SDARMoeForCausalLM"), "SDARMoeForCausalLM"),
    (published("MDLM", vocab_size=50258), "MDLM"),
    # what our networks do not do
    *((raw, "hidden_act is 'gelu'.*'silu'") for raw in (
        version_1(hidden_act="gelu"), eagle(hidden_act="gelu"), ours(hidden_act="gelu"))),
    (method(projector_type="causal_v1"), "projector_type is 'causal_v1'.*'dflash'"),
    (speculators(projector_type="causal_v1"), "projector_type is 'causal_v1'.*'dflash'"),
    (dspark(projector_type="causal_v1"), "projector_type is 'causal_v1'.*'dspark'"),
    (method(projector_type="dflash") | {"projector_type": "x"}, "projector_type is 'x'.*'dflash'"),
    (method(shift_label=True), "shift_label is true"),
    (method(shift_label=False) | {"shift_label": True}, "shift_label is true"),
    (version_1(target_hidden_size=128, dflash_config={"target_hidden_size": 64}), "size is 128"),
    (dspark(sample_from_anchor=False, shift_label=True), "shift_label is true"),
    (dspark(markov_head_type="rnn"), "markov_head_type is 'rnn'.*'vanilla'"),
    (dspark(markov_rank=0), "markov_rank is 0, but enable_confidence_head"),
    (dspark(markov_rank=None), "markov_rank"),
    (speculators(target_hidden_size=128), "target_hidden_size is 128 and hidden_size 64"),
    (version_1(layer_types=["full_attention", "linear_attention"]), "linear_attention"),
    (version_1(quantization_config={"quant_method": "fp8"}), "quantization_config is .*fp8"),
    (version_1(quantization={"group_size": 32, "bits": 4, "mode": "mxfp4"}), "mode is 'mxfp4'"),
    *((raw, "bits .* 3") for raw in (
        make(quantization={"group_size": 32, "bits": 3}) for make in (version_1, eagle, ours))),
    *((raw, "num_hidden_layers is 2, supported is 1") for raw in (
        eagle(num_hidden_layers=2), speculators_3({"num_hidden_layers": 2}))),
    (inner(use_aux_hidden_state=False), "use_aux_hidden_state is False, supported is True"),
    (inner(use_mtp_layernorm=True), "use_mtp_layernorm is True, supported is False"),
    (inner(parallel_draft_step=2), "parallel_draft_step is 2, supported is 1"),
    (dream(logits_shifted=False), "logits_shifted is False, but for DreamModel it is True"),
    (a2d_qwen3(logits_shifted=True), "logits_shifted is True, but for A2DQwen3.* False"),
    # numbers and flags
    (version_1(num_hidden_layers=1025), "num_hidden_layers is 1025"),
    (version_1(draft_vocab_size=0), "draft_vocab_size is 0"),
    (version_1(rms_norm_eps=-1.0), "rms_norm_eps is -1.0"),
    (method(output_multiplier=0), "output_multiplier is 0"),
    (second(selector_top_k=0), "selector_top_k is 0"),
    ({**without("head_dim", version_1()), "num_attention_heads": 0}, "num_attention_heads is 0"),
    *((raw, f"{field} is {value!r}, not true or false") for raw, field, value in (
        (version_1(is_causal="false"), "is_causal", "false"),
        (method(causal=0), "causal", 0),
        (method(use_swa="false"), "use_swa", "false"),
        (method(own_head="false"), "own_head", "false"),
        (dspark(rope_is_neox_style="no"), "rope_is_neox_style", "no"),
        (speculators_3(norm_output=1), "norm_output", 1),
        (ours(head_norms="false"), "head_norms", "false"),
    )),
    # numbers that contradict each other
    (version_1(num_key_value_heads=3), "4 attention heads .* 3 key/value heads"),
    *((raw, f"block_size is {raw['block_size']}, not from") for raw in (
        version_1(block_size=1), version_1(block_size=1025), dspark(block_size=0),
        eagle(block_size=1), ours(block_size=1), sdar(block_size=0))),
    (dspark(draft_vocab_size=98), "draft_vocab_size is 98.* 97"),
    (method(mask_token_id=97), "mask_token_id is 97.* 97"),
    (ours(mask_token_id=-1), "mask_token_id is -1, outside"),
    (without("mask_token_id", a2d_qwen3()), f"mask_token_id is 151669, outside .* {VOCAB_SIZE}"),
    (without("mask_token_id", published("A2DLlamaLMHeadModel")), "lacks.*mask_token_id"),
    (speculators(mask_token_id=None), "mask_token_id"),
    (method(target_layer_ids=[]), r"target_layer_ids are \[\]"),
    (method(target_layer_ids=[0, 3]), r"\[0, 3\].* 3 layers"),
    (dspark(target_layer_ids=[-1, 2]), r"\[-1, 2\].* 3 layers"),
    (method(target_layer_ids=3), "target_layer_ids are 3"),
    (speculators(aux_hidden_state_layer_ids=[0, 2]), r"\[0, 2\].*dflash_config.target_layer_ids"),
    (speculators(aux_hidden_state_layer_ids=None), "layer_ids are None"),
    (inner(**{IDS: []}), f"{IDS} are \\[\\], not numbers from 0"),
    (inner(**{IDS: [0, -1, 2]}), f"{IDS} are \\[0, -1, 2\\], not numbers from 0"),
    (speculators_3(**{IDS: [0, 1, 2]}), f"{IDS} are \\[0, 1, 2\\], not numbers from 1"),
    (speculators_3(**{IDS: "all"}), f"{IDS} are 'all'"),
    (version_1(layer_types=["full_attention"]), "layer_types: 1 .* 2 layers"),
    (version_1(layer_types=5), "config.json"),
    *((raw, "lacks.*sliding_window") for raw in (
        version_1(layer_types=["sliding_attention"] * 2), eagle(layer_types=["sliding_attention"]),
        ours(layer_types=["sliding_attention"] * 2))),
    (method(use_swa=True), "use_swa is true.* sliding_window"),
    (version_1(draft_vocab_size=40), "draft_vocab_size is 40.*own_head is false"),
    (speculators("dflash2", draft_vocab_size=40), "draft_vocab_size is 40.*selector"),
    (eagle(draft_vocab_size=98), "draft_vocab_size is 98, more than the vocabulary of 97"),
    (speculators_3(norm_before_fc=True, fc_norm=True), "norm_before_fc and fc_norm are both true"),
    (eagle(**reference_eagle3.NARROW), "target_hidden_size is 64 and hidden_size 32, .* embedding"),
    (ours(own_head=True, tie_word_embeddings=True), "tie_word_embeddings is true, but own_emb"),
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
    *((raw, "spiral") for raw in (
        version_1(rope_scaling=ROPE), eagle(rope_scaling=ROPE), ours(rope_scaling=ROPE))),
    (version_1(rope_scaling={"rope_type": "linear"}), "rope lacks 'factor'"),
    (version_1(rope_scaling={"rope_type": "linear", "factor": NAN}), "factor .* is nan"),
    (version_1(rope_theta=0), "rope_theta is 0"),
    (version_1(rope_parameters={"full_attention": {"rope_theta": 5e5}}), "rope_parameters are"),
    (version_1(rope_parameters=[1]), r"rope_parameters are \[1\]"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_config_that_cannot_be_drafted_with_is_refused(tmp_path, raw, said):
    write_drafter_folder(tmp_path, raw, {"norm.weight": zeros(64), HEAD: zeros(97, 64)})
    files = (format_of(raw) if raw else None) or dflash.FILES
    with pytest.raises(DFlashError, match=said) as failure:
        files.read_drafter(tmp_path)
    assert failure.value.next_step and check_drafter(tmp_path).errors
    assert str(tmp_path) in failure.value.what or "bits" in failure.value.what


@pytest.mark.parametrize(
    "contents",
    [None, b"", b'{"architectures": ["DFlashDraftModel"]', b"\xff\xfe{}", b"[]"],
    ids=["missing", "empty", "cut off", "not text", "no object"],
)
def test_a_config_that_cannot_be_read_is_refused(tmp_path, contents):
    if contents is not None:
        (tmp_path / "config.json").write_bytes(contents)
    with pytest.raises(DFlashError, match=str(tmp_path)) as failure:
        dflash.FILES.read_drafter(tmp_path)
    assert "drafter" in failure.value.next_step


# Tensors


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


D2T, HEAD, FC = REDUCED["d2t"], "lm_head.weight", "fc.weight"
UP, Q = "layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_norm.weight"
W1, W2, SURE = (f"{n}.weight" for n in (
    "markov_head.markov_w1", "markov_head.markov_w2", "confidence_head.proj"
))  # fmt: skip
MASKED, RAW = "specdiff, a2d-qwen3", "eagle3, raw"

# A format, tensors in place of its own (None for none), the tensor's name and both values
TENSORS: list[tuple[str, dict[str, Any], str]] = [
    ("version 1", {"norm.weight": None}, r"norm.weight .* missing.*\(64,\)"),
    ("version 1", {HEAD: FULL[HEAD]}, r"lm_head.weight .*\(97, 64\).*no such tensor"),
    ("version 1", {FC: zeros(64, 64)}, r"fc.weight .*\(64, 64\).*\(64, 128\)"),
    ("version 1", {UP: zeros(64, 96)}, r"up_proj.weight .*\(64, 96\).*\(96, 64\)"),
    ("version 1", {FC: zeros(64, 128, dtype=np.int32)}, "fc.weight .* of whole numbers"),
    ("version 1", {"layers.0.mlp_conv.base_kernel": zeros(2, 2, 64)}, "base_kernel .* no such"),
    ("version 2", {"candidate_selector.predecessor_codebook": None}, "decessor_codebook .* missin"),
    ("speculators", {"verifier_norm.weight": zeros(32)}, r"verifier_norm.*\(32,\).*\(64,\)"),
    ("dspark", {W1: None}, r"markov_w1.weight .* missing.*\(97, 8\)"),
    ("dspark", {SURE: zeros(1, 64)}, r"confidence_head.proj.weight .*\(1, 64\).*\(1, 72\)"),
    ("dspark, no heads", {W1: zeros(97, 8)}, r"markov_w1.weight .*\(97, 8\).*no such tensor"),
    ("dspark, draft vocabulary", {W2: zeros(97, 8)}, r"markov_w2.*\(97, 8\).*\(40, 8\)"),
    (HALVES, {HEAD: None}, "lm_head.weight .* missing"),
    (HALVES, {"d2t": None}, "d2t .* missing"),
    (HALVES, {"d2t": D2T.astype(np.float32)}, r"d2t .*\(40,\).*\(40,\) of whole numbers"),
    (HALVES, {"d2t": D2T + 60, "t2d": None}, "d2t .* draft token [0-9]+ to [0-9]+, .* 97"),
    (HALVES, {"d2t": -np.arange(40), "t2d": None}, "d2t .* 40 draft tokens to only 1 tokens"),
    (HALVES, {"t2d": ~REDUCED["t2d"]}, "t2d .* 57 tokens, .* the 40"),
    (RAW, {"d2t": zeros(30, dtype=np.int64)}, r"d2t .* is \(30,\) .* \(40,\)"),
    (
        "eagle3, raw",
        {"t2d": zeros(40, dtype=np.bool_)},
        r"t2d .* is \(40,\) .* \(97,\) of yes and no",
    ),
    (RAW, {FC: zeros(64, 128)}, r"fc.weight .* \(64, 128\).*\(64, 192\)"),
    (
        "eagle3, raw",
        {"midlayer.hidden_norm.weight": None},
        "midlayer.hidden_norm.weight .* is missing",
    ),
    (
        "eagle3, raw",
        {"layers.1.mlp.up_proj.weight": zeros(4)},
        "layers.1.mlp.up_proj.* no such tensor",
    ),
    (RAW, {HEAD: None}, "draft_vocab_size is 40 of 97 tokens, .* no lm_head"),
    (MASKED, {HEAD: None}, "lm_head.weight .* is missing"),
    (MASKED, {Q: None}, "layers.1.self_attn.q_norm.weight"),
    (MASKED, {"model.layers.0.self_attn.q_proj.bias": zeros(64)}, "no such tensor"),
    (MASKED, {"model.embed_tokens.weight": zeros(50, 48)}, r"\(50, 48\).*\(97, 48\)"),
]


@pytest.mark.parametrize(("name", "changes", "values"), TENSORS, ids=[t[2] for t in TENSORS])
def test_tensors_other_than_the_config_asks_for_are_refused_unread(
    tmp_path, monkeypatch, name, changes, values
):
    raw, tensors = CASES[name][1]
    kept = {k: v for k, v in {**tensors, **changes}.items() if v is not None}
    write_drafter_folder(tmp_path, raw, kept)
    monkeypatch.setattr(mx, "eval", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(DFlashError, match=values) as failure:
        format_of(raw).read_drafter(tmp_path)
    assert "--drafter" in failure.value.next_step
    if "draft token" not in values and "t2d .* 57" not in values:  # what the heads alone show
        assert check_drafter(tmp_path).errors


@pytest.mark.parametrize(
    "field", ["intermediate_size", "vocab_size", "head_dim", "num_attention_heads", "hidden_size"]
)
def test_the_largest_sizes_are_compared_with_the_tensors_and_never_made(tmp_path, field):
    raw = {**method(target_layer_ids=[0]), "num_attention_heads": 1, "num_key_value_heads": 1}
    raw |= {field: 2**31 - 1, **({"head_dim": 1} if field == "num_attention_heads" else {})}
    write_drafter_folder(tmp_path, raw, drafter_formats.FORMATS["version 1"][1])
    with pytest.raises(DFlashError, match="tensor .* is .* asks for"):
        dflash.FILES.read_drafter(tmp_path)
    assert check_drafter(tmp_path).errors


def test_a_tied_head_is_refused(tmp_path):
    given = eagle(tie_word_embeddings=True, draft_vocab_size=VOCAB_SIZE)
    stored = reference_eagle3.random_tensors(given, embeds=True)
    has = write_drafter_folder(tmp_path / "has", given, stored)
    assert eagle3.FILES.read_drafter(has).config.own_head
    del stored[HEAD]
    with pytest.raises(DFlashError, match="tie_word_embeddings is true"):
        eagle3.FILES.read_drafter(write_drafter_folder(tmp_path / "none", given, stored))


@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle3", "Evil"])
def test_code_of_its_own_is_never_run(tmp_path, name):
    given = eagle(auto_map={"AutoModel": f"modeling.{name}"})
    stored = reference_eagle3.random_tensors(given)
    facts = check_drafter(write_drafter_folder(tmp_path, given, stored))
    assert ["Evil" in error.what for error in facts.errors] == [True] * (name == "Evil")


@pytest.mark.parametrize(
    ("says", "value"),
    [
        ({"group_size": 32, "bits": 8}, "fc.* of packed numbers, .* of packed numbers"),
        ({"group_size": 64, "bits": 4}, r"fc.biases .*\(64, 4\), .*\(64, 2\)"),
        (None, "fc.biases .* no such tensor"),
    ],
    ids=["other bits", "other groups", "not packed"],
)
def test_a_packed_folder_whose_config_says_otherwise_is_refused(tmp_path, says, value):
    sound = drafter_formats.case(version_1(intermediate_size=128))
    plain = write_drafter_folder(tmp_path / "plain", *sound)
    folder = convert(plain, tmp_path / "packed", "--bits", "4", "--group-size", "32")
    raw = json.loads((folder / "config.json").read_text())
    for name in ("quantization", "quantization_config"):
        assert raw.pop(name) == {"group_size": 32, "bits": 4}
    raw |= {} if says is None else {"quantization": says}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(DFlashError, match=value) as failure:
        dflash.FILES.load_network(folder, dflash.FILES.read_drafter(folder).config, mx.float32)
    assert "--drafter" in failure.value.next_step
