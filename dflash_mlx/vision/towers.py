"""What a folder says of a model's eyes: a tower that reads pictures, and how large it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from dflash_mlx.core.text import amount
from dflash_mlx.system.safetensors_header import TensorHeader
from dflash_mlx.vision.eyes import KEPT
from dflash_mlx.vision.target import SEEING

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
    kind = str(raw.get("model_type"))
    if kind.lower().replace("-", "_") not in SEEING:
        return f"nothing: {kind} is none of the families that docs/vision.md names"
    if not find_spec("mlx_vlm"):
        return f"nothing yet: its tower of {amount(size)} needs the extra vision"
    told = f"pictures, by a tower of {amount(size)} that is read when the first one comes"
    return f"{told}; what it gave of the last ones takes up to {amount(KEPT)}"
