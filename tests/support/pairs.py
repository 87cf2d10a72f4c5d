"""A tiny target with a draft model of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_mlx.engine.pair import Pair
from dflash_mlx.verifier.model import Target
from support import assistants, masked_formats, reference_mtp
from support.drafter_formats import drafter_folder, written
from support.language_models import language_model
from support.reference_eagle3 import FORMATS


def full_pair(place: Path, target: Target, tokenizer: Any = None) -> Pair:
    """Two DFlash drafters that read other layers, one of every other family."""
    first = drafter_folder(place / "first", [0, 2], 1, target)
    second = drafter_folder(place / "second", [1], 2, target)
    masked = masked_formats.small(place / "masked", target)
    eagle = written(place / "eagle", *FORMATS["raw"], target)
    head = written(place / "head", *reference_mtp.FORMATS["ours"], target)
    models = first, second, masked, eagle, head, language_model("qwen3", target)
    return Pair(target, tokenizer, models, "tiny")


def assistant_pair(place: Path, name: str = "dense", tokenizer: Any = None) -> Pair:
    """A tiny target of Gemma 4 with its assistant."""
    target = assistants.make_target(name, 4096)
    return Pair(target, tokenizer, (assistants.assistant(place, name, target),), "tiny")
