"""Language models given as drafters: which fit, what is refused before weights are read, notes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from dflash_mlx import DFlashError, PairConfig, generate, load
from dflash_mlx.convert.__main__ import main as convert
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.lm.checkpoint import LanguageFiles
from dflash_mlx.drafters.lm.model import LanguageModel
from dflash_mlx.drafters.methods import format_as_drafter, format_of
from dflash_mlx.drafters.networks import files
from dflash_mlx.drafters.networks.files import ON_A_GPU
from dflash_mlx.models.check import check_drafter, check_pair, check_target
from dflash_mlx.models.load import check_named, load_pair
from dflash_mlx.system import cpu_math
from support import gguf_files
from support.configs import config_with
from support.decoding import state_with
from support.drafter_formats import speculators, version_1
from support.families import FAMILIES, make_model
from support.models import edit_config, write_drafter, write_model
from support.mtp_targets import write_target
from support.recurrent_families import RECURRENT
from support.reference_eagle3 import FORMATS as EAGLE

TOKENIZER = "tokenizer.json"


def small_model(folder: Path, family: str = "qwen3", **changes: Any) -> Path:
    settings = {**FAMILIES, **RECURRENT}[family]
    return write_model(folder, make_model(family, 5, **changes), **settings | changes)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return small_model(tmp_path / "small")


def refusal(model: Path, drafter: Path, **settings: Any) -> str:
    """What is said of a pair, which the check and loading say alike."""
    with pytest.raises(DFlashError) as loading:
        load_pair(PairConfig(str(model), str(drafter), **settings))
    if not settings:
        report = check_pair(check_target(model), check_drafter(drafter))
        assert [found.what for found in report.errors][:1] == [loading.value.what]
    return str(loading.value)


def change_tokens(folder: Path, change: Any) -> None:
    tokenizer = json.loads((folder / TOKENIZER).read_text())
    change(tokenizer["model"]["vocab"])
    (folder / TOKENIZER).write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "mamba2", "gemma3_text", "ministral3"])
def test_a_pair_is_loaded_by_name_and_answers_as_plain_decoding(model, tmp_path, family):
    folder = small_model(tmp_path / "small", family)
    pair = load(str(model), str(folder))
    (drafter,) = pair.drafters
    assert isinstance(drafter, LanguageModel) and not pair.undrafted
    uses = [DecodeConfig("none"), DecodeConfig("lm", block_size=4), DecodeConfig("lm")]
    uses += [config_with("lm", budget=12), DecodeConfig()]
    answers = [generate(pair, "hello", use) for use in uses]
    assert len({answer.tokens for answer in answers}) == 1
    assert sum(answers[1].statistics.drafted.values()) > 0
    tokens = [3, 1, 4, 1, 5]
    alone = make_model(family, 5)(mx.array([tokens]))[0, -1]
    context = drafter.new_context()
    context.append(mx.array(tokens[:-1]), None)
    found = drafter.begin(state_with(context)).logits(mx.array(tokens[-1:]), [-1])[0]
    assert mx.abs(found - alone).max() < 1e-4


def test_a_target_drafts_for_itself_from_another_folder_alone_and_is_always_right(model, tmp_path):
    assert "is the target itself" in refusal(model, model)
    copy = shutil.copytree(model, tmp_path / "copy")
    pair = load_pair(PairConfig(str(model), str(copy)), DecodeConfig("lm"))
    assert any("may take longer than they save" in note for note in pair.notes)
    config = DecodeConfig("lm", block_size=8, max_tokens=33)
    assert generate(pair, "hello", config).statistics.rounds == 4
    notes = check_pair(check_target(model), check_drafter(copy)).findings
    assert [note.severity for note in notes] == ["note"]


def test_a_model_with_a_head_of_its_own_drafts_whole_where_the_head_is_of_another_target(tmp_path):
    """For a target of the head's width it is the head that drafts."""
    wide = {"hidden_size": 128}
    large = write_model(tmp_path / "large", make_model("llama", **wide), **wide)
    alike = small_model(tmp_path / "alike", "qwen3_5")
    small = write_target(tmp_path / "small")
    converted = small_model(tmp_path / "converted", "qwen3_5", mtp_num_hidden_layers=1)
    drafters = ((large, small), (alike, small), (large, converted), (alike, converted))
    pairs = [load(str(target), str(drafter)) for target, drafter in drafters]
    assert [pair.drafters[0].family for pair in pairs] == ["lm", "mtp", "lm", "lm"]
    answers = [generate(pairs[0], "hello", DecodeConfig(m, max_tokens=8)) for m in ("none", "lm")]
    assert answers[0].tokens == answers[1].tokens


# Tokens


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(model, small):
    def swap(tokens: dict[str, int]) -> None:
        tokens["a"], tokens["c"] = tokens["c"], tokens["a"]

    number = json.loads((small / TOKENIZER).read_text())["model"]["vocab"]["a"]
    change_tokens(small, swap)
    said = refusal(model, small)
    assert f"token {number} is 'a' in {model}/{TOKENIZER}, but 'c' in {small}/{TOKENIZER}" in said


def test_a_token_that_only_one_of_them_has_is_refused_where_the_other_has_another(model, small):
    number = json.loads((small / TOKENIZER).read_text())["model"]["vocab"]["b"]
    change_tokens(small, lambda tokens: tokens.update({"new": tokens.pop("b")}))
    assert f"token {number} is 'b' in {model}/{TOKENIZER}, but 'new' in" in refusal(model, small)
    change_tokens(small, lambda tokens: tokens.update({"new": 300, "b": 301}))
    assert f"token {number} is 'b' in {model}/{TOKENIZER}, but none in" in refusal(model, small)


def test_a_longer_tail_of_either_vocabulary_changes_nothing(model, tmp_path):
    longer = small_model(tmp_path / "longer", vocab_size=120)
    change_tokens(longer, lambda tokens: tokens.update({"of its own": 97}))
    shorter = small_model(tmp_path / "shorter", vocab_size=97)
    large = write_model(tmp_path / "large", make_model("llama", vocab_size=128), vocab_size=128)
    for target, drafter in ((model, longer), (large, shorter)):
        pair = load(str(target), str(drafter))
        plain, drafted = (
            generate(pair, "hello", DecodeConfig(method, max_tokens=12))
            for method in ("none", "lm")
        )
        assert plain.tokens == drafted.tokens


def test_a_vocabulary_that_lacks_tokens_is_refused(model, tmp_path):
    few = small_model(tmp_path / "few", vocab_size=90)
    said = refusal(model, few)
    assert "has 90 tokens, but token 96 of" in said and str(model) in said


def test_a_drafter_without_a_tokenizer_is_refused(model, small):
    (small / TOKENIZER).unlink()
    assert f"{small} has no {TOKENIZER} to compare with" in refusal(model, small)


def test_tokens_of_a_gguf_file_are_compared_before_the_drafter_is_read(tmp_path, monkeypatch):
    file, folder = gguf_files.write(tmp_path / "target.gguf"), tmp_path / "same"
    target = load(str(file))
    sizes = {"vocab_size": len(gguf_files.TOKENS), "max_position_embeddings": 256}
    write_model(folder, target.target.model, **vars(target.target.model.args) | sizes)
    target.tokenizer.save_pretrained(folder)
    config = DecodeConfig("lm", block_size=8, max_tokens=33)
    assert generate(load(str(file), str(folder)), "hello", config).statistics.rounds == 4
    change_tokens(folder, lambda tokens: tokens.update(a=tokens["b"], b=tokens["a"]))
    monkeypatch.setattr(LanguageFiles, "load", lambda *_: pytest.fail("was read"))
    with pytest.raises(DFlashError, match=r"token \d+ is 'a' in .*target.gguf, but 'b' in .*same"):
        load(str(file), str(folder))


# What is no language model, or not whole


def test_heads_that_read_their_target_are_not_taken_for_models(model, small):
    weights = dict(mx.load(str(small / "model.safetensors")))
    mx.save_safetensors(
        str(small / "model.safetensors"), {**weights, "fc.weight": mx.zeros((64, 128))}
    )
    assert "fc.weight" in refusal(model, small) and "EAGLE 1" in refusal(model, small)


def test_files_without_an_embedding_are_refused(model, small):
    mx.save_safetensors(str(small / "model.safetensors"), {"0.0.linear.weight": mx.zeros((64, 64))})
    edit_config(small, num_hidden_layers=1, intermediate_size=64)
    assert "no embedding" in refusal(model, small)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["MedusaForCausalLM"]}, "'MedusaForCausalLM'"),
        ({"model_type": "qwen3_next_draft"}, "'qwen3_next_draft'"),
        ({"model_type": "nonesuch"}, "model_type 'nonesuch', which mlx-lm lacks"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"model_file": "own.py"}, "own.py"),
        ({"hidden_size": None}, "cannot be loaded"),
    ],
)
def test_other_folders_are_called_what_they_are(model, small, changes, said):
    edit_config(small, **changes)
    assert said in refusal(model, small)


@pytest.mark.parametrize("raw", [version_1(), speculators(), *(c for c, _ in EAGLE.values())])
def test_draft_models_of_other_families_stay_theirs(raw):
    raw = {**raw, "model_type": "qwen3"}
    assert format_as_drafter(raw) is format_of(raw) is not None
    assert not format_of(raw).whole_models


ADAPTERS = [
    ({"model": "owner/base", "fine_tune_type": "lora"}, "adapters.safetensors", "mlx_lm.fuse"),
    (
        {"base_model_name_or_path": "owner/base", "peft_type": "LORA"},
        "adapter_model.safetensors",
        "merge_and_unload",
    ),
]


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("as_drafter", [True, False])
@pytest.mark.parametrize("has_config", [True, False])
def test_an_adapter_is_refused_with_the_command_that_fuses_it(
    model, tmp_path, adapter, as_drafter, has_config
):
    (config, weights, command), folder = adapter, tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / weights), {"a": mx.zeros(3)})
    if has_config:
        (folder / "config.json").write_text((model / "config.json").read_text())
    said = refusal(model, folder) if as_drafter else refusal(folder, model)
    assert "is an adapter of owner/base" in said and command in said and str(folder) in said
    for option in ([], ["--mtp"]):
        with pytest.raises(DFlashError, match="is an adapter of owner/base"):
            convert([str(folder), str(tmp_path / "converted"), *option])


def test_a_second_drafter_is_refused_beside_one_that_drafts_alone(model, small, tmp_path):
    blocks, other = write_drafter(tmp_path / "blocks"), small_model(tmp_path / "other")
    assert len(load_pair(PairConfig(str(model), str(blocks), str(blocks))).drafters) == 2
    for first, second, alone in (
        (small, blocks, small),
        (blocks, small, small),
        (small, other, small),
    ):
        config = PairConfig(str(model), str(first), str(second))
        with pytest.raises(DFlashError, match="leave out second_drafter=") as refused:
            load_pair(config)
        assert refused.value.what.startswith(str(alone))
        assert refused.value.what in [found.what for found in check_named(config).errors]


# Settings and notes


@pytest.mark.parametrize("settings", [{"draft_window": 64}, {"draft_vocabulary": 50}])
def test_settings_that_it_cannot_follow_are_refused_before_weights_are_read(
    model, small, settings, monkeypatch
):
    monkeypatch.setattr("dflash_mlx.models.read.read_model", lambda *_: pytest.fail("was read"))
    ((name, value),) = settings.items()
    said = refusal(model, small, **settings)
    assert f"{name} is {value}" in said and "; leave it out" in said


@pytest.mark.parametrize("bits", [4, 8])
def test_its_weights_are_packed_where_asked(model, small, bits):
    pair = load_pair(PairConfig(str(model), str(small), drafter_bits=bits))
    packed = [m for m in pair.drafters[0].module.modules() if isinstance(m, nn.QuantizedLinear)]
    assert packed and {m.bits for m in packed} == {bits}
    answers = [generate(pair, "hello", DecodeConfig(m, max_tokens=8)) for m in ("none", "lm")]
    assert answers[0].tokens == answers[1].tokens


def test_a_gpu_packs_it_only_where_asked(model, small, monkeypatch):
    monkeypatch.setattr(cpu_math, "applies", lambda: False)
    monkeypatch.setattr(files, "ON_A_GPU", ON_A_GPU)
    network = load_pair(PairConfig(str(model), str(small))).drafters[0].module
    assert not [m for m in network.modules() if isinstance(m, nn.QuantizedLinear)]


def test_weights_that_are_packed_stay_so_and_a_note_says_it(model, tmp_path):
    packed = make_model("qwen3", 5)
    nn.quantize(packed, group_size=32, bits=4)
    how = {"group_size": 32, "bits": 4}
    folder = write_model(tmp_path / "packed", packed, **FAMILIES["qwen3"], quantization=how)
    pair = load_pair(PairConfig(str(model), str(folder), drafter_bits=8))
    assert any("packed in 4 bits already" in note for note in pair.notes)
    drafter, tokens = pair.drafters[0], [3, 1, 4]
    context = drafter.new_context()
    context.append(mx.array(tokens[:-1]), None)
    found = drafter.begin(state_with(context)).logits(mx.array(tokens[-1:]), [-1])[0]
    alone = packed(mx.array([tokens]))[0, -1]
    assert mx.abs(found - alone).max() < 1e-3


def test_quantised_caches_are_the_drafters_too(model, tmp_path):
    wide = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    large = write_model(tmp_path / "large", make_model("llama", **wide), **wide)
    folder = small_model(tmp_path / "small", "qwen3", **wide)
    pair = load_pair(PairConfig(str(large), str(folder), kv_bits=8))
    cache = pair.drafters[0].new_context().cache
    assert {layer.kv_bits for layer in cache.layers} == {8}
    answers = [generate(pair, "hello", DecodeConfig(m, max_tokens=8)) for m in ("none", "lm")]
    assert answers[0].tokens == answers[1].tokens


@pytest.mark.parametrize(
    ("family", "note"), [("ministral3", "chains"), ("bailing_hybrid", "chains"), ("qwen3_5", "")]
)
def test_models_that_draft_chains_alone_say_so(tmp_path, family, note):
    facts = check_drafter(small_model(tmp_path / "small", family))
    assert [note in found.what for found in facts.findings] == [True] * bool(note)


def test_a_shorter_context_is_noted_and_refused_where_positions_have_a_table(model, small):
    edit_config(small, max_position_embeddings=100)
    found = check_pair(check_target(model), check_drafter(small)).findings
    assert "takes 100 tokens" in found[0].what
    assert {note.severity for note in found} == {"note"}
    facts = check_drafter(small)
    for kind, theirs, errors in (("gpt2", 512, 1), ("gpt2", 100, 0), ("gpt2", 0, 1)):
        config = replace(facts.config, model_type=kind, context_length=100)
        target = {"max_position_embeddings": theirs}
        found = list(facts.format.misfits(config, target, "T", "D"))
        assert len([f for f in found if f.severity == "error"]) == errors
