"""GGUF files in llama.cpp's layout, written here from a tiny random llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, Keys, TokenType, quants
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import pre_tokenizers

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

F32, F16, Q4_0, Q4_1, Q8_0, Q5_0 = (
    getattr(GGMLQuantizationType, name) for name in ("F32", "F16", "Q4_0", "Q4_1", "Q8_0", "Q5_0")
)
HEADS = {"q_proj": 4, "k_proj": 2}


NUMBERS = {
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
METADATA: dict[str, Any] = {
    **{key.format(arch="llama"): value for key, value in NUMBERS.items()},
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
Kinds = dict[str, GGMLQuantizationType]


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


def write(
    path: Path,
    model: llama.Model | None = None,
    kinds: Kinds | None = None,
    architecture: str = "llama",
    tensors: dict[str, np.ndarray | None] | None = None,
    **changed: Any,
) -> Path:
    """Write `model` as GGUF; `kinds` names the type of matrices, "" stands for the others.

    `changed` replaces metadata (dots as double underscores), `tensors` adds to the model's; None
    leaves a key or a tensor out.
    """
    model, kinds = model or make_model(), kinds or {"": F32}
    writer = GGUFWriter(path, architecture)
    replaced = {key.replace("__", "."): value for key, value in changed.items()}
    for key, value in {**METADATA, **replaced}.items():
        if value is not None:
            kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    tensors, names = tensors or {}, gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for parameter, value in dict(tree_flatten(model.parameters())).items():
        module = parameter.removesuffix(".weight")
        layer, weights = module.rpartition(".")[2], np.array(value)
        if layer in HEADS:
            weights = llama_cpp_rows(weights, HEADS[layer])
        kind = F32 if value.ndim == 1 else kinds.get(layer, kinds[""])
        name = f"{names.get_name(module)}.weight"
        if name not in tensors:
            writer.add_tensor(name, quants.quantize(weights, kind), raw_dtype=kind)
    for name, added in tensors.items():
        if added is not None:
            writer.add_tensor(name, added)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
