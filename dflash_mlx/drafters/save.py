"""Writing drafter folders in z-lab's DFlash v1 format."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_mlx.drafters.network import Network


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


def replace_safetensors(file: Path, arrays: dict[str, mx.array], metadata: dict[str, str]) -> None:
    """Write `arrays` to `file` at once, or leave what is there; OSError when the disk is full."""
    partial = file.with_name(f"new-{file.name}")
    try:
        mx.save_safetensors(str(partial), arrays, metadata)
        expected = sum(array.nbytes for array in arrays.values())
        if partial.stat().st_size < expected:
            raise OSError(28, "No space left on device", str(partial))
        os.replace(partial, file)
    except RuntimeError as error:
        raise OSError(f"{file} cannot be written ({error})") from None
    finally:
        partial.unlink(missing_ok=True)


def replace_text(file: Path, text: str) -> None:
    """Write `text` to `file` at once, or leave what is there."""
    partial = file.with_name(f"new-{file.name}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
