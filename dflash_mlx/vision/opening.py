"""Which models mlx-vlm opens, and how."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system.safetensors_header import TensorHeader
from dflash_mlx.verifier.reading import CHOOSE_TARGET, family_of, prepared
from dflash_mlx.vision.eyes import read_whole
from dflash_mlx.vision.target import SEEING, SeeingTarget
from dflash_mlx.vision.towers import tower_bytes


def opens(raw: Mapping[str, Any], tensors: Mapping[str, TensorHeader] | None = None) -> bool:
    """Whether mlx-vlm opens the model of a config.json: one that sees, or that mlx-lm lacks.

    tensors: of its files, where they are known; without its tower a model does not see.
    """
    kind, engine = raw.get("model_type"), find_spec("mlx_vlm")
    if not isinstance(kind, str) or engine is None or engine.origin is None:
        return False
    file = kind.lower().replace("-", "_")
    known = file.isidentifier() and (Path(engine.origin).parent / "models" / file).is_dir()
    seeing = file in SEEING and isinstance(raw.get("vision_config"), dict)
    seeing = seeing and (tensors is None or tower_bytes(tensors) > 0)
    return known and (seeing or not family_of(raw))


def open_target(folder: Path, context_length: int, name: str) -> SeeingTarget:
    """The target in a folder; of its tower no weight is read yet."""
    whole = read_whole(folder)
    if not hasattr(whole, "language_model"):
        raise DFlashError(f"{name} has no language model that answers", CHOOSE_TARGET)
    prepared(whole.language_model)
    mx.eval(whole.language_model.parameters())
    return SeeingTarget(whole, context_length, name, folder)
