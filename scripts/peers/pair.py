"""The pair that all read: folders of weights, the same numbers for everybody."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.models.check import ModelFacts
from dflash_mlx.models.load import make_ready
from dflash_mlx.models.read import read_target
from dflash_mlx.models.source import DRAFTER
from dflash_mlx.system.cpu_math import applies as on_cpu

CONFIG = "config.json"
_PACKED = ("quantization", "quantization_config")


@dataclass(frozen=True)
class Folders:
    """Where the weights lie, as others read them; None for what there is not."""

    target: Path
    drafter: Path | None
    small: Path | None = None  # a small language model that drafts
    head: Path | None = None  # the target's own, for multi-token prediction
    template: Mapping[str, Any] = field(default_factory=dict)  # arguments of the chat template

    def places(self, **more: object) -> dict[str, str]:
        """What words of a command line are filled with."""
        named = {"target": self.target, "drafter": self.drafter or "", **more}
        return {name: str(value) for name, value in named.items()}


def written(config: PairConfig, folder: Path, small: Path | None = None) -> Folders:
    """The folders of a pair; on a CPU both in float32, below `folder`, written once."""
    facts, choice, names = make_ready(config, DecodeConfig())
    found = choice.drafters.get(DRAFTER)
    drafter = None if found is None or found.source is None else found.source.here
    target = None if facts.source is None else facts.source.here
    head = target if target is not None and has_head(facts.config) else None
    if on_cpu() or target is None:
        target = _once(folder / "target", lambda place: _write_target(facts, place))
    if on_cpu() and (source := drafter) is not None:
        drafter = _once(folder / "drafter", lambda place: _write_drafter(source, place))
    template = dict(names.preset.template) | config.template_arguments
    return Folders(target, drafter, small, head, template)


def has_head(config: Mapping[str, Any]) -> bool:
    """Whether a config.json tells of layers for multi-token prediction."""
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    parts = [config, config.get("text_config") or {}]
    return any(part.get(key) for part in parts for key in keys)


def _once(place: Path, write: Any) -> Path:
    if not (place / CONFIG).is_file():
        place.mkdir(parents=True, exist_ok=True)
        write(place)
    return place


def _write_target(facts: ModelFacts, place: Path) -> None:
    raw: list[dict[str, Any]] = []

    def make(model: Any, length: int, name: str) -> Any:
        weights: Any = tree_flatten(model.parameters())
        save(dict(weights), place)
        raw.append(config_of(facts))
        return model

    _, tokenizer = read_target(facts, make=make)
    tokenizer.save_pretrained(place)
    write_config({k: v for k, v in raw[0].items() if k not in _PACKED}, place)


def config_of(facts: ModelFacts) -> dict[str, Any]:
    """The config.json of a target, or what a GGUF file says in its place."""
    if facts.source is not None:
        return dict(facts.source.read_json(CONFIG))
    from dflash_mlx.models.default_model import fetch
    from dflash_mlx.models.gguf_target import read_config

    return read_config(facts.file or fetch())


def _write_drafter(source: Path, place: Path) -> None:
    weights: dict[str, mx.array] = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= mx.load(str(file))
    save(weights, place)
    for file in source.glob("*.npy"):  # likely tokens
        shutil.copyfile(file, place / file.name)
    write_config(json.loads((source / CONFIG).read_text()), place)


def save(weights: Mapping[str, mx.array], place: Path) -> None:
    """Write weights, those with a fraction as float32."""
    kept = {
        name: array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
        for name, array in weights.items()
    }
    mx.save_safetensors(str(place / "model.safetensors"), kept, {"format": "mlx"})


def write_config(raw: Mapping[str, Any], place: Path) -> None:
    """Write config.json of what was saved; last, since it says that the folder is whole."""
    told = {**raw, "dtype": "float32", "torch_dtype": "float32"}
    (place / CONFIG).write_text(json.dumps(told, indent=1))
