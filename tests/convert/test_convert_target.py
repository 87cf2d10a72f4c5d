"""Targets that were converted decode as before."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from dflash_mlx import load
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.gguf_target import load_gguf
from support.converted import assert_same_tensors, config, convert, tensors
from support.families import FAMILIES, make_model
from support.gguf_files import F32, Q4_0, Q4_1, Q8_0
from support.gguf_files import make_model as make_gguf_model
from support.gguf_files import write as write_gguf
from support.models import write_model

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
    original, _, _ = load_gguf(file, dequantize=True)
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
    _, tokenizer, _ = load_gguf(file, dequantize=True)
    pair = load(model=str(convert(file, tmp_path / "dst")))
    text = "hello <|im_end|> w12 é"
    assert pair.tokenizer.encode(text) == tokenizer.encode(text)
    assert pair.tokenizer.eos_token_ids == tokenizer.eos_token_ids
    said = [{"role": "user", "content": "hello"}]
    prompts = [t.apply_chat_template(said, tokenize=False) for t in (pair.tokenizer, tokenizer)]
    assert prompts[0] == prompts[1]
