"""Which EAGLE-3 files are read, and what is refused before a weight is read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import DFlashError, PairConfig, generate, load_pair
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.eagle3.checkpoint import FILES
from dflash_mlx.drafters.eagle3.network import usual_layers
from dflash_mlx.drafters.methods import family_of, format_of
from dflash_mlx.drafters.networks.quantized import quantization_of
from dflash_mlx.drafters.networks.tensors import parameters_of
from dflash_mlx.models.check import check_drafter, check_pair, check_target
from dflash_mlx.verifier.model import Target
from support.configs import config_with
from support.converted import config, convert, tensors
from support.families import VOCAB_SIZE, make_model
from support.models import write_model
from support.reference_dflash import write_drafter_folder
from support.reference_eagle3 import (
    DRAFT_IDS,
    FORMATS,
    NARROW,
    TAPS,
    ours,
    random_tensors,
    raw,
    speculators,
)


def without(name: str) -> dict[str, Any]:
    return {k: v for k, v in raw().items() if k != name}


def eagle(**changes: Any) -> dict[str, Any]:
    """With these fields of eagle_config."""
    return raw(eagle_config={**raw()["eagle_config"], **changes})


def layer(**changes: Any) -> dict[str, Any]:
    return speculators(changes)


IDS = "eagle_aux_hidden_state_layer_ids"
REQUIRED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "rms_norm_eps",
    "max_position_embeddings", "vocab_size",
)  # fmt: skip

# A config.json, and the field and values that the sentence must name
REFUSED: list[tuple[dict[str, Any], str]] = [
    *((without(name), f"lacks.*{name}") for name in REQUIRED),
    # what it describes
    (raw(architectures=["Eagle3DeepseekV2ForCausalLM"]), "'Eagle3DeepseekV2.*LlamaForCausalLMEagl"),
    (raw(num_hidden_layers=2), "num_hidden_layers is 2, supported is 1"),
    (layer(num_hidden_layers=2), "num_hidden_layers is 2, supported is 1"),
    (raw(hidden_act="gelu"), "hidden_act is 'gelu'.*'silu'"),
    ({**speculators(), "transformer_layer_config": 3}, "transformer_layer_config is 3"),
    (raw(eagle_config=3), "eagle_config is 3"),
    (eagle(use_aux_hidden_state=False), "use_aux_hidden_state is False, supported is True"),
    (eagle(use_mtp_layernorm=True), "use_mtp_layernorm is True, supported is False"),
    (eagle(parallel_draft_step=2), "parallel_draft_step is 2, supported is 1"),
    (raw(quantization_config={"quant_method": "fp8"}), "quantization_config is .*fp8"),
    (raw(quantization={"group_size": 32, "bits": 3}), "bits .* 3"),
    (raw(rope_scaling={"rope_type": "spiral", "factor": 2.0}), "spiral"),
    # flags and numbers
    (speculators(norm_before_residual="yes"), "norm_before_residual is 'yes', not true or false"),
    (speculators(norm_output=1), "norm_output is 1, not true or false"),
    (raw(block_size=1), "block_size is 1, not from 2"),
    (raw(hidden_size="wide"), "hidden_size is 'wide'"),
    (raw(num_attention_heads=3), "3 attention heads do not divide by 2"),
    (raw(draft_vocab_size=0), "draft_vocab_size is 0"),
    (raw(layer_types=["sliding_attention"]), "lacks.*sliding_window"),
    # contradictions
    (raw(draft_vocab_size=98), "draft_vocab_size is 98, more than the vocabulary of 97"),
    (speculators(norm_before_fc=True, fc_norm=True), "norm_before_fc and fc_norm are both true"),
    (raw(**NARROW), "target_hidden_size is 64 and hidden_size 32, but .* embedding"),
    # layers that are read
    (eagle(**{IDS: []}), f"{IDS} are \\[\\], not numbers from 0"),
    (eagle(**{IDS: [0, -1, 2]}), f"{IDS} are \\[0, -1, 2\\], not numbers from 0"),
    (speculators(**{IDS: [0, 1, 2]}), f"{IDS} are \\[0, 1, 2\\], not numbers from 1"),
    (speculators(**{IDS: "all"}), f"{IDS} are 'all'"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_used_is_refused_with_field_and_values(tmp_path, given, said, monkeypatch):
    monkeypatch.setattr(mx, "load", None)  # no weight is read
    stored = random_tensors(NARROW | raw() if "target_hidden_size" in given else raw())
    folder = write_drafter_folder(tmp_path, given, stored)
    errors = check_drafter(folder).errors
    with pytest.raises(DFlashError, match=said) as failure:
        FILES.read_drafter(folder)
    assert failure.value.next_step
    assert any(error.what == failure.value.what for error in errors)


ZEROS = np.zeros((len(DRAFT_IDS), 64), np.float32)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"d2t": None}, "d2t .* is missing, but .* asks for .40,. of whole numbers"),
        ({"d2t": np.zeros(30, np.int64)}, r"d2t .* is \(30,\) .* \(40,\)"),
        ({"d2t": np.zeros(40, np.float32)}, r"d2t .* is \(40,\), but .* whole numbers"),
        ({"t2d": np.zeros(40, np.bool_)}, r"t2d .* is \(40,\) .* \(97,\) of yes and no"),
        ({"lm_head.weight": ZEROS[:30]}, r"lm_head.weight .* is \(30, 64\), .* \(40, 64\)"),
        ({"fc.weight": np.zeros((64, 128), np.float32)}, r"fc.weight .* \(64, 128\).*\(64, 192\)"),
        ({"midlayer.hidden_norm.weight": None}, "midlayer.hidden_norm.weight .* is missing"),
        ({"layers.1.mlp.up_proj.weight": ZEROS}, "layers.1.mlp.up_proj.* no such tensor"),
        ({"lm_head.weight": None}, "draft_vocab_size is 40 of 97 tokens, .* no lm_head"),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_the_config_are_refused(tmp_path, damage, said, monkeypatch):
    monkeypatch.setattr(mx, "load", None)
    stored = {n: a for n, a in {**random_tensors(raw()), **damage}.items() if a is not None}
    folder = write_drafter_folder(tmp_path, raw(), stored)
    with pytest.raises(DFlashError, match=said):
        FILES.read_drafter(folder)


@pytest.mark.parametrize(
    ("d2t", "said"),
    [
        (np.full(40, 58), "from draft token 39 to 97, but the vocabulary has 97"),
        (-np.arange(40), "from 40 draft tokens to only 1 tokens"),
        (np.zeros(40, np.int64), "t2d .* marks 40 tokens, which are not the 40"),
    ],
)
def test_a_draft_vocabulary_that_leads_nowhere_is_refused(tmp_path, d2t, said):
    stored = {**random_tensors(raw()), "d2t": d2t.astype(np.int64)}
    with pytest.raises(DFlashError, match=said):
        FILES.read_drafter(write_drafter_folder(tmp_path, raw(), stored))


def test_a_tied_head_is_refused(tmp_path):
    given = raw(tie_word_embeddings=True, draft_vocab_size=VOCAB_SIZE)
    stored = random_tensors(given, embeds=True)
    assert FILES.read_drafter(write_drafter_folder(tmp_path / "has", given, stored)).config.own_head
    del stored["lm_head.weight"]
    with pytest.raises(DFlashError, match="tie_word_embeddings is true"):
        FILES.read_drafter(write_drafter_folder(tmp_path / "none", given, stored))


@pytest.mark.parametrize("name", FORMATS)
def test_every_layout_is_recognised_and_checked_without_errors(tmp_path, name):
    given, stored = FORMATS[name]
    assert format_of(given) is FILES and family_of(FILES) == "eagle3"
    facts = check_drafter(write_drafter_folder(tmp_path, given, stored))
    assert not facts.errors and facts.config.aux_layers == tuple(TAPS)
    (note,) = [f.what for f in facts.findings if IDS in f.what] or [""]
    assert ("layers [0, 1, 2]" in note) == ("transformer_layer_config" in given)


def test_a_model_that_is_no_drafter_stays_a_target():
    assert format_of({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}) is None
    assert format_of(speculators(speculators_model_type="dflash")) is not FILES


def test_layers_are_numbered_as_the_field_that_names_them_does():
    assert FILES.parse_config(eagle(**{IDS: [1, 17, 32]}), "it").aux_layers == (1, 17, 32)
    assert FILES.parse_config(speculators(**{IDS: [2, 18, 33]}), "it").aux_layers == (1, 17, 32)
    assert FILES.parse_config(without("eagle_config"), "it").aux_layers is None
    assert usual_layers(36) == (1, 17, 32), "the states before layers 2, 18 and 33"


@pytest.mark.parametrize(
    ("given", "target", "said"),
    [
        (ours(), {"hidden_size": 32}, "hidden_size 64, but T has 32"),
        (ours(), {"vocab_size": 98}, "vocab_size 97, but T has 98"),
        (ours(), {"num_hidden_layers": 5}, "number of target layers 3, but T has 5"),
        (raw(), {"num_hidden_layers": 2}, r"layers \[0, 1, 2\] .* T has 2 layers, and no layer 2"),
        (without("eagle_config"), {}, r"layers \[1, 0, -1\] .* has 3 layers, and no layer -1"),
        (
            without("eagle_config"),
            {"num_hidden_layers": 4},
            r"layers \[1, 1, 0\] .* T has 4 layers",
        ),
        (
            without("eagle_config"),
            {"num_hidden_layers": 6},
            r"layers \[1, 2, 2\] .* T has 6 layers",
        ),
        (raw(eagle_config={IDS: [2, 1, 0]}), {}, r"layers \[2, 1, 0\] .* T has 3 layers"),
        (without("eagle_config"), {"num_hidden_layers": 7}, ""),
        (raw(), {}, ""),
    ],
)
def test_another_target_is_refused_with_both_values(given, target, said):
    facts = {"hidden_size": 64, "vocab_size": 97, "num_hidden_layers": 3, **target}
    found = [
        finding.what for finding in FILES.misfits(FILES.parse_config(given, "it"), facts, "T", "D")
    ]
    assert bool(found) == bool(said)
    if said:
        assert re.search(f"drafter D .*{said}", found[0])


def test_a_file_that_names_no_layers_reads_the_usual_ones(tmp_path):
    model = write_model(tmp_path / "model", make_model("llama", layers=7), num_hidden_layers=7)
    given = without("eagle_config")
    folder = write_drafter_folder(tmp_path / "drafter", given, random_tensors(given))
    pair = load_pair(PairConfig(str(model), str(folder)))
    assert pair.drafters[0].aux_layers == (1, 2, 3)
    answers = [
        generate(pair, "hello", DecodeConfig(method, block_size=size, max_tokens=12)).tokens
        for method, size in (("none", None), ("eagle3", 5))
    ]
    assert answers[0] == answers[1]


def test_a_pickled_upload_is_refused_with_another_one_where_that_is_known(tmp_path):
    for name, said in (("models--x--EAGLE3-LLaMA3.1-Instruct-8B", "RedHatAI/"), ("it", "a folder")):
        folder = write_drafter_folder(tmp_path / name, raw(), {})
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        (error, *_) = check_drafter(folder).errors
        assert "pytorch_model.bin can run code" in error.what
        assert f"choose {said}" in error.next_step and ".safetensors" in error.next_step


@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle3", "Evil"])
def test_code_of_its_own_is_never_run(tmp_path, name):
    given = raw(auto_map={"AutoModel": f"modeling.{name}"})
    facts = check_drafter(write_drafter_folder(tmp_path, given, random_tensors(given)))
    assert ["Evil" in error.what for error in facts.errors] == [True] * (name == "Evil")


# Converting and loading


def states(model: Any) -> np.ndarray:
    """Logits of a draft behind a few tokens; 0 for unknown ones."""
    rng, context = np.random.default_rng(0), model.new_context()
    features = rng.normal(size=(9, 64 * len(TAPS))).astype(np.float32)
    context.append(mx.array(rng.integers(VOCAB_SIZE, size=9)), mx.array(features))
    return np.array(model.try_out(context))


def load(folder: Any, target: Target, **settings: Any) -> Any:
    return FILES.load(folder, FILES.read_drafter(folder).config, target, PairConfig(**settings))


@pytest.mark.parametrize("name", FORMATS)
def test_a_converted_drafter_drafts_as_before(tmp_path, name):
    source = write_drafter_folder(tmp_path / "source", *FORMATS[name])
    converted = convert(source, tmp_path / "dst")
    assert config(converted)["architectures"][0] in ("LlamaForCausalLMEagle3", "LlamaForCausalLM")
    before, after = FILES.read_drafter(source).config, FILES.read_drafter(converted).config
    assert replace(before, notes=()) == replace(after, notes=())
    assert set(before.notes) == set(after.notes)
    assert not any(part.startswith(("verifier", "t2d")) for part in tensors(converted))
    target = Target(make_model("llama"), 512, "tiny")
    first, second = (states(load(folder, target)) for folder in (source, converted))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("name", ["raw", "speculators, of Qwen3", "ours, 3.1"])
def test_packed_in_8_bits_it_drafts_nearly_the_same_and_is_unpacked_on_a_cpu(tmp_path, name):
    given = FORMATS[name][0]
    wide = {"intermediate_size": 128}
    given = speculators({**wide, "model_type": "qwen3"}) if "of" in name else {**given, **wide}
    source = write_drafter_folder(tmp_path / "source", given, random_tensors(given))
    packed = convert(source, tmp_path / "dst", "--bits", "8")
    assert config(packed)["quantization"] == {"group_size": 64, "bits": 8}
    assert any(part.endswith(".scales") for part in tensors(packed))
    target, said = Target(make_model("llama"), 512, "tiny"), []
    for folder in (source, packed):
        model = load(folder, target)
        assert quantization_of(model.module) is None
        kinds = {array.dtype for array in parameters_of(model.module).values()}
        assert kinds - {mx.int64} == {mx.float32}
        said.append(states(model))
    error = np.abs(said[0] - said[1]).mean()
    assert 0 < error < 0.1 * said[0].std()
    assert quantization_of(load(source, target, drafter_bits=8).module) is not None, "if asked for"


def test_a_pair_with_one_is_loaded_by_name_and_answers_as_plain_decoding(tmp_path):
    model = write_model(tmp_path / "model")
    folder = write_drafter_folder(tmp_path / "drafter", *FORMATS["speculators"])
    assert not check_pair(check_target(model), check_drafter(folder)).errors
    pair = load_pair(PairConfig(str(model), str(folder)))
    assert [drafter.family for drafter in pair.drafters] == ["eagle3"]
    uses = [DecodeConfig("none"), DecodeConfig("eagle3", block_size=4), DecodeConfig("eagle3")]
    uses += [config_with("eagle3", budget=12, branches=3), DecodeConfig()]
    answers = [generate(pair, "hello", replace(use, max_tokens=16)) for use in uses]
    assert len({answer.tokens for answer in answers}) == 1
    assert sum(answers[1].statistics.drafted.values()) > 0
    with pytest.raises(DFlashError, match="draft_window is 3, below .* block of 8"):
        load_pair(PairConfig(str(model), str(folder), draft_window=3))
    with pytest.raises(DFlashError, match="block_size is 9"):
        load_pair(PairConfig(str(model), str(folder)), DecodeConfig("eagle3", block_size=9))


def test_another_tokenizer_is_refused_with_the_token(tmp_path):
    target = check_target(write_model(tmp_path / "model"))
    folder = write_drafter_folder(tmp_path / "drafter", *FORMATS["raw"])
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (error,) = check_pair(target, check_drafter(folder)).errors
    assert "'a'" in error.what or "'b'" in error.what
