"""Drafter folders in the speculators layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.dflash.checkpoint import parse_config
from dflash_mlx.drafters.dflash.tensors import WHOLE, wanted_headers
from support.families import VOCAB_SIZE
from support.models import drafter_config
from support.reference_dflash import write_drafter_folder

DRAFT_VOCABULARY = 40


def speculators(**changes: Any) -> dict[str, Any]:
    layers = {k: v for k, v in drafter_config().items() if k not in ("dflash_config", "block_size")}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layers,
        "block_size": 8,
        "mask_token_id": 5,
        "aux_hidden_state_layer_ids": [1, 3],
        "draft_vocab_size": DRAFT_VOCABULARY,
        **changes,
    }


def write(folder: Path, raw: dict[str, Any], files: int = 1) -> Path:
    """A random drafter with the tensors that its format has, spread over `files`."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for name, header in wanted_headers(parse_config(raw, "test")).items():
        noise = rng.standard_normal(header.shape).astype(np.float32)
        ones = len(header.shape) == 1
        scale = np.float32(0.1 if ones else 1.5 / np.sqrt(header.shape[-1]))
        arrays[name] = ones + scale * noise
        if header.kind == WHOLE:
            drafted = np.sort(rng.permutation(VOCAB_SIZE)[:DRAFT_VOCABULARY])
            arrays[name] = (drafted - np.arange(DRAFT_VOCABULARY)).astype(np.int64)
            arrays["t2d"] = np.isin(np.arange(VOCAB_SIZE), drafted)
    write_drafter_folder(folder, raw, arrays)
    if files > 1:
        (folder / "model.safetensors").unlink()
        names = sorted(arrays)
        for i in range(files):
            shard = {name: mx.array(arrays[name]) for name in names[i::files]}
            file = folder / f"model-{i + 1:05d}-of-{files:05d}.safetensors"
            mx.save_safetensors(str(file), shard)
    return folder
