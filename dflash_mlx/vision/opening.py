"""Which models mlx-vlm opens, and how."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.verifier.reading import CHOOSE_TARGET, family_of, prepared
from dflash_mlx.vision.target import SEEING, SeeingTarget


def opens(raw: Mapping[str, Any]) -> bool:
    """Whether mlx-vlm opens the model of a config.json: one that sees, or that mlx-lm lacks."""
    kind, engine = raw.get("model_type"), find_spec("mlx_vlm")
    if not isinstance(kind, str) or engine is None or engine.origin is None:
        return False
    file = kind.lower().replace("-", "_")
    known = file.isidentifier() and (Path(engine.origin).parent / "models" / file).is_dir()
    seeing = file in SEEING and isinstance(raw.get("vision_config"), dict)
    return known and (seeing or not family_of(raw))


def open_target(folder: Path, context_length: int, name: str) -> SeeingTarget:
    """The target in a folder; of its tower no weight is read yet."""
    from mlx_vlm.utils import load_model  # takes seconds

    whole = load_model(folder, lazy=True)
    if not hasattr(whole, "language_model"):
        raise DFlashError(f"{name} has no language model that answers", CHOOSE_TARGET)
    if on_cpu():
        whole.set_dtype(mx.float32)
    prepared(whole.language_model)
    mx.eval(whole.language_model.parameters())
    return SeeingTarget(whole, context_length, name, folder)
