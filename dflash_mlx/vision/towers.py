"""What a folder says of a model's eyes: a tower that reads pictures, and how large it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from dflash_mlx.core.text import amount
from dflash_mlx.system.safetensors_header import TensorHeader

_OF_TOWER = re.compile(
    r"(^|\.)(vision_\w+|visual|multi_modal_projector|mm_projector|connector|embed_vision)\."
)


def tower_bytes(tensors: Mapping[str, TensorHeader]) -> int:
    """Bytes of the weights that only pictures need."""
    return sum(tensor.nbytes for name, tensor in tensors.items() if _OF_TOWER.search(name))


def described(raw: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> str:
    """With what a model sees, and what that needs; "" for one that reads text alone.

    raw: its config.json.
    """
    if not isinstance(raw.get("vision_config"), dict):
        return ""
    if not (size := tower_bytes(tensors)):
        return "nothing: its files have no weights of the tower that config.json describes"
    here = "here" if find_spec("mlx_vlm") else "not installed"
    told = f"by a tower of {amount(size)}, where docs/vision.md has its family"
    return f"{told}; needs the extra vision, which is {here}"
