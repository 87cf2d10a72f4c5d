"""Load a llama-architecture GGUF file: weights by MLX, model by mlx-lm, tokenizer from metadata."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
from gguf import Keys
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import dequantize_model

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
from dflash_mlx.models.formats.gguf_tokenizer import end_tokens, make_tokenizer
from dflash_mlx.system.safetensors_header import MAX_DIMENSION

GROUP = 32  # weights that share a scale, in every quantised type that MLX reads from GGUF
ELSEWHERE = "choose another GGUF file, or the same model as a Hugging Face folder"


def load_gguf(path: Path, dequantize: bool) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """Return the model, the tokenizer and the Hugging Face style config of a GGUF file.

    `dequantize` makes every weight float32, the fast path on a CPU; otherwise quantised matrices
    stay packed and all other weights take their dtype. Raises `DFlashError` for a file that is
    missing, damaged, of another architecture, or made with a feature that is not supported.
    """
    tensors, metadata = read_file(path)
    floating = mx.float32 if dequantize else None  # scales too, so that no product is rounded
    model, config = build_model(path, tensors, metadata, floating)
    tokenizer = build_tokenizer(path, metadata)
    if dequantize:
        model = dequantize_model(model)
    mx.eval(model.parameters())
    return model, tokenizer, config


def build_model(
    path: Path, tensors: Arrays, metadata: Metadata, dtype: mx.Dtype | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """The model and its config from what was read of the file; no weight is evaluated.

    dtype: of what is not packed, instead of that of the scales.
    """
    with _usable(path):
        config = _config(metadata, tied="output.weight" not in tensors)
        _check_blocks(tensors, config["num_hidden_layers"])
        model = llama.Model(llama.ModelArgs.from_dict(config))
        _fill(model, _named_for(model, tensors, config), dtype)
        return model, config


def build_tokenizer(path: Path, metadata: Metadata) -> TokenizerWrapper:
    """The tokenizer from the file's metadata."""
    with _usable(path):
        return make_tokenizer(metadata)


@contextmanager
def _usable(path: Path) -> Iterator[None]:
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


def _check_blocks(tensors: Arrays, count: int) -> None:
    """Before mlx-lm makes as many layers as the metadata say."""
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if len(blocks) != count:
        key = Keys.LLM.BLOCK_COUNT.format(arch=ARCHITECTURE)
        raise ValueError(f"{key} is {count}, but its tensors are of {len(blocks)} blocks")


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
