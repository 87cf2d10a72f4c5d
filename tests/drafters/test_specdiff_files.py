"""Which masked diffusion models are read, and what is refused before a weight is read."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import family_of, format_of
from dflash_mlx.drafters.networks.quantized import quantization_of
from dflash_mlx.drafters.networks.tensors import parameters_of
from dflash_mlx.drafters.specdiff.checkpoint import FILES
from dflash_mlx.models.check import check_drafter, check_pair, check_target
from dflash_mlx.models.load import load_pair
from dflash_mlx.verifier.model import Target
from support.converted import config, convert, tensors
from support.families import VOCAB_SIZE, make_model
from support.masked_formats import (
    FORMATS,
    MASK,
    a2d_qwen2,
    a2d_qwen3,
    behind,
    block_of,
    dream,
    fast_dllm,
    load,
    ours,
    published,
    sdar,
)
from support.masked_formats import tensors as random_tensors
from support.models import write_model
from support.reference_dflash import write_drafter_folder
from support.toys import prompt_of

QWEN = 151_936


def without(name: str, raw: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k != name}


REQUIRED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "rms_norm_eps",
    "max_position_embeddings", "vocab_size", "block_size", "mask_token_id",
)  # fmt: skip

# A config.json, and the field and values that the sentence must name
REFUSED: list[tuple[Any, str]] = [
    *((without(name, ours()), f"lacks.*{name}") for name in REQUIRED),
    (published("LLaDAModelLM"), "LLaDAModelLM, whose layers are not known.*A2DQwen3LMHeadModel"),
    (published("SDARMoeForCausalLM"), "SDARMoeForCausalLM"),
    (published("MDLM", vocab_size=50258), "MDLM"),
    (dream(logits_shifted=False), "logits_shifted is False, but for DreamModel it is True"),
    (fast_dllm(logits_shifted=False), "logits_shifted is False.*Fast_dLLM_Qwen.* True"),
    (a2d_qwen3(logits_shifted=True), "logits_shifted is True, but for A2DQwen3.* False"),
    (ours(logits_shifted="yes"), "logits_shifted is 'yes', not true or false"),
    (ours(mask_token_id=VOCAB_SIZE), f"mask_token_id is {VOCAB_SIZE}, outside .* of {VOCAB_SIZE}"),
    (ours(mask_token_id=-1), "mask_token_id is -1, outside"),
    (ours(mask_token_id="[MASK]"), r"mask_token_id is '\[MASK\]'"),
    (without("mask_token_id", a2d_qwen3()), f"mask_token_id is 151669, outside .* {VOCAB_SIZE}"),
    (without("mask_token_id", published("A2DLlamaLMHeadModel")), "lacks.*mask_token_id"),
    (ours(block_size=1), "block_size is 1, not from 2"),
    (sdar(block_size=0), "block_size is 0, not from 2"),
    (ours(block_size=7.5), "block_size is 7.5"),
    (ours(hidden_act="gelu"), "hidden_act is 'gelu'.*'silu'"),
    (ours(head_norms="false"), "head_norms is 'false'"),
    (ours(own_head="no"), "own_head is 'no'"),
    (ours(own_head=True, tie_word_embeddings=True), "tie_word_embeddings is true, but own_emb"),
    (ours(num_attention_heads=3), "3 attention heads do not divide by 2"),
    (ours(num_hidden_layers=0), "num_hidden_layers is 0"),
    (ours(layer_types=["linear_attention"] * 2), "linear_attention"),
    (ours(layer_types=["sliding_attention"] * 2), "lacks.*sliding_window"),
    (ours(rope_scaling={"rope_type": "spiral", "factor": 2.0}), "spiral"),
    (ours(quantization_config={"quant_method": "gptq"}), "quantization_config is .*gptq"),
    (ours(quantization={"group_size": 32, "bits": 3}), "bits .* 3"),
    (ours(final_logit_softcapping="high"), "final_logit_softcapping is 'high'"),
]


@pytest.mark.parametrize(("raw", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_used_is_refused_with_field_and_values(tmp_path, raw, said, monkeypatch):
    monkeypatch.setattr(mx, "load", None)  # no weight is read
    folder = write_drafter_folder(tmp_path, raw, random_tensors({**ours(), **raw}) if raw else {})
    errors = check_drafter(folder).errors
    with pytest.raises(DFlashError, match=said) as failure:
        FILES.read_drafter(folder)
    assert failure.value.next_step
    assert any(error.what == failure.value.what for error in errors)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"lm_head.weight": None}, "lm_head.weight .* is missing"),
        ({"model.layers.1.self_attn.q_norm.weight": None}, "layers.1.self_attn.q_norm.weight"),
        ({"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}, "no such tensor"),
        ({"model.embed_tokens.weight": np.zeros((50, 48), np.float32)}, r"\(50, 48\).*\(97, 48\)"),
        ({"model.layers.0.mlp.gate.weight": np.zeros((4, 48), np.float32)}, "no such tensor"),
    ],
    ids=str,
)
def test_tensors_that_the_class_does_not_have_are_refused(tmp_path, damage, said):
    stored = {**random_tensors(a2d_qwen3()), **damage}
    stored = {name: array for name, array in stored.items() if array is not None}
    folder = write_drafter_folder(tmp_path, a2d_qwen3(), stored)
    with pytest.raises(DFlashError, match=said):
        FILES.read_drafter(folder)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_recognised_and_checked_without_errors(tmp_path, name):
    raw, stored = FORMATS[name]
    assert format_of(raw) is FILES and family_of(FILES) == "specdiff"
    facts = check_drafter(write_drafter_folder(tmp_path, raw, stored))
    assert not facts.errors
    said = " ".join(finding.what for finding in facts.findings)
    assert ("no Python of it runs" in said) == ("auto_map" in raw)
    assert ("trained to see later tokens" in said) == ("auto_map" in raw)


def test_code_of_another_name_than_the_class_is_refused(tmp_path):
    raw = {**a2d_qwen3(), "auto_map": {"AutoModel": "evil.Evil"}}
    facts = check_drafter(write_drafter_folder(tmp_path, raw, random_tensors(raw)))
    assert any("evil.Evil" in error.what for error in facts.errors)


@pytest.mark.parametrize(
    ("raw", "mask", "block", "shifted"),
    [
        (a2d_qwen3(vocab_size=QWEN), 151669, 8, False),
        (a2d_qwen2(vocab_size=QWEN), 151665, 8, False),
        (sdar(vocab_size=QWEN), 151669, 4, False),
        (fast_dllm(vocab_size=QWEN, bd_size=32), 151665, 32, True),
        (without("bd_size", fast_dllm(vocab_size=QWEN)), 151665, 32, True),
        (dream(vocab_size=152_064), 151666, 8, True),
    ],
    ids=str,
)
def test_what_a_published_config_leaves_out_is_known_of_its_class(raw, mask, block, shifted):
    found = FILES.parse_config(without("mask_token_id", raw), "it")
    assert (found.mask_token_id, found.block_size, found.logits_shifted) == (mask, block, shifted)
    assert any(str(mask) in note for note in found.notes)
    assert any("blocks have 8" in note for note in found.notes) == (block == 8)
    assert FILES.parse_config({**raw, "mask_token_id": 7, "block_size": 5}, "it").block_size == 5


@pytest.mark.parametrize(
    ("raw", "target", "said"),
    [
        (ours(), {"vocab_size": 98, "hidden_size": 64}, "vocab_size 97, but T has 98"),
        (ours(), {"vocab_size": 97, "hidden_size": 32}, "hidden_size 64, but T has 32"),
        (ours(), {}, "vocab_size 97, but T has None"),
        (a2d_qwen3(), {"vocab_size": 98, "hidden_size": 48}, "vocab_size 97, but T has 98"),
        (a2d_qwen3(), {"vocab_size": 97, "hidden_size": 32}, ""),
        (ours(), {"vocab_size": 97, "hidden_size": 64}, ""),
    ],
)
def test_a_target_of_another_vocabulary_or_width_is_refused_with_both_values(raw, target, said):
    found = [
        finding.what for finding in FILES.misfits(FILES.parse_config(raw, "it"), target, "T", "D")
    ]
    assert any(said in what and "drafter D" in what for what in found) if said else not found


def test_another_tokenizer_is_refused_with_the_token(tmp_path):
    target = check_target(write_model(tmp_path / "model"))
    folder = write_drafter_folder(tmp_path / "drafter", *FORMATS["a2d-qwen3"])
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (error,) = check_pair(target, check_drafter(folder)).errors
    assert "'a'" in error.what or "'b'" in error.what


# Converting and loading


@pytest.mark.parametrize("name", FORMATS)
def test_a_converted_drafter_drafts_as_before(tmp_path, name):
    source = write_drafter_folder(tmp_path / "source", *FORMATS[name])
    converted = convert(source, tmp_path / "dst")
    assert config(converted)["architectures"] == ["MaskedDiffusionDraftModel"]
    assert "auto_map" not in config(converted)
    assert FILES.read_drafter(converted).config == FILES.read_drafter(source).config
    target, text = Target(make_model("llama"), 512, "tiny"), prompt_of(1, 30)
    first, second = (load(folder, target) for folder in (source, converted))
    block, places = mx.array(block_of(7, 6)), range(1, 6)
    said = [model.logits(behind(model, text), block, places) for model in (first, second)]
    assert mx.array_equal(*said)


@pytest.mark.parametrize("name", ["ours", "a2d-qwen3, tied with a copy", "dream"])
def test_packed_in_8_bits_it_drafts_nearly_the_same_and_is_unpacked_on_a_cpu(tmp_path, name):
    raw, _ = FORMATS[name]
    raw = {**raw, "intermediate_size": 128, "hidden_size": 64}
    source = write_drafter_folder(tmp_path / "source", raw, random_tensors(raw))
    packed = convert(source, tmp_path / "dst", "--bits", "8")
    assert config(packed)["quantization"] == {"group_size": 64, "bits": 8}
    assert any(name.endswith(".scales") for name in tensors(packed))
    target, text = Target(make_model("llama"), 512, "tiny"), prompt_of(1, 30)
    block, places, said = mx.array(block_of(7, 6)), range(1, 6), []
    for folder in (source, packed):
        model = load(folder, target)
        assert quantization_of(model.module) is None
        assert {array.dtype for array in parameters_of(model.module).values()} == {mx.float32}
        said.append(np.array(model.logits(behind(model, text), block, places)))
    error = np.abs(said[0] - said[1]).mean()
    assert 0 < error < 0.1 * said[0].std()
    assert quantization_of(load(source, target, drafter_bits=8).module) is not None, "if asked for"


def test_a_pair_with_one_is_loaded_by_name(tmp_path):
    model = write_model(tmp_path / "model")
    folder = write_drafter_folder(tmp_path / "drafter", *FORMATS["a2d-qwen3"])
    pair = load_pair(PairConfig(str(model), str(folder)))
    assert [drafter.family for drafter in pair.drafters] == ["specdiff"]
    assert pair.drafters[0].mask == MASK
    with pytest.raises(DFlashError, match="draft_window is 3, below .* block of 8"):
        load_pair(PairConfig(str(model), str(folder), draft_window=3))


def test_a_partial_head_drafts_likely_tokens_and_those_of_the_conversation(tmp_path):
    model = write_model(tmp_path / "model")
    folder = write_drafter_folder(tmp_path / "drafter", *FORMATS["ours"])
    pair = load_pair(PairConfig(str(model), str(folder), draft_vocabulary=10))
    (drafter,) = pair.drafters
    context = behind(drafter, [90, 91])
    finite = np.isfinite(np.array(drafter.logits(context, mx.array(block_of(92, 6)), range(1, 6))))
    assert finite.shape == (5, VOCAB_SIZE) and finite[:, [90, 91]].all()
    assert 12 <= finite[0].sum() < VOCAB_SIZE
