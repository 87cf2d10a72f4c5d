"""Reading and writing EAGLE-3 folders; all is checked before any weight is read.

Formats: raw ones, vLLM's speculators, and our own folders, which are raw ones without embedding and
head where these are the target's, with weights that MLX may have packed. This is the file side of
the family; `drafters/formats.py` says what every family offers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.findings import Finding
from dflash_mlx.drafters.eagle3.config_file import parse_fields, problems, translate
from dflash_mlx.drafters.eagle3.config_file import recognises as recognises
from dflash_mlx.drafters.eagle3.model import EagleModel
from dflash_mlx.drafters.eagle3.network import EagleConfig, Network
from dflash_mlx.drafters.formats import (
    CHOOSE_ANOTHER,
    aux_layers_of,
    called,
    increase,
    size_misfits,
)
from dflash_mlx.drafters.networks import tensors as files
from dflash_mlx.drafters.networks.layers import limit_windows
from dflash_mlx.drafters.networks.tensors import (
    FLAGS,
    FLOATING,
    WHOLE,
    DrafterFolder,
    Layout,
    in_words,
)
from dflash_mlx.verifier.model import Target


def parse_config(raw: Any, source: str, names: Collection[str] = ()) -> EagleConfig:
    """See `FileFormat.parse_config`; DFlashError for what is no usable drafter."""

    def parse() -> EagleConfig:
        return parse_fields(translate(raw), names)

    config: EagleConfig = files.parsed(parse, problems, source)
    return config


def misfits(
    config: EagleConfig, target: Mapping[str, Any], name: str, drafter: str = ""
) -> Iterator[Finding]:
    """See `FileFormat.misfits`; each with both values."""
    who = called(drafter)
    made_for = {
        "hidden_size": config.target_hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_target_layers,
    }
    yield from size_misfits(made_for, target, name, drafter)
    layers = target.get("num_hidden_layers")
    if type(layers) is int:
        aux_layers = aux_layers_of(config, layers)
        if outside := [tap for tap in aux_layers if not 0 <= tap < layers]:
            what = (
                f"{who} reads layers {list(aux_layers)} (counted from 0), but {name} has {layers} "
            )
            yield Finding("error", f"{what}layers, and no layer {outside[0]}", CHOOSE_ANOTHER)
        elif not increase(aux_layers):
            read = f"{who} reads layers {list(aux_layers)} (counted from 0)"
            what = f"{read}, not each once and in order; "
            yield Finding("error", f"{what}{name} has {layers} layers", CHOOSE_ANOTHER)


def read_drafter(folder: Path, has_values: bool = True) -> DrafterFolder:
    """See `FileFormat.read_drafter`."""
    raw = files.read_json(folder)
    config = parse_config(raw, str(folder), files.read_headers(folder))
    return LAYOUT.folder(folder, config, translate(raw), has_values)


def load(folder: Path, config: EagleConfig, target: Target, settings: PairConfig) -> EagleModel:
    """See `FileFormat.load`; raises as `read_drafter` does."""
    network = LAYOUT.load(folder, config, target.dtype, settings.drafter_bits)
    (window,) = limit_windows([config.window], settings.draft_window)
    return EagleModel(files.unpacked(network, config), replace(config, window=window), target)


def _raw_names(names: Collection[str]) -> dict[str, str]:
    """Speculators counts the one layer."""
    return {name: name.replace("layers.0.", "midlayer.", 1) for name in names}


def _left_over(config: EagleConfig) -> dict[str, str]:
    """What training leaves, and maps of a draft vocabulary that is the whole one."""
    width, head = config.target_hidden_size, config.draft_vocab_size or config.vocab_size
    found = {
        "verifier_norm.weight": in_words(FLOATING, (width,)),
        "verifier_lm_head.weight": in_words(FLOATING, (head, width)),
    }
    if config.draft_vocab_size is None:
        found["d2t"] = in_words(WHOLE, (config.vocab_size,))
        found["t2d"] = in_words(FLAGS, (config.vocab_size,))
    return found


LAYOUT = Layout(Network, _raw_names, _left_over)
check_tensors = LAYOUT.check
