"""What is refused before any weight is read: each sentence, with file, field and both values."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from mlx.utils import tree_flatten

from dflash_mlx import DFlashError
from dflash_mlx.core.config import PairConfig
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.models.check import check_drafter, check_pair, check_target
from dflash_mlx.models.load import check_named, load
from dflash_mlx.models.source import Source
from support.drafter_formats import DRAFT_IDS, own_tables, speculators, version_1, write_shards
from support.families import FAMILIES, make_model
from support.models import (
    Damage,
    edit_config,
    overwrite,
    write_drafter,
    write_model,
    write_tokenizer,
)
from support.recurrent_families import RECURRENT, UNSUPPORTED
from support.reference_dflash import random_drafter, write_drafter_folder

SHIPPED_AUTO_MAP = {"AutoModel": "dflash.DFlashDraftModel"}


# What is right


def test_a_pair_that_fits_has_facts_and_no_findings(model, drafter):
    target, drafted = check_target(model), check_drafter(drafter)
    report = check_pair(target, drafted)
    assert report.findings == ()
    report.raise_first()
    parameters: Any = tree_flatten(make_model("llama").parameters())
    assert target.weights.parameters == sum(array.size for _, array in parameters)
    assert (target.context_length, target.weights.dtype) == (512, "float32")
    assert target.weights.stored_bytes == 4 * target.weights.parameters
    assert report.memory(True) > target.weights.stored_bytes + drafted.weights.stored_bytes
    edit_config(model, intermediate_size=[96, 96, 96])
    assert not check_target(model).errors, "one for each layer"


def test_speculators_and_shards_are_read_and_what_was_assumed_is_a_note(tmp_path):
    tensors = {**random_drafter(version_1()), **own_tables(DRAFT_IDS)}
    raw = speculators(draft_vocab_size=len(DRAFT_IDS))
    facts = check_drafter(write_drafter_folder(tmp_path / "a", raw, tensors))
    assert [finding.severity for finding in facts.findings] == ["note", "note"]
    assert "counted from 0" in facts.findings[1].what
    assert facts.config == FILES.read_drafter(tmp_path / "a").config
    shards = write_shards(tmp_path / "b", version_1(), random_drafter(version_1()))
    assert not check_drafter(shards).findings


@pytest.mark.parametrize(
    ("family", "word"),
    [("bailing_hybrid", "recurrent"), ("ministral3", "one position"), ("qwen3", ""), ("lfm2", "")],
)
def test_targets_that_verify_chains_only_say_so_in_a_note(tmp_path, family, word):
    config = {**FAMILIES, **RECURRENT}[family]
    facts = check_target(write_model(tmp_path / "model", **config))
    notes = [f.what for f in facts.findings if f.severity == "note"]
    assert [word in note for note in notes] == [True] * bool(word)


@pytest.mark.parametrize("family", ["gemma3n", "afm7", "plamo3", "baichuan_m1"])
def test_what_passes_the_doctor_loads_and_what_does_not_is_refused_alike(tmp_path, family):
    settings = {**FAMILIES, **UNSUPPORTED}[family]
    folder = str(write_model(tmp_path, make_model(family), **settings))
    errors_found = check_named(PairConfig(folder)).errors
    if family not in UNSUPPORTED:
        assert not errors_found and load(folder).target.name == folder
        return
    with pytest.raises(DFlashError) as loading:
        load(folder)
    (found,) = errors_found
    assert found.what == loading.value.what and "gives its recurrent state" in found.what


# Numbers that do not fit


def test_another_tokenizer_is_refused_with_the_token_and_both_ids(model, drafter):
    write_tokenizer(drafter)
    assert not check_pair(check_target(model), check_drafter(drafter)).findings
    tokenizer = json.loads((drafter / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = vocabulary["a"], vocabulary["b"]
    vocabulary["a"], vocabulary["b"] = second, first
    (drafter / "tokenizer.json").write_text(json.dumps(tokenizer))
    (found,) = check_pair(check_target(model), check_drafter(drafter)).errors
    assert f"token 'b' has the id {first} in {drafter}" in found.what
    assert f"but {second} in {model}" in found.what
    with pytest.raises(DFlashError, match=f"token 'b' has the id {first}"):
        load(str(model), str(drafter))


PANICS = {  # the tokenizers library
    "type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"],
    "continuing_subword_prefix": "##",
}  # fmt: skip


@pytest.mark.parametrize(
    ("tokenizer", "value"),
    [
        ({"model": {"type": "WordLevel", "vocab": {}, "unk_token": "a"}}, "names no token"),
        ({"model": {"vocab": 5}}, "names no token"),
        ({"model": {"type": "BPE"}, "added_tokens": 5}, "is 5, not a list"),
        ({"model": PANICS}, "token 'a'"),
        ([], "no readable"),
    ],
)
def test_a_drafters_damaged_tokenizer_is_refused_in_a_sentence(model, drafter, tokenizer, value):
    (drafter / "tokenizer.json").write_text(json.dumps(tokenizer))
    (found,) = check_pair(check_target(model), check_drafter(drafter)).errors
    assert f"{drafter}/tokenizer.json" in found.what and value in found.what
    with pytest.raises(DFlashError, match=r"tokenizer\.json"):
        load(str(model), str(drafter))


def test_a_tokenizer_that_the_hub_refuses_keeps_the_hubs_sentence(model, drafter, monkeypatch):
    there = check_drafter(drafter)
    source = Source("who/drafter")
    source.files = there.source.files | {"tokenizer.json": 9}
    monkeypatch.setattr("dflash_mlx.models.source.hf_hub_download", Mock(side_effect=OSError("no")))
    (found,) = check_pair(check_target(model), replace(there, source=source)).errors
    assert "who/drafter" in found.what and "no readable" not in found.what


@pytest.mark.parametrize(
    ("kind", "model_type", "named"),
    [
        ("Gemma5AssistantForCausalLM", "gemma5_assistant", "Gemma5AssistantForCausalLM"),
        ("Step3p5ForCausalLM", "step3p5_mtp", "step3p5_mtp"),
        ("MiMoMTPModel", None, "MiMoMTPModel"),
        (None, "medusa", "medusa"),
        ("LlamaForCausalLMEagle", "llama", "LlamaForCausalLMEagle"),
        ("RecurrentDrafter", None, "RecurrentDrafter"),
    ],
)
def test_a_draft_model_that_no_family_reads_is_not_called_a_target(
    drafter, kind, model_type, named
):
    classes = None if kind is None else [kind]
    edit_config(drafter, dflash_config=None, architectures=classes, model_type=model_type)
    said = check_drafter(drafter).errors[0]
    assert f"of a kind that is not supported, {named!r}" in said.what
    assert "--method none" in said.next_step
    if model_type != "llama":  # mlx-lm has that, and builds it whatever its class is called
        as_target = check_target(drafter).errors[0]
        assert as_target.what == said.what and "with --model" in as_target.next_step


# A target's folder


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def set_to(**changes: Any) -> Damage:
    return lambda folder: edit_config(folder, **changes)


def rename(name: str) -> Damage:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


def copy_weights(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "model-2.safetensors")


def index(**places: Any) -> Damage:
    return overwrite("model.safetensors.index.json", json.dumps({"weight_map": places}))


def make_pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")  # opening it would wait for ever


TARGETS: dict[str, tuple[Damage, str]] = {
    "no config": (remove("config.json"), "has no config.json"),
    "a config that is a pipe": (make_pipe, "has no config.json"),
    "no JSON": (overwrite("config.json", "{"), "is no readable config.json"),
    "a list": (overwrite("config.json", "[]"), "list, not an object"),
    "no family": (set_to(model_type=None), "model_type"),
    "a family that is a path": (set_to(model_type="../x"), "'../x'"),
    "no family but a module": (set_to(model_type="cache"), "cannot be loaded"),
    "code for the model": (set_to(model_file="m.py"), "'m.py'"),
    "code by auto_map": (set_to(auto_map={"AutoModel": "modeling_own.OwnModel"}), "OwnModel"),
    "pickles": (rename("pytorch_model.bin"), "pytorch_model.bin"),
    "no weights": (remove("model.safetensors"), "No safetensors found"),
    "other names": (rename("weights.safetensors"), "weights.safetensors"),
    "a hidden size in words": (set_to(hidden_size="wide"), "hidden_size"),
    "more layers than tensors": (set_to(num_hidden_layers=10**9), "29 tensors"),
    "more numbers than bits": (set_to(intermediate_size=10**12), "1000000000000"),
    "no sizes": (set_to(intermediate_size=[]), "intermediate_size"),
    "a size of 0 in a list": (set_to(intermediate_size=[96, 0, 96]), "intermediate_size"),
    "a size that is too large": (set_to(intermediate_size=[96, 10**12, 96]), "intermediate_size"),
    "heads that do not divide": (set_to(num_key_value_heads=3), "num_key_value_heads"),
    "no context length": (set_to(max_position_embeddings=None), "max_position_embeddings"),
    "a missing shard": (rename("model-00002-of-00002.safetensors"), "model-00001-of-00002.safet"),
    "a missing shard of the index": (index(a="model-1.safetensors"), "lacks model-1.safetensors"),
    "a missing tensor of the index": (index(a="model.safetensors"), "tensor a in model.safetensor"),
    "an index without a map": (overwrite("model.safetensors.index.json", '{"a": 1}'), "weight_map"),
    "a tensor twice": (copy_weights, "model-2.safetensors and in model.safetensors"),
}


@pytest.mark.parametrize("case", TARGETS)
def test_a_target_that_cannot_be_used_is_refused_in_one_sentence(case, model):
    damage, value = TARGETS[case]
    damage(model)
    first = check_target(model).errors[0]
    assert str(model) in first.what and value in first.what
    assert ("mlx-lm supports itself" in first.next_step) == ("family" in case or "code" in case)
    with pytest.raises(DFlashError) as failure:
        load(str(model))
    assert (failure.value.what, failure.value.next_step) == (first.what, first.next_step)


def test_an_auto_map_that_names_a_built_in_class_is_noted_and_nothing_of_it_runs(model, drafter):
    (model / "modeling_llama.py").write_text("open('ran', 'w').close()")
    auto_map = {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}
    edit_config(model, architectures=["LlamaForCausalLM"], auto_map=auto_map)
    edit_config(drafter, auto_map=SHIPPED_AUTO_MAP)
    report = check_pair(check_target(model), check_drafter(drafter))
    assert [finding.severity for finding in report.findings] == ["note", "note"]
    assert "no Python of it runs" in report.findings[0].what
    report.raise_first()
    load(str(model), str(drafter))
    assert not Path("ran").exists()
    assert not (model / "ran").exists()


# A drafter's folder


@pytest.mark.parametrize(
    ("changes", "value"),  # what configs and tensors are refused is in drafters/test_files.py
    [
        ({"auto_map": {"AutoModel": "own.Own"}}, "its own Python classes"),
        ({"num_hidden_layers": 1}, "layers.1.input_layernorm.weight"),
        (
            {"num_hidden_layers": 1000, "layer_types": ["full_attention"] * 1000},
            "not possible with",
        ),
    ],
)
def test_a_drafter_that_cannot_be_used_is_refused_in_one_sentence(model, drafter, changes, value):
    edit_config(drafter, **changes)
    first, *others = check_drafter(drafter).errors
    assert str(drafter) in first.what and value in first.what
    assert not (others and "not possible with" in first.what)  # what is too large is not built
    with pytest.raises(DFlashError):
        load(str(model), str(drafter))


def test_nothing_is_found_twice_and_all_is_found_at_once(tmp_path):
    folder = write_drafter(tmp_path / "drafter", num_hidden_layers=2)
    edit_config(folder, num_hidden_layers=1, intermediate_size=32)
    found = check_drafter(folder).errors
    assert len(found) == len(set(found)) > 10


@pytest.mark.parametrize("kind", [[], {}, ["llama"]])
def test_a_model_type_that_is_no_name_is_refused_wherever_it_is(model, drafter, kind):
    for folder in (model, drafter):
        edit_config(folder, model_type=kind)
    assert f"model_type in {model}/config.json is {kind}" in check_target(model).errors[0].what
    assert not check_drafter(drafter).errors, "of a drafter its class counts"
