"""Writing drafter folders in z-lab's DFlash v1 format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_mlx.drafters.network import Network
from dflash_mlx.files import replace_safetensors, replace_text


def save_drafter(folder: Path, network: Network, raw_config: dict[str, Any]) -> None:
    """Write config.json and model.safetensors (bfloat16) into `folder`.

    Each file is complete before it takes its name, so a reader, or a full disk (OSError), never
    meets half of one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parameters: list[tuple[str, mx.array]] = tree_flatten(network.parameters())  # type: ignore[assignment]
    weights = {name: array.astype(mx.bfloat16) for name, array in parameters}
    replace_safetensors(folder / "model.safetensors", weights, {"format": "pt"})
    text = json.dumps({**raw_config, "dtype": "bfloat16"}, indent=2) + "\n"
    replace_text(folder / "config.json", text)
