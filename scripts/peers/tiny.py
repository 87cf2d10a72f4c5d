"""A tiny random Qwen pair, for who reads no Llama; its drafts are almost never right."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from peers.pair import CONFIG, Folders, save, write_config

_TARGET: dict[str, Any] = {
    **{"model_type": "qwen3", "hidden_size": 256, "intermediate_size": 768, "head_dim": 64},
    **{"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 8192},
    "tie_word_embeddings": True,
}
_DRAFTER: dict[str, Any] = {
    **{**_TARGET, "num_hidden_layers": 2, "tie_word_embeddings": False, "block_size": 8},
    **{"architectures": ["DFlashDraftModel"], "num_target_layers": 6, "rope_scaling": None},
    **{"attention_bias": False, "attention_dropout": 0.0},
}


def tiny(folder: Path, tokenizer: Path, vocabulary: int, ends: Any) -> Folders:
    """The pair's folders, written once; with the tokenizer of another folder."""
    target, drafter = folder / "target", folder / "drafter"
    if not (drafter / CONFIG).is_file():
        target.mkdir(parents=True, exist_ok=True)
        drafter.mkdir(parents=True, exist_ok=True)
        mx.random.seed(0)
        config = {**_TARGET, "vocab_size": vocabulary, "eos_token_id": ends}
        model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
        weights: Any = tree_flatten(model.parameters())
        save({name: _drawn(name, array.shape) for name, array in weights}, target)
        for file in tokenizer.iterdir():
            if file.name.startswith(("tokenizer", "chat_template")):
                shutil.copyfile(file, target / file.name)
        write_config(config, target)
        save({name: _drawn(name, shape) for name, shape in _shapes().items()}, drafter)
        masked = {"mask_token_id": 16, "target_layer_ids": [1, 2, 4]}
        write_config({**_DRAFTER, "vocab_size": vocabulary, "dflash_config": masked}, drafter)
    return Folders(target, drafter)


def _drawn(name: str, shape: Any) -> mx.array:
    if "norm" in name:
        return mx.ones(shape)
    return mx.random.normal(shape) * shape[-1] ** -0.5


def _shapes() -> dict[str, tuple[int, ...]]:
    """Of a drafter's weights, as they are published."""
    hidden, inner, head = 256, 768, 64
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        **{"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)},
        **{"self_attn.q_proj": (4 * head, hidden), "self_attn.o_proj": (hidden, 4 * head)},
        **{"self_attn.k_proj": (2 * head, hidden), "self_attn.v_proj": (2 * head, hidden)},
        **{"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)},
        **{"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)},
        "mlp.down_proj": (hidden, inner),
    }
    for i in range(_DRAFTER["num_hidden_layers"]):
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes
