"""Published heads in other layouts: DeepSeek's eight-bit floats, and mlx-vlm's split folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from support.published_heads import DeepSeek, Head
from support.reference_dflash import Array, Config
from support.reference_layers import part

# DeepSeek's eight bits: a sign, four bits of exponent and three of fraction, and a scale for every
# block of a matrix

BLOCK = 128
_CODES = np.arange(256)
_EXPONENTS, _FRACTIONS = _CODES >> 3 & 15, _CODES & 7
_SIZES = np.where(_EXPONENTS == 0, _FRACTIONS / 512, (1 + _FRACTIONS / 8) * 2.0 ** (_EXPONENTS - 7))
EIGHT_BITS = np.where(_CODES < 128, _SIZES, -_SIZES)
EIGHT_BITS[[127, 255]] = np.nan
_SCALED = "_scale_inv"


def in_eight_bits(head: Head) -> tuple[dict[str, Array], dict[str, Array]]:
    """Tensors of a head with the layer's matrices stored so, and the numbers that these mean."""
    stored, meant = dict(head.tensors), dict(head.tensors)
    for name, array in head.tensors.items():
        if array.ndim < 2 or not ("self_attn" in name or "expert" in name):
            continue
        rows, columns = array.shape
        scales = np.zeros((-(-rows // BLOCK), -(-columns // BLOCK)), np.float32)
        codes, numbers = np.zeros(array.shape, np.uint8), np.zeros(array.shape, np.float32)
        for i, j in np.ndindex(scales.shape):
            block = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            scales[i, j] = np.abs(array[block]).max() / 448
            far = np.abs(array[block][..., None] / scales[i, j] - EIGHT_BITS)
            codes[block] = np.nanargmin(far, axis=-1)
            numbers[block] = EIGHT_BITS[codes[block]] * scales[i, j]
        stored |= {name: codes, name + _SCALED: scales}
        meant[name] = as_bfloat16(numbers)
    return stored, meant


def as_bfloat16(x: Array) -> Array:
    """The nearest numbers with eight bits of fraction, which mlx-lm unpacks to."""
    bits = x.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def write_eight_bits(folder: Path, raw: Config, stored: Mapping[str, Array]) -> None:
    """Such a folder; NumPy has no such floats, so the head of the file is changed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(raw)))
    data = save({name: np.ascontiguousarray(array) for name, array in stored.items()})
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for name in header:
        if name + _SCALED in header:
            header[name]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text + data[8 + size :]
    (folder / "model.safetensors").write_bytes(whole)


def as_split(head: DeepSeek) -> tuple[dict[str, Any], dict[str, Array]]:
    """As mlx-vlm splits GLM-4-MoE-lite's head off: config.json, and tensors as mlx-lm's layer has.

    Embedding and vocabulary matrix are there, too.
    """
    own, raw = part(head.tensors, head.prefix), head.raw
    found: dict[str, Array] = {}
    heads, keys = raw["num_attention_heads"], raw["qk_nope_head_dim"]
    both = own.pop("self_attn.kv_b_proj.weight").reshape(heads, -1, raw["kv_lora_rank"])
    own["self_attn.embed_q.weight"] = both[:, :keys].swapaxes(1, 2)
    own["self_attn.unembed_out.weight"] = both[:, keys:]
    for name in ("gate_proj", "up_proj", "down_proj"):
        parts = [own.pop(f"mlp.experts.{i}.{name}.weight") for i in range(raw["n_routed_experts"])]
        own[f"mlp.switch_mlp.{name}.weight"] = np.stack(parts)
    top = {"shared_head.norm": "model.shared_head_norm", "shared_head.head": "lm_head"}
    for name, array in own.items():
        module = name.removesuffix(".weight")
        flat = module in ("enorm", "hnorm", "eh_proj", "embed_tokens")
        found[top.get(module, f"model.{'' if flat else 'mtp_block.'}{module}") + ".weight"] = array
    for name in [n for n in found if n.endswith("correction_bias.weight")]:
        found[name.removesuffix(".weight")] = found.pop(name)
    split = {"model_type": "glm4_moe_lite_mtp", "text_config": dict(raw), "block_size": 2}
    return {**split, "tie_word_embeddings": False}, found
