"""A byte-level BPE tokenizer from a GGUF file's metadata."""

from __future__ import annotations

from typing import Any

from gguf import Keys, TokenType
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_mlx.models.formats.gguf_header import Metadata, array, token_ids, value_of

MODEL = "gpt2"  # of tokenizer.ggml.model, for any byte-level BPE
# Values of tokenizer.ggml.pre. llama.cpp splits with GPT-2's pattern, the second group after
# cutting every digit off. Its "default" is neither: a stand-in for files that do not say.
GPT2_SPLIT = ("gpt-2", "mpt", "olmo")
GPT2_SPLIT_AND_DIGITS = ("smollm", "starcoder", "refact", "codeshell")
LLAMA_BPE = "llama-bpe"  # Llama 3: words with one sign before them, digits by three
LLAMA_BPE_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WHOLE = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)  # never split or merged
ROLES = {
    "bos_token": Keys.Tokenizer.BOS_ID,
    "eos_token": Keys.Tokenizer.EOS_ID,
    "unk_token": Keys.Tokenizer.UNK_ID,
    "pad_token": Keys.Tokenizer.PAD_ID,
}
ENDS = (Keys.Tokenizer.EOS_ID, Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID)


def make_tokenizer(metadata: Metadata) -> TokenizerWrapper:
    """The tokenizer with its chat template; ValueError where it cannot be made."""
    if (model := value_of(metadata, Keys.Tokenizer.MODEL, str)) != MODEL:
        raise ValueError(f"its tokenizer is {model!r}, supported is {MODEL!r} (byte-level BPE)")
    split = value_of(metadata, Keys.Tokenizer.PRE, str)
    tokens: Any = array(metadata, Keys.Tokenizer.LIST)
    ids = token_ids(metadata, *ROLES.values())
    begins = split == LLAMA_BPE  # llama.cpp's own where a file does not say
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(metadata, split, tokens),
        clean_up_tokenization_spaces=False,
        add_bos_token=value_of(metadata, Keys.Tokenizer.ADD_BOS, bool, begins),
        add_eos_token=value_of(metadata, Keys.Tokenizer.ADD_EOS, bool, False),
        chat_template=value_of(metadata, Keys.Tokenizer.CHAT_TEMPLATE, str, "") or None,
        **{role: tokens[ids[key]] for role, key in ROLES.items() if key in ids},
    )
    # mlx-lm's BPE detokenizer drops a leading space and garbles the byte 0; this one does not.
    return TokenizerWrapper(tokenizer, NaiveStreamingDetokenizer, end_tokens(metadata))


def _byte_level_bpe(metadata: Metadata, split: str, tokens: list[str]) -> Tokenizer:
    ids = {token: i for i, token in enumerate(tokens)}
    whole_words = split == LLAMA_BPE  # a word that is a token needs no merges
    backend = Tokenizer(models.BPE(ids, _merges(metadata, ids), ignore_merges=whole_words))
    backend.pre_tokenizer = _pre_tokenizer(split)
    backend.decoder = decoders.ByteLevel()
    types = Keys.Tokenizer.TOKEN_TYPE  # which some files lack
    kinds = array(metadata, types, int) if types in metadata else []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in WHOLE:
            special = kind != TokenType.USER_DEFINED
            backend.add_tokens([AddedToken(token, special=special, normalized=False)])
    return backend


def _merges(metadata: Metadata, ids: dict[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in array(metadata, Keys.Tokenizer.MERGES):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= ids.keys():
            raise ValueError(f"the merge {merge!r} uses tokens that its vocabulary lacks")
        pairs.append((left, right))
    return pairs


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    if kind in GPT2_SPLIT:
        return _bytes()
    if kind in GPT2_SPLIT_AND_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _bytes()])
    if kind == LLAMA_BPE:
        split = pre_tokenizers.Split(Regex(LLAMA_BPE_SPLIT), "isolated")
        return pre_tokenizers.Sequence([split, _bytes(use_regex=False)])
    known = ", ".join((*GPT2_SPLIT, *GPT2_SPLIT_AND_DIGITS, LLAMA_BPE))
    raise ValueError(f"{Keys.Tokenizer.PRE} is {kind!r}, supported are {known}")


def _bytes(use_regex: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def end_tokens(metadata: Metadata) -> list[int]:
    """The tokens that end an answer."""
    return sorted(set(token_ids(metadata, *ENDS).values()))
