"""Drafters of every format, and pairs, draft after a conversion what they drafted before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import DecodeConfig, load
from dflash_mlx.convert.__main__ import main
from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.checkpoint import load_network, read_config
from dflash_mlx.drafters.dflash.quantized import quantize_network
from dflash_mlx.drafters.dflash.tensors import parameters_of
from dflash_mlx.engine.state import State
from dflash_mlx.models import pair_folder
from dflash_mlx.models.load import load_pair
from dflash_mlx.session.stream import generate
from dflash_mlx.target.model import Target
from support.converted import assert_same_tensors, config, convert, tensors
from support.families import VOCAB_SIZE, make_model
from support.models import drafter_config, write_drafter, write_model
from support.recurrent_families import RECURRENT
from support.speculators import DRAFT_VOCABULARY, speculators, write

CLOSE = 1e-4
WIDE = {"intermediate_size": 128}  # rows that groups of 64 divide
VERSION_2 = {
    "conv_kernel_size": 4,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 4,
    "block_size": 8,
}


def version_2(**changes: Any) -> dict[str, Any]:
    raw = drafter_config(architectures=["DFlash2DraftModel"], **changes)
    del raw["block_size"]
    return {**raw, "dflash_config": {**raw["dflash_config"], **VERSION_2}}


def newer_rope() -> dict[str, Any]:
    raw = drafter_config(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    del raw["rope_theta"], raw["rope_scaling"]
    return raw


def variable_prefix() -> dict[str, Any]:
    raw = drafter_config()
    return {**raw, "dflash_config": {**raw["dflash_config"], "training_mode": "variable_prefix"}}


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}

FORMATS: dict[str, dict[str, Any]] = {
    "DFlash": drafter_config(),
    "DFlash with newer rope": newer_rope(),
    "DFlash, sliding and causal": drafter_config(**SLIDING, is_causal=True),
    "variable prefix": variable_prefix(),
    "DFlash 2": version_2(),
    "speculators": speculators(),
    "speculators with the whole vocabulary": speculators(draft_vocab_size=VOCAB_SIZE),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(make_model("llama"), 512, "llama")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "model")


def block_logits(folder: Path, target: Target) -> mx.array:
    """Of one block behind 20 random features."""
    network_config = read_config(folder)
    network = load_network(folder, network_config, mx.float32)
    block = BlockModel(network, network_config, target)
    state = State(target.new_cache(), block.new_context())
    width = 64 * len(network_config.target_layer_ids)
    state.context.append(mx.array(np.random.default_rng(1).normal(size=(20, width))))
    state.set_anchor(7)
    return block.logits(state.context, state.anchor, 8)


@pytest.mark.parametrize("name", FORMATS)
def test_a_converted_drafter_gives_the_block_logits_of_the_original(tmp_path, target, name):
    source = write(tmp_path / "source", FORMATS[name], files=1 + len(name) % 3)
    converted = convert(source, tmp_path / "dst")
    before, after = block_logits(source, target), block_logits(converted, target)
    finite = mx.abs(before) < 1e30  # what a reduced vocabulary lacks is minus infinity
    assert bool(mx.array_equal(finite, mx.abs(after) < 1e30))
    assert mx.where(finite, mx.abs(before - after), 0).max().item() <= CLOSE
    assert int(finite.sum().item()) >= 7 * DRAFT_VOCABULARY


@pytest.mark.parametrize("name", FORMATS)
def test_a_converted_drafter_has_the_configuration_and_weights_of_the_original(tmp_path, name):
    source = write(tmp_path / "source", FORMATS[name])
    converted = convert(source, tmp_path / "dst")
    assert read_config(converted) == read_config(source)
    stored = tensors(source)
    stored.pop("t2d", None)
    assert_same_tensors(tensors(converted), stored)


@pytest.mark.parametrize("name", FORMATS)
def test_a_converted_drafter_decodes_what_the_original_decodes(tmp_path, model, name):
    source = write(tmp_path / "source", FORMATS[name])
    converted = convert(source, tmp_path / "dst")
    settings = DecodeConfig(method="dflash", max_tokens=12)
    before, after = (
        generate(load(str(model), str(folder)), "hello", settings) for folder in (source, converted)
    )
    assert before.tokens == after.tokens
    assert before.statistics.drafted == after.statistics.drafted
    assert before.statistics.drafted.total() > 0
    assert before.statistics.acceptance_rate == after.statistics.acceptance_rate


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_drafter_is_cast_and_says_so(tmp_path, dtype):
    converted = convert(write_drafter(tmp_path / "source"), tmp_path / "dst", "--dtype", dtype)
    assert {array.dtype for array in tensors(converted).values()} == {getattr(mx, dtype)}
    assert config(converted)["dtype"] == dtype


def test_a_drafter_keeps_its_type_unless_told_otherwise(tmp_path):
    converted = convert(write_drafter(tmp_path / "source"), tmp_path / "dst")
    assert {array.dtype for array in tensors(converted).values()} == {mx.float32}
    assert config(converted)["dtype"] == "float32"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("raw", [drafter_config(**WIDE), version_2(**WIDE)])
def test_a_quantised_drafter_has_the_packed_weights_of_one_that_is_packed_when_loaded(
    tmp_path, target, bits, raw
):
    source = write(tmp_path / "source", raw)
    converted = convert(source, tmp_path / "dst", "--bits", str(bits))
    network = load_network(source, read_config(source), mx.float32)
    quantize_network(network, bits, 64)
    assert config(converted)["quantization"] == {"group_size": 64, "bits": bits}
    assert_same_tensors(tensors(converted), parameters_of(network))
    kept = [name for name in tensors(source) if "norm" in name or "candidate_selector" in name]
    assert kept
    for name in kept:
        assert bool(mx.array_equal(tensors(converted)[name], tensors(source)[name])), name
    assert bool(mx.isfinite(block_logits(converted, target)).all())


def test_a_drafter_that_is_packed_is_not_packed_again(tmp_path):
    source = write(tmp_path / "source", drafter_config(**WIDE))
    packed = convert(source, tmp_path / "packed", "--bits", "8")
    with pytest.raises(DFlashError, match="already quantised to 8 bits"):
        convert(packed, tmp_path / "again", "--bits", "4")
    assert_same_tensors(tensors(convert(packed, tmp_path / "copy")), tensors(packed))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", "3"], "bits is 3, but SRC is a drafter; choose 4 or 8"),
        (["--mode", "mxfp4"], "SRC is a drafter; leave them out"),
        (["--recipe", "mixed_3_6"], "SRC is a drafter; leave them out"),
        (["--dequantize"], "SRC is a drafter; leave them out"),
        (["--bits", "4", "--group-size", "64"], "rows of 96 numbers, which groups of 64 do not"),
        (["--drafter-bits", "4"], "--drafter-bits is for the drafter of a pair"),
    ],
)
def test_what_a_drafter_cannot_be_converted_to_is_refused(tmp_path, options, message):
    with pytest.raises(DFlashError, match=message):
        convert(write_drafter(tmp_path / "source"), tmp_path / "dst", *options)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["source"]


# Pairs


def test_a_pair_folder_is_a_model_that_drafts_as_its_parts_did(tmp_path, model):
    drafter = write_drafter(tmp_path / "drafter")
    convert(model, tmp_path / "pair", "--pair", str(drafter))
    settings = DecodeConfig(method="dflash", max_tokens=12)
    before = generate(load(str(model), str(drafter)), "hello", settings)
    after = generate(load(str(tmp_path / "pair")), "hello", settings)
    assert before.tokens == after.tokens
    assert before.statistics.drafted == after.statistics.drafted
    assert before.statistics.drafted.total() > 0


def test_a_pair_folder_says_what_it_was_made_from_and_by_what(tmp_path, model):
    drafter = write_drafter(tmp_path / "drafter")
    folder = convert(model, tmp_path / "pair", "--pair", str(drafter))
    assert pair_folder.read(folder).names == {"target": str(model), "drafter": str(drafter)}
    assert "mlx" in json.loads((folder / "pair.json").read_text())["made_with"]


def test_a_pair_may_have_a_second_drafter(tmp_path, model):
    first, second = write_drafter(tmp_path / "first"), write(tmp_path / "second", variable_prefix())
    options = ["--pair", str(first), "--second-drafter", str(second)]
    folder = convert(model, tmp_path / "pair", *options)
    pair = load_pair(PairConfig(str(folder)), DecodeConfig(method="d2sd"))
    assert pair.network is not None and pair.second_network is not None
    assert_same_tensors(tensors(folder / "second-drafter"), tensors(second))


def test_target_and_drafter_of_a_pair_are_quantised_each_in_its_own_way(tmp_path, model):
    drafter = write(tmp_path / "drafter", drafter_config(**WIDE))
    options = ["--pair", str(drafter), "--bits", "4", "--drafter-bits", "8", "--dtype", "float16"]
    folder = convert(model, tmp_path / "pair", *options)
    assert config(folder / "target")["quantization"]["bits"] == 4
    assert config(folder / "drafter")["quantization"] == {"group_size": 64, "bits": 8}
    for part in ("target", "drafter"):
        types = {array.dtype for array in tensors(folder / part).values()}
        assert types == {mx.uint32, mx.float16}, part


@pytest.mark.parametrize("target_bits", [[], ["--bits", "4"]])
def test_groups_of_a_pair_are_those_that_were_asked_for_in_both_parts(tmp_path, model, target_bits):
    drafter = write_drafter(tmp_path / "drafter")
    options = ["--pair", str(drafter), "--drafter-bits", "8", "--group-size", "32", *target_bits]
    folder = convert(model, tmp_path / "pair", *options)
    assert config(folder / "drafter")["quantization"] == {"group_size": 32, "bits": 8}
    groups = config(folder / "target").get("quantization", {}).get("group_size")
    assert groups == (32 if target_bits else None)


def test_a_drafter_of_another_target_makes_no_pair(tmp_path, model):
    drafter = write(tmp_path / "drafter", {**drafter_config(), "num_target_layers": 7})
    with pytest.raises(DFlashError, match="number of target layers 7, but .* has 3"):
        convert(model, tmp_path / "pair", "--pair", str(drafter))
    assert not (tmp_path / "pair").exists()


def test_a_target_whose_language_model_is_a_part_of_its_config_makes_a_pair(tmp_path):
    source = write_model(tmp_path / "model", make_model("qwen3_5"))
    text = {**RECURRENT["qwen3_5"], "model_type": "qwen3_5_text"}
    nested = {"model_type": "qwen3_5", "text_config": text, "eos_token_id": 1}
    (source / "config.json").write_text(json.dumps(nested))
    drafter = write_drafter(tmp_path / "drafter")
    folder = convert(source, tmp_path / "pair", "--pair", str(drafter))
    assert load(str(folder)).network_config == read_config(drafter)
    wrong = write(tmp_path / "wrong", {**drafter_config(), "num_target_layers": 7})
    with pytest.raises(DFlashError, match="number of target layers 7, but .* has 3"):
        convert(source, tmp_path / "none", "--pair", str(wrong))


def test_target_and_drafter_the_wrong_way_round_are_refused(tmp_path, model):
    drafter = write_drafter(tmp_path / "drafter")
    for arguments in (
        [str(drafter), str(tmp_path / "pair"), "--pair", str(model)],
        [str(model), str(tmp_path / "pair"), "--pair", str(model)],
    ):
        with pytest.raises(DFlashError, match="give the target as SRC and the drafter with --pair"):
            main(arguments)
    assert not (tmp_path / "pair").exists()


def test_a_second_drafter_needs_a_first_one(tmp_path, model):
    with pytest.raises(DFlashError, match="needs a first one; name one with --pair"):
        convert(model, tmp_path / "dst", "--second-drafter", str(tmp_path))
