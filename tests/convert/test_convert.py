"""Targets, drafters and pairs decode and draft after a conversion as before."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from dflash_mlx import DecodeConfig, load
from dflash_mlx.convert.__main__ import main
from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.networks.files import parameters_of, quantize_network
from dflash_mlx.models.gguf_target import load_gguf
from dflash_mlx.models.load import load_pair
from dflash_mlx.models.names import read_pair
from dflash_mlx.models.read import LIKELY_TOKENS
from dflash_mlx.session.session import generate
from support import reference_dflash2
from support.converted import assert_same_tensors, config, convert, tensors
from support.drafter_formats import FORMATS, case, version_1, write_shards
from support.families import FAMILIES, make_model
from support.gguf_files import F32, Q4_0, Q4_1, Q8_0
from support.gguf_files import make_model as make_gguf_model
from support.gguf_files import write as write_gguf
from support.models import write_drafter, write_model
from support.recurrent_families import RECURRENT
from support.reference_dflash import write_drafter_folder

CLOSE = 1e-4
PROMPT = mx.array([[7, 3, 11, 2, 29, 5]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "model")


def logits(folder: Path) -> mx.array:
    return load_model(folder)[0](PROMPT)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_a_converted_target_gives_the_logits_and_tokens_of_the_original(tmp_path, family):
    original = make_model(family)
    source = write_model(tmp_path / "source", original, **FAMILIES[family])
    converted, _ = load_model(convert(source, tmp_path / "dst"))
    assert mx.abs(converted(PROMPT) - original(PROMPT)).max().item() <= CLOSE


def test_a_converted_target_loads_as_a_model_with_the_same_tokenizer_files(model, tmp_path):
    load(model=str(convert(model, tmp_path / "dst")))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "dst" / name).read_bytes() == (model / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        (["--bits", "8", "--group-size", "32"], {8}),
        (["--mode", "mxfp4"], {4}),
        (["--recipe", "mixed_3_6"], {3, 6}),
        (["--bits", "4", "--dtype", "bfloat16"], {4}),
    ],
)
def test_a_target_is_quantised_as_asked_for_and_loads(model, tmp_path, options, bits):
    folder = convert(model, tmp_path / "dst", *options)
    modules = load_model(folder)[0].modules()
    assert {module.bits for module in modules if hasattr(module, "bits")} == bits
    plain = {array.dtype for array in tensors(folder).values()} - {mx.uint32, mx.uint8}
    assert plain == {mx.bfloat16 if "bfloat16" in options else mx.float32}


def test_the_dtype_that_the_checkpoint_names_is_taken_and_a_cast_target_names_its_new_one(tmp_path):
    source = write_model(tmp_path / "source", torch_dtype="bfloat16")
    for options, folder in (([], "named"), (["--dtype", "float16"], "cast")):
        convert(source, tmp_path / folder, *options)
        dtype = mx.float16 if options else mx.bfloat16
        assert {array.dtype for array in tensors(tmp_path / folder).values()} == {dtype}
    again = convert(tmp_path / "cast", tmp_path / "again")
    assert_same_tensors(tensors(tmp_path / "cast"), tensors(again))


def test_a_quantised_target_is_quantised_anew_only_after_dequantising(model, tmp_path):
    four = convert(model, tmp_path / "four", "--bits", "4", "--group-size", "32")
    with pytest.raises(DFlashError, match="already quantised to 4 bits .*; add --dequantize"):
        convert(four, tmp_path / "eight", "--bits", "8")
    plain = convert(four, tmp_path / "plain", "--dequantize")
    assert "quantization" not in config(plain)
    assert mx.abs(logits(plain) - logits(four)).max().item() <= CLOSE
    eight = convert(four, tmp_path / "eight", "--dequantize", "--bits", "8")
    assert config(eight)["quantization"]["bits"] == 8
    assert_same_tensors(tensors(convert(plain, tmp_path / "again", "--bits", "8")), tensors(eight))


# GGUF


@pytest.mark.parametrize("kinds", [{"": F32}, {"": Q4_0}, {"": Q4_1, "token_embd": Q8_0}])
def test_a_converted_gguf_file_gives_the_logits_and_tokens_of_the_file(tmp_path, kinds):
    file = write_gguf(tmp_path / "model.gguf", make_gguf_model(), kinds)
    original, _, _ = load_gguf(file, mx.float32)
    converted, _ = load_model(convert(file, tmp_path / "dst", "--dtype", "float32"))
    assert mx.abs(converted(PROMPT) - original(PROMPT)).max().item() <= CLOSE


def test_a_gguf_file_stays_packed_unless_it_is_dequantised(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", make_gguf_model(), {"": Q4_0})
    packed = convert(file, tmp_path / "packed")
    assert config(packed)["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    plain = tensors(convert(file, tmp_path / "plain", "--dequantize"))
    assert {array.dtype for array in plain.values()} == {mx.float16}


def test_the_tokenizer_of_a_gguf_file_becomes_a_folder_s(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", make_gguf_model(), {"": F32})
    _, tokenizer, _ = load_gguf(file)
    pair = load(model=str(convert(file, tmp_path / "dst")))
    text = "hello <|im_end|> w12 é"
    assert pair.tokenizer.encode(text) == tokenizer.encode(text)
    assert pair.tokenizer.eos_token_ids == tokenizer.eos_token_ids
    said = [{"role": "user", "content": "hello"}]
    prompts = [t.apply_chat_template(said, tokenize=False) for t in (pair.tokenizer, tokenizer)]
    assert prompts[0] == prompts[1]


WIDE = {"intermediate_size": 128}  # rows that groups of 64 divide
DRAFTING = DecodeConfig(method="dflash", max_tokens=12)


@pytest.mark.parametrize("name", FORMATS)
def test_a_converted_drafter_has_config_and_weights_of_the_original(tmp_path, name):
    write = write_shards if len(name) % 2 else write_drafter_folder
    source = write(tmp_path / "source", *FORMATS[name])
    converted = convert(source, tmp_path / "dst")
    assert FILES.read_config(converted) == FILES.read_config(source)
    unneeded = {"t2d", "verifier_norm.weight"}
    stored = {name: array for name, array in tensors(source).items() if name not in unneeded}
    assert_same_tensors(tensors(converted), stored)


def test_the_likely_tokens_of_a_drafter_go_with_it(tmp_path):
    source = write_drafter(tmp_path / "source")
    np.save(source / LIKELY_TOKENS, np.array([4, 2], np.uint16))
    converted = convert(source, tmp_path / "dst")
    assert np.load(converted / LIKELY_TOKENS).tolist() == [4, 2]


def test_a_drafter_is_cast_if_asked_for_and_says_so(tmp_path):
    source = write_drafter(tmp_path / "source")
    for dtype, options in (("float32", []), ("bfloat16", ["--dtype", "bfloat16"])):
        converted = convert(source, tmp_path / dtype, *options)
        assert {array.dtype for array in tensors(converted).values()} == {getattr(mx, dtype)}
        assert config(converted)["dtype"] == dtype


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("raw", [version_1(**WIDE), reference_dflash2.tiny_config(**WIDE)])
def test_a_quantised_drafter_has_the_packed_weights_of_one_that_is_packed_when_loaded(
    tmp_path, bits, raw
):
    source = write_drafter_folder(tmp_path / "source", *case(raw))
    converted = convert(source, tmp_path / "dst", "--bits", str(bits))
    network = FILES.load_network(source, FILES.read_config(source), mx.float32)
    quantize_network(network, bits, 64)
    assert config(converted)["quantization"] == {"group_size": 64, "bits": bits}
    assert_same_tensors(tensors(converted), parameters_of(network))


def test_a_drafter_that_is_packed_is_not_packed_again(tmp_path):
    source = write_drafter_folder(tmp_path / "source", *case(version_1(**WIDE)))
    packed = convert(source, tmp_path / "packed", "--bits", "8")
    with pytest.raises(DFlashError, match="already quantised to 8 bits"):
        convert(packed, tmp_path / "again", "--bits", "4")
    assert_same_tensors(tensors(convert(packed, tmp_path / "copy")), tensors(packed))


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (["--bits", "3"], "bits .* is 3"),
        (["--mode", "mxfp4"], "--mode, .* SRC is a drafter"),
        (["--recipe", "mixed_3_6"], "--recipe .* SRC is a drafter"),
        (["--dequantize"], "--dequantize .* SRC is a drafter"),
        (["--bits", "4", "--group-size", "64"], "rows of 96 .* groups of 64"),
        (["--drafter-bits", "4"], "--drafter-bits"),
        (["--second-drafter", "x"], "second drafter .* --pair"),
    ],
)
def test_what_a_drafter_cannot_be_converted_to_is_refused(tmp_path, options, value):
    with pytest.raises(DFlashError, match=value):
        convert(write_drafter(tmp_path / "source"), tmp_path / "dst", *options)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


# Pairs


def test_a_pair_folder_is_a_model_that_drafts_as_its_parts_did(tmp_path, model):
    first = write_drafter(tmp_path / "first")
    second = write_drafter_folder(tmp_path / "second", *FORMATS["version 1, variable prefix"])
    options = ["--pair", str(first), "--second-drafter", str(second)]
    folder = convert(model, tmp_path / "pair", *options)
    twice = DecodeConfig(method="d2sd", budget=16, max_tokens=12)
    named = PairConfig(str(model), str(first), str(second))
    before, after = (
        generate(load_pair(names, twice), "hello", twice)
        for names in (named, PairConfig(str(folder)))
    )
    assert before.tokens == after.tokens
    assert before.statistics.drafted == after.statistics.drafted
    assert before.statistics.drafted.total() > 0
    assert_same_tensors(tensors(folder / "second-drafter"), tensors(second))
    names = {"target": str(model), "drafter": str(first), "second-drafter": str(second)}
    assert read_pair(folder) == names
    assert "mlx" in json.loads((folder / "pair.json").read_text())["made_with"]


@pytest.mark.parametrize(
    ("options", "target_has", "drafter_has"),
    [
        (["--bits", "4", "--drafter-bits", "8", "--group-size", "32"], (32, 4), (32, 8)),
        (["--drafter-bits", "8", "--group-size", "32"], None, (32, 8)),
    ],
)
def test_target_and_drafter_of_a_pair_are_quantised_each_in_its_own_way(
    tmp_path, model, options, target_has, drafter_has
):
    drafter = write_drafter_folder(tmp_path / "drafter", *case(version_1(**WIDE)))
    asked = ["--pair", str(drafter), "--dtype", "float16", *options]
    folder = convert(model, tmp_path / "pair", *asked)
    for part, has in (("target", target_has), ("drafter", drafter_has)):
        packing = config(folder / part).get("quantization")
        assert (packing and (packing["group_size"], packing["bits"])) == has
        types = {array.dtype for array in tensors(folder / part).values()}
        assert types == ({mx.float16} if has is None else {mx.uint32, mx.float16}), part


def write_nested(folder: Path) -> Path:
    """A target whose language model is a part of its config."""
    source = write_model(folder, make_model("qwen3_5"))
    text = {**RECURRENT["qwen3_5"], "model_type": "qwen3_5_text"}
    nested = {"model_type": "qwen3_5", "text_config": text, "eos_token_id": 1}
    (source / "config.json").write_text(json.dumps(nested))
    return source


@pytest.mark.parametrize("write_target", [write_model, write_nested])
def test_only_a_drafter_of_the_same_target_makes_a_pair(tmp_path, write_target):
    source = write_target(tmp_path / "model")
    fitting, other = write_drafter(tmp_path / "drafter"), tmp_path / "other"
    folder = convert(source, tmp_path / "pair", "--pair", str(fitting))
    assert generate(load(str(folder)), "hello", DRAFTING).statistics.drafted.total() > 0
    write_drafter_folder(other, *case({**version_1(), "num_target_layers": 7}))
    with pytest.raises(DFlashError, match="layers 7, but .* has 3"):
        convert(source, tmp_path / "none", "--pair", str(other))
    assert not (tmp_path / "none").exists()


def test_target_and_drafter_the_wrong_way_round_are_refused(tmp_path, model):
    drafter, destination = write_drafter(tmp_path / "drafter"), str(tmp_path / "pair")
    for source, paired, is_what in ((drafter, model, "drafter"), (model, model, "target")):
        with pytest.raises(DFlashError, match=f"is a {is_what}, .* SRC .* --pair"):
            main([str(source), destination, "--pair", str(paired), "--check"])
    assert not (tmp_path / "pair").exists()
