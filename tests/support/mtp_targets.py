"""Tiny targets as Qwen publishes them, with the head that drafts for them in the same folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from safetensors.numpy import save_file

from support import reference_mtp
from support.families import make_model
from support.models import edit_config, write_tokenizer
from support.recurrent_families import RECURRENT
from support.reference_dflash import Array, write_drafter_folder

TARGET_SHARD, HEAD_SHARD = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
INDEX = "model.safetensors.index.json"
FIELDS = {
    n: reference_mtp.QWEN[n] for n in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
}


def config(**changes: Any) -> dict[str, Any]:
    """Of the tiny Qwen3.5, whose files say that it has a head."""
    return {**RECURRENT["qwen3_5"], **FIELDS, "eos_token_id": 999, **changes}


def head(**changes: Any) -> dict[str, Array]:
    """That head, by its names in split folders. changes: of config.json."""
    return reference_mtp.random_head(config(**changes))


def write_target(folder: Path, mtp: Mapping[str, Array] | None = None, **changes: Any) -> Path:
    """The tiny Qwen3.5 in two shards, the second of which has the head and nothing else.

    mtp: its tensors, by their names in the file; none for {}. changes: of config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(**changes)))
    write_tokenizer(folder)
    edit_config(folder, "tokenizer_config.json", eos_token=None)  # so that no token ends an answer
    weights = dict(tree_flatten(make_model("qwen3_5", **changes).parameters()))
    found = reference_mtp.inside(head(**changes)) if mtp is None else mtp
    found = {name: array for name, array in found.items() if "mtp" in name}
    if not found:
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
        return folder
    mx.save_safetensors(str(folder / TARGET_SHARD), weights, metadata={"format": "mlx"})
    save_file(dict(found), folder / HEAD_SHARD)
    places = {**dict.fromkeys(weights, TARGET_SHARD), **dict.fromkeys(found, HEAD_SHARD)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def write_split(folder: Path) -> Path:
    """The same head, as mlx-vlm splits it off."""
    return write_drafter_folder(folder, reference_mtp.split(config()), head())
