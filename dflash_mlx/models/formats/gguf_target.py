"""Load a llama-architecture GGUF file: weights by MLX, model by mlx-lm, tokenizer from metadata.

The tokenizer is a byte-level BPE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
from gguf import Keys, TokenType
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper
from mlx_lm.utils import dequantize_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.formats.gguf_header import (
    ARCHITECTURE,
    Arrays,
    Metadata,
    array,
    read_file,
    token_ids,
    value_of,
)
from dflash_mlx.system.safetensors_header import MAX_DIMENSION

GROUP = 32  # weights that share a scale, in every quantised type that MLX reads from GGUF
ELSEWHERE = "choose another GGUF file, or the same model as a Hugging Face folder"

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


def load_gguf(
    path: Path, dequantize: bool, share: Callable[[nn.Module], None] | None = None
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """Return the model, the tokenizer and the Hugging Face style config of a GGUF file.

    `dequantize` makes every weight float32, the fast path on a CPU; otherwise quantised matrices
    stay packed and all other weights take their dtype. share: leaves a part of the model before its
    weights are read. Raises `DFlashError` for a file that is missing, damaged, of another
    architecture, or made with a feature that is not supported.
    """
    floating = mx.float32 if dequantize else None  # scales too, so that no product is rounded
    model, metadata, config = _open(path, floating)
    if dequantize:
        model = dequantize_model(model)
    if share is not None:
        share(model)
    mx.async_eval(model.parameters())  # MLX reads while Python makes the tokenizer
    with _usable(path):
        return model, _tokenizer(metadata), config


def open_gguf(
    path: Path, dtype: mx.Dtype | None = None
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """As `load_gguf`, before any weight is evaluated, and all packed that is so in the file.

    dtype: of what is not packed, instead of that of the scales.
    """
    model, metadata, config = _open(path, dtype)
    with _usable(path):
        return model, _tokenizer(metadata), config


def _open(path: Path, dtype: mx.Dtype | None) -> tuple[nn.Module, Metadata, dict[str, Any]]:
    tensors, metadata = read_file(path)
    with _usable(path):
        config = _config(metadata, tied="output.weight" not in tensors)
        count = config["num_hidden_layers"]  # before mlx-lm makes as many layers
        blocks = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
        if len(blocks) != count:
            key = Keys.LLM.BLOCK_COUNT.format(arch=ARCHITECTURE)
            raise ValueError(f"{key} is {count}, but its tensors are of {len(blocks)} blocks")
        model = llama.Model(llama.ModelArgs.from_dict(config))
        _fill(model, _named_for(model, tensors, config), dtype)
        return model, metadata, config


def read_config(path: Path) -> dict[str, Any]:
    """The Hugging Face style config of a GGUF file alone; raises as `load_gguf` does."""
    tensors, metadata = read_file(path)
    with _usable(path):
        return _config(metadata, tied="output.weight" not in tensors)


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Says of the file what is not supported, as a DFlashError."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise DFlashError(f"{path.name} cannot be used: {error}", ELSEWHERE) from error


def _config(metadata: Metadata, tied: bool) -> dict[str, Any]:
    architecture = metadata.get(Keys.General.ARCHITECTURE)
    if architecture != ARCHITECTURE:
        raise ValueError(f"its architecture is {architecture!r}, supported is {ARCHITECTURE!r}")
    if experts := metadata.get(Keys.LLM.EXPERT_COUNT.format(arch=ARCHITECTURE)):
        raise ValueError(f"it is a mixture of experts ({experts!r}), which is not supported")
    hidden = value_of(metadata, Keys.LLM.EMBEDDING_LENGTH, int)
    heads = value_of(metadata, Keys.Attention.HEAD_COUNT, int)
    kv_heads = value_of(metadata, Keys.Attention.HEAD_COUNT_KV, int, heads)
    head_dim = value_of(metadata, Keys.Attention.KEY_LENGTH, int, max(hidden // heads, 1))
    _check_rope(metadata, head_dim)
    if heads % kv_heads or heads * head_dim > MAX_DIMENSION:
        raise ValueError(
            f"it has {heads} attention heads of {head_dim} on {kv_heads} key/value heads, which "
            f"must divide them, and at most {MAX_DIMENSION} in all"
        )
    return {
        "model_type": ARCHITECTURE,
        "hidden_size": hidden,
        "num_hidden_layers": value_of(metadata, Keys.LLM.BLOCK_COUNT, int),
        "intermediate_size": value_of(metadata, Keys.LLM.FEED_FORWARD_LENGTH, int),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": value_of(metadata, Keys.Attention.LAYERNORM_RMS_EPS, float),
        "rope_theta": value_of(metadata, Keys.Rope.FREQ_BASE, float, 10000.0),
        "max_position_embeddings": value_of(metadata, Keys.LLM.CONTEXT_LENGTH, int),
        "vocab_size": len(array(metadata, Keys.Tokenizer.LIST)),
        "tie_word_embeddings": tied,
        "bos_token_id": token_ids(metadata, Keys.Tokenizer.BOS_ID).get(Keys.Tokenizer.BOS_ID),
        "eos_token_id": end_tokens(metadata),
    }


def _check_rope(metadata: Metadata, head_dim: int) -> None:
    scaling = value_of(metadata, Keys.Rope.SCALING_TYPE, str, "none")
    factor = value_of(metadata, "{arch}.rope.scale_linear", float, 1.0)  # older files
    if scaling != "none" or factor != 1.0:
        raise ValueError(f"its rope scaling {scaling!r} is not supported")
    rotated = value_of(metadata, Keys.Rope.DIMENSION_COUNT, int, head_dim)
    if rotated != head_dim or head_dim % 2:
        raise ValueError(f"rotating {rotated} of {head_dim} dimensions is not supported")


def _named_for(model: Any, tensors: Arrays, config: dict[str, Any]) -> Arrays:
    """The file's tensors under the names, and in the row order, of mlx-lm's llama model."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    left, weights = dict(tensors), {}
    for parameter in dict(tree_flatten(model.parameters())):
        module = parameter.rpartition(".")[0]
        stored = names.get_name(module)
        if f"{stored}.weight" not in left:
            raise ValueError(f"the tensor {stored}.weight is missing")
        for part in ("weight", "scales", "biases"):
            if (value := left.pop(f"{stored}.{part}", None)) is not None:
                split_by = heads.get(module.rpartition(".")[2])
                weights[f"{module}.{part}"] = _halves(value, split_by) if split_by else value
    if left:
        raise ValueError(f"the tensor {min(left)} is not supported")
    return weights


def _halves(rows: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's row order: each head's [D/2, 2] rows, rotated as pairs, become [2, D/2]."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _fill(model: Any, weights: Arrays, dtype: mx.Dtype | None) -> None:
    """Give `model` its weights, all in one floating dtype, and the packed layers they need."""
    packing = {}
    for name in (key.removesuffix(".scales") for key in weights if key.endswith(".scales")):
        words, groups = (weights[f"{name}.{part}"].shape[-1] for part in ("weight", "scales"))
        packing[name] = {"group_size": GROUP, "bits": 32 * words // (GROUP * groups)}
    nn.quantize(model, class_predicate=lambda name, _: packing.get(name, False))
    embedding = weights["model.embed_tokens.weight"]
    dtype = dtype or weights.get("model.embed_tokens.scales", embedding).dtype
    typed = {k: v if v.dtype == mx.uint32 else v.astype(dtype) for k, v in weights.items()}
    model.load_weights(list(typed.items()), strict=True)
    model.eval()


def _tokenizer(metadata: Metadata) -> TokenizerWrapper:
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
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != LLAMA_BPE)
    if kind in GPT2_SPLIT:
        return split
    if kind in GPT2_SPLIT_AND_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
    if kind == LLAMA_BPE:
        words = pre_tokenizers.Split(Regex(LLAMA_BPE_SPLIT), "isolated")
        return pre_tokenizers.Sequence([words, split])
    known = ", ".join((*GPT2_SPLIT, *GPT2_SPLIT_AND_DIGITS, LLAMA_BPE))
    raise ValueError(f"{Keys.Tokenizer.PRE} is {kind!r}, supported are {known}")


def end_tokens(metadata: Metadata) -> list[int]:
    """The tokens that end an answer."""
    return sorted(set(token_ids(metadata, *ENDS).values()))
