"""Load a llama-architecture GGUF file: weights by MLX, model by mlx-lm, tokenizer from metadata."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, Keys, TokenType
from gguf.gguf_reader import ReaderField
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from dflash_mlx.core.errors import DFlashError, in_one_line
from dflash_mlx.system.safetensors_header import MAX_DIMENSION

MAX_DIMENSIONS = 4  # GGML's own limit
MAX_ELEMENTS = 2**22  # of an array in the metadata; vocabularies have up to 2**18
ARCHITECTURE = "llama"
READABLE = ("F32", "F16", "Q4_0", "Q4_1", "Q8_0")  # types of tensors

Arrays = dict[str, mx.array]
Metadata = dict[str, Any]
GROUP = 32  # weights that share a scale, in every quantised type that MLX reads from GGUF

PACKED = ("weight", "scales", "biases")
LAYER = (  # modules of mlx-lm's llama
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
)
ENDS = ("model.embed_tokens", "model.norm", "lm_head")

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


def load_gguf(
    path: Path,
    dtype: mx.Dtype | None = None,
    begin: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Return the model, the tokenizer and the Hugging Face style config of a GGUF file.

    No weight is evaluated, and what is quantised stays packed. dtype: of all else, instead of that
    of the scales. begin: called with the model before the tokenizer is made, so that MLX can read
    meanwhile. Raises `DFlashError` for a file that is missing, damaged, of another architecture, or
    made with a feature that is not supported.
    """
    with _usable(path):
        tensors, metadata = read_file(path)
        config = _config(metadata, tensors)
        weights, make_tokenizer = _named(tensors, config), _tokenizer(metadata, config)
        return begin(_make_model(config, weights, dtype)), make_tokenizer(), config


def _make_model(config: dict[str, Any], weights: Arrays, dtype: mx.Dtype | None) -> nn.Module:
    """ValueError for shapes that are not those of the config."""
    from mlx_lm.models import llama

    model = llama.Model(llama.ModelArgs.from_dict(config))

    def packing(name: str, _: nn.Module) -> bool | dict[str, int]:
        if (scales := weights.get(f"{name}.scales")) is None:
            return False
        packed = weights[f"{name}.weight"].shape[-1]
        return {"group_size": GROUP, "bits": 32 * packed // (GROUP * scales.shape[-1])}

    nn.quantize(model, class_predicate=packing)
    scales = weights.get("model.embed_tokens.scales", weights["model.embed_tokens.weight"])
    dtype = dtype or scales.dtype
    typed = {k: v if v.dtype == mx.uint32 else v.astype(dtype) for k, v in weights.items()}
    return model.load_weights(list(typed.items())).eval()


def read_config(path: Path) -> dict[str, Any]:
    """The Hugging Face style config of a GGUF file alone; raises as `load_gguf` does."""
    tensors, metadata = read_file(path)
    with _usable(path):
        return _config(metadata, tensors)


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Errors of what a file holds as `DFlashError`."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        step = "choose another GGUF file, or the same model as a Hugging Face folder"
        raise DFlashError(f"{path.name} cannot be used: {error}", step) from error


def _config(metadata: Metadata, tensors: Arrays) -> dict[str, Any]:
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
    ends = Keys.Tokenizer.EOS_ID, Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID
    if heads % kv_heads or heads * head_dim > MAX_DIMENSION:
        has = f"{heads} attention heads of {head_dim} on {kv_heads} key/value heads"
        raise ValueError(f"it has {has}, which must divide them, of up to {MAX_DIMENSION} numbers")
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
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": token_ids(metadata, Keys.Tokenizer.BOS_ID).get(Keys.Tokenizer.BOS_ID),
        "eos_token_id": sorted(set(token_ids(metadata, *ends).values())),
    }


def _check_rope(metadata: Metadata, head_dim: int) -> None:
    scaling = value_of(metadata, Keys.Rope.SCALING_TYPE, str, "none")
    factor = value_of(metadata, "{arch}.rope.scale_linear", float, 1.0)  # older files
    if scaling != "none" or factor != 1.0:
        raise ValueError(f"its rope scaling {scaling!r} is not supported")
    rotated = value_of(metadata, Keys.Rope.DIMENSION_COUNT, int, head_dim)
    if rotated != head_dim or head_dim % 2:
        raise ValueError(f"rotating {rotated} of {head_dim} dimensions is not supported")


def _named(tensors: Arrays, config: dict[str, Any]) -> Arrays:
    """The file's tensors under the names, and in the row order, of mlx-lm's llama model."""
    count = config["num_hidden_layers"]
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if len(blocks) != count:
        key = Keys.LLM.BLOCK_COUNT.format(arch=ARCHITECTURE)
        raise ValueError(f"{key} is {count}, but its tensors are of {len(blocks)} blocks")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, count)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    modules = [f"model.layers.{i}.{module}" for i in range(count) for module in LAYER]
    left, weights = tensors.copy(), {}
    for module in (*modules, *ENDS[: 2 if config["tie_word_embeddings"] else 3]):
        stored = names.get_name(module)
        if (weight := left.get(f"{stored}.weight")) is None:
            raise ValueError(f"the tensor {stored}.weight is missing")
        packed = weight.dtype == mx.uint32 and all(f"{stored}.{part}" in left for part in PACKED)
        for part in PACKED if packed else PACKED[:1]:
            rows = left.pop(f"{stored}.{part}")
            if (of := heads.get(module.rpartition(".")[2])) is not None:
                # llama.cpp turns neighbours, [D/2, 2] of each head, mlx-lm halves, [2, D/2]
                pairs = rows.reshape(of, -1, 2, rows.shape[-1])
                rows = pairs.swapaxes(1, 2).reshape(rows.shape)
            weights[f"{module}.{part}"] = rows
    if left:
        raise ValueError(f"the tensor {min(left)} is not supported")
    return weights


def _tokenizer(metadata: Metadata, config: dict[str, Any]) -> Callable[[], Any]:
    """What makes the tokenizer; it imports transformers, which takes long, once all is judged."""
    if (model := value_of(metadata, Keys.Tokenizer.MODEL, str)) != MODEL:
        raise ValueError(f"its tokenizer is {model!r}, supported is {MODEL!r} (byte-level BPE)")
    split = value_of(metadata, Keys.Tokenizer.PRE, str)
    tokens: Any = array(metadata, Keys.Tokenizer.LIST)
    ids = token_ids(metadata, *ROLES.values())
    begins = split == LLAMA_BPE  # llama.cpp's own where a file does not say
    parts: dict[str, Any] = {
        "tokenizer_object": _byte_level_bpe(metadata, split, tokens),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": value_of(metadata, Keys.Tokenizer.ADD_BOS, bool, begins),
        "add_eos_token": value_of(metadata, Keys.Tokenizer.ADD_EOS, bool, False),
        "chat_template": value_of(metadata, Keys.Tokenizer.CHAT_TEMPLATE, str, "") or None,
        **{role: tokens[ids[key]] for role, key in ROLES.items() if key in ids},
    }

    def make() -> Any:
        from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(**parts)
        # mlx-lm's BPE detokenizer drops a leading space and garbles the byte 0; this one does not.
        return TokenizerWrapper(tokenizer, NaiveStreamingDetokenizer, config["eos_token_id"])

    return make


def _byte_level_bpe(metadata: Metadata, split: str, tokens: list[str]) -> Tokenizer:
    ids = {token: i for i, token in enumerate(tokens)}
    # Llama 3's words that are tokens need no merges
    backend = Tokenizer(models.BPE(ids, _merges(metadata, ids), ignore_merges=split == LLAMA_BPE))
    backend.pre_tokenizer = _pre_tokenizer(split)
    backend.decoder = decoders.ByteLevel()
    kinds = array(metadata, Keys.Tokenizer.TOKEN_TYPE, int, [])  # which some files lack
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in WHOLE:
            special = kind != TokenType.USER_DEFINED
            backend.add_tokens([AddedToken(token, special=special, normalized=False)])
    return backend


def _merges(metadata: Metadata, ids: dict[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in array(metadata, Keys.Tokenizer.MERGES):
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
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


# The head


def read_file(file: Path) -> tuple[Arrays, Metadata]:
    """Tensors as MLX names them, and metadata; DFlashError for what is damaged or not readable."""
    try:
        if not file.is_file():
            raise ValueError("it is not a file")
        with open(file, "rb") as opened:
            if (magic := opened.read(4)) != b"GGUF":
                raise ValueError(f"it begins with {magic!r}, not with b'GGUF'")
        _Head(file)
        loaded: Any = mx.load(str(file), format="gguf", return_metadata=True)
        tensors, metadata = loaded
        plain = {k: v.tolist() if isinstance(v, mx.array) else v for k, v in metadata.items()}
        return tensors, plain
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        step = "download or copy it again"
        if isinstance(error, NotImplementedError):  # it is sound
            step = f"choose a GGUF file of type {', '.join(READABLE)}"
        what = f"{file.name} cannot be read as a GGUF file ({in_one_line(error)})"
        raise DFlashError(what, step) from None


class _Head(GGUFReader):
    """The gguf package's reader, which would read on behind the end; it judges what MLX trusts."""

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        size, left = int(count) * np.dtype(dtype).itemsize, len(self.data) - offset
        if size > left:
            raise ValueError(f"at byte {offset} {size} bytes are needed, {max(left, 0)} are left")
        return super()._get(offset, dtype, count, override_order)

    def _build_fields(self, offs: int, count: int) -> int:
        if self.byte_order != "I":
            raise ValueError("it is big-endian, little-endian files can be read")
        end = super()._build_fields(offs, count)
        if field := self.fields.get(Keys.General.ALIGNMENT):
            value = field.contents()
            if type(value) is not int or value < 1 or value & (value - 1):
                raise ValueError(f"its alignment is {repr(value)[:80]}, not a power of two")
        return end

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(self._get(orig_offs, np.uint32)[0])
        count, end = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
        if kind is GGUFValueType.ARRAY or count > MAX_ELEMENTS:
            raise ValueError(f"it has an array of {count} {kind.name}, up to {MAX_ELEMENTS} can be")
        if kind is GGUFValueType.STRING:
            contents = self.data.data
            for _ in range(count):
                end += 8 + int.from_bytes(contents[end : end + 8], "little")
        else:
            end += count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        self._get(orig_offs, np.uint8, end - orig_offs)
        return end - orig_offs, [], [], [GGUFValueType.ARRAY]

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        (name, count), *_ = Counter(field.name for field in fields).most_common(1) or [("", 0)]
        if count > 1:
            raise ValueError(f"it has the tensor {name[:80]!r} {count} times")
        places = sorted(_place(field, int(self.alignment)) for field in fields)
        for (_, end, first), (begin, _, second) in pairwise(places):
            if begin < end:
                raise ValueError(f"{second!r} begins at byte {begin}, inside {first!r}")
        end, left = places[-1][1] if places else 0, max(len(self.data) - int(start_offs), 0)
        if end > left:
            raise ValueError(f"its tensors end at byte {end} of the data, it has {left}")


def _place(field: ReaderField, alignment: int) -> tuple[int, int, str]:
    name, shape = field.name[:80], field.parts[3].tolist()  # the fastest dimension first
    number, begin = (int(part[0]) for part in field.parts[4:])
    if not 1 <= len(shape) <= MAX_DIMENSIONS or not all(1 <= n <= MAX_DIMENSION for n in shape):
        raise ValueError(f"the shape of {name!r} is {shape}, 1 to {MAX_DIMENSIONS} numbers can be")
    kind = GGMLQuantizationType(number)
    if kind.name not in READABLE:
        raise NotImplementedError(f"{name!r} is of type {kind.name}, which MLX does not read")
    block, size = GGML_QUANT_SIZES[kind]
    if shape[0] % block:
        raise ValueError(f"{name!r} has rows of {shape[0]}, {kind.name} has blocks of {block}")
    if begin % alignment:
        raise ValueError(f"{name!r} begins at byte {begin}, aligned to {alignment}")
    return begin, begin + math.prod(shape) // block * size, name


_KINDS: dict[type, str] = {
    int: f"one whole number from 1 to {MAX_DIMENSION}",
    float: "one finite number above 0",
    str: "a text",
    bool: "true or false",
    list: "a list",
}


def value_of(metadata: Metadata, key: str, kind: type, default: Any = None) -> Any:
    """A value of a kind of _KINDS; ValueError names the key. Without a default it must be there."""
    name = key.format(arch=ARCHITECTURE)
    if default is None and name not in metadata:
        raise ValueError(f"the metadata {name} is missing")
    value: Any = metadata.get(name, default)
    fits = isinstance(value, kind)
    if kind is int:
        fits = type(value) is int and 1 <= value <= MAX_DIMENSION
    elif kind is float:
        fits = type(value) in (int, float) and 0 < value < math.inf
    if not fits:
        raise ValueError(f"{name} is {repr(value)[:80]}, not {_KINDS[kind]}")
    return value


def array(metadata: Metadata, key: str, kind: type = str, default: Any = None) -> list[Any]:
    """The elements of a list, all of a kind; ValueError for anything else."""
    value: list[Any] = value_of(metadata, key, list, default)
    if wrong := [v for v in value if type(v) is not kind]:
        raise ValueError(f"{key} has {repr(wrong[0])[:80]}, which is no {kind.__name__}")
    return value


def token_ids(metadata: Metadata, *keys: str) -> dict[str, int]:
    """Those of these keys that are there, each a token of the vocabulary."""
    count = len(array(metadata, Keys.Tokenizer.LIST))
    found = {key: metadata[key] for key in keys if key in metadata}
    for key, value in found.items():
        if type(value) is not int or not 0 <= value < count:
            raise ValueError(f"{key} is {repr(value)[:80]}, not one token of its {count}")
    return found
