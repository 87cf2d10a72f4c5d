"""The tokenizer of a GGUF file, from its metadata alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.models.formats.gguf_target import load_gguf
from support.gguf_files import TOKENS, write


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    path = write(tmp_path_factory.mktemp("gguf") / "m.gguf")
    return load_gguf(path, dequantize=True)[1]


def pieces(tokenizer: TokenizerWrapper, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello world", ["hello", "Ġw", "o", "r", "l", "d"]),
        ("12", ["1", "2"]),  # although a merge would join them
        (" 12", ["Ġ", "1", "2"]),
    ],
)
def test_merges_apply_within_words_and_digits_are_split_singly(tokenizer, text, expected):
    assert pieces(tokenizer, text) == expected


def test_digits_stay_together_in_the_gpt2_split(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tokenizer__ggml__pre="gpt-2")
    assert pieces(load_gguf(path, dequantize=True)[1], "12") == ["12"]


def test_llama_bpe_splits_digits_by_three_and_takes_whole_tokens_without_merges(tmp_path):
    path = write(
        tmp_path / "m.gguf", tokenizer__ggml__pre="llama-bpe", tokenizer__ggml__merges=["l l"]
    )
    tokenizer = load_gguf(path, dequantize=True)[1]
    assert pieces(tokenizer, "1234") == ["<|im_start|>", "1", "2", "3", "4"]
    assert pieces(tokenizer, "hello 12's") == ["<|im_start|>", "hello", "Ġ", "12", "'", "s"]
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(
        "Hi, we'LL see 12345 éß\n\n x"
    )
    assert [word for word, _ in words] == [
        "Hi", ",", "Ġwe", "'LL", "Ġsee", "Ġ", "123", "45", "ĠÃ©ÃŁ", "ĊĊ", "Ġx",
    ]  # fmt: skip


def test_control_and_user_defined_tokens_are_never_split(tokenizer: TokenizerWrapper) -> None:
    ids = tokenizer.encode("<|im_start|>he<tool><|im_end|>")
    assert ids == [1, TOKENS.index("he"), TOKENS.index("<tool>"), 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he<tool>"
    assert tokenizer.decode(ids) == "<|im_start|>he<tool><|im_end|>"


def test_roles_and_chat_template_come_from_the_metadata(tokenizer: TokenizerWrapper) -> None:
    roles = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token]
    assert roles == ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"]
    assert tokenizer.eos_token_ids == {2}
    assert len(tokenizer.get_vocab()) == len(TOKENS)
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


@settings(max_examples=150)
@given(text=TEXTS)
def test_decoding_gives_the_text_back(tokenizer: TokenizerWrapper, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=150)
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
