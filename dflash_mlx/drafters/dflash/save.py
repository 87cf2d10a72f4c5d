"""Writing drafter folders in z-lab's format, of either version."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.drafters.dflash.network import Network
from dflash_mlx.drafters.dflash.quantized import quantization_of
from dflash_mlx.drafters.dflash.tensors import parameters_of
from dflash_mlx.system.files import replace_safetensors, replace_text


def save_drafter(folder: Path, network: Network, raw_config: dict[str, Any]) -> None:
    """Write config.json and model.safetensors (bfloat16, or as MLX has packed it) into `folder`.

    raw_config: in z-lab's format. Each file is complete before it takes its name, so a reader, or a
    full disk (OSError), never meets half of one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: _stored(array) for name, array in parameters_of(network).items()}
    replace_safetensors(folder / "model.safetensors", weights, {"format": "pt"})
    raw = {**stored_config(network, raw_config), "dtype": "bfloat16"}
    replace_text(folder / "config.json", json.dumps(raw, indent=2) + "\n")


def stored_config(network: Network, raw_config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a folder with this network, which says how it is packed."""
    packed = quantization_of(network)
    return raw_config if packed is None else {**raw_config, "quantization": asdict(packed)}


def _stored(array: mx.array) -> mx.array:
    return array.astype(mx.bfloat16) if mx.issubdtype(array.dtype, mx.floating) else array
