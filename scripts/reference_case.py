"""A folder that published modules read, for `reference_formats.py`; nothing of this project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
SCALES = ("output_multiplier", "input_embedding_scale", "final_logit_softcapping")


class Case:
    """A folder, the text behind which it drafts, and what it drafts."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.folder, self.tokens = Path(told["folder"]), told["tokens"]
        self.anchor, self.path, self.first = told["anchor"], told["path"], not told["from_anchor"]
        self.raw = json.loads((self.folder / "config.json").read_text())
        self.arrays = dict(np.load(self.folder / "case.npz"))
        self.features = self.arrays["features"]
        self.kind = self.raw["architectures"][0]
        self.library = self.raw.get("speculators_model_type")
        self.method = self.raw.get("dflash_config", {})

    def field(self, name: str) -> Any:
        return {**self.raw, **self.method}.get(name)

    @property
    def block(self) -> list[int]:
        """The rows of the network's block."""
        masks = len(self.path) + self.first - 1
        return [self.anchor, *[self.field("mask_token_id")] * masks]

    @property
    def slides(self) -> bool:
        kinds = {**self.raw, **self.raw.get("transformer_layer_config", {})}.get("layer_types")
        return "sliding_attention" in (kinds or [])

    @property
    def before(self) -> list[int]:
        """The token before each drafted one."""
        return [self.anchor, *self.path[:-1]]


def check_path(case: Case, path: list[int]) -> None:
    """Raise ValueError for another path than ours; no package knows `selector_vocab_size`."""
    if path != case.path and not case.field("selector_vocab_size"):
        raise ValueError(f"another path, {path} for {case.path}")
