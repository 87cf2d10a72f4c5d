"""Reading and writing folders of masked diffusion drafters; all is checked before a weight is read.

This is the file side of the family; `drafters/formats.py` says what every family offers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.findings import Finding
from dflash_mlx.drafters.formats import size_misfits
from dflash_mlx.drafters.networks import tensors as files
from dflash_mlx.drafters.networks.fields import architecture
from dflash_mlx.drafters.networks.layers import limit_windows
from dflash_mlx.drafters.networks.tensors import FLOATING, DrafterFolder, Layout, in_words
from dflash_mlx.drafters.specdiff.config_file import (
    OTHERS,
    OURS,
    PUBLISHED,
    parse_fields,
    problems,
    translate,
)
from dflash_mlx.drafters.specdiff.model import MaskedModel
from dflash_mlx.drafters.specdiff.network import Network, NetworkConfig
from dflash_mlx.verifier.model import Target

_PREFIX = "model."  # of all tensors but the head in published files


def recognises(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a masked diffusion model, readable or not."""
    return architecture(raw) in (OURS, *PUBLISHED, *OTHERS)


def parse_config(raw: Any, source: str, names: Collection[str] = ()) -> NetworkConfig:
    """The configuration in a config.json's contents.

    source: where they are from, for messages. names: of the tensors beside it. Raises DFlashError
    for what is of no usable drafter.
    """
    config: NetworkConfig = files.parsed(
        lambda: parse_fields(translate(raw, names)), problems, source
    )
    return config


def misfits(
    config: NetworkConfig, target: Mapping[str, Any], name: str, drafter: str = ""
) -> Iterator[Finding]:
    """What keeps a drafter from a target, each with both values; names as of `FileFormat`."""
    made_for: dict[str, int | None] = {"vocab_size": config.vocab_size}
    if not (config.own_embedding and config.own_head):
        made_for["hidden_size"] = config.hidden_size
    return size_misfits(made_for, target, name, drafter)


def read_drafter(folder: Path, has_values: bool = True) -> DrafterFolder:
    """See `FileFormat.read_drafter`."""
    raw, names = files.read_json(folder), files.read_headers(folder)
    config = parse_config(raw, str(folder), names)
    return LAYOUT.folder(folder, config, translate(raw, names), has_values)


def load(folder: Path, config: NetworkConfig, target: Target, settings: PairConfig) -> MaskedModel:
    """See `FileFormat.load`. On a CPU packed matrices are unpacked, which is faster there."""
    windows = limit_windows(config.layer_windows, settings.draft_window)
    config = replace(config, layer_windows=windows)
    network = LAYOUT.load(folder, config, target.dtype, settings.drafter_bits)
    return MaskedModel(files.unpacked(network, config), config, target)


def _second_head(config: NetworkConfig) -> dict[str, str]:
    """Some published folders have a copy of the embedding that they tie to it."""
    shape = (config.vocab_size, config.hidden_size)
    return {"lm_head.weight": in_words(FLOATING, shape)} if config.tied else {}


LAYOUT = Layout(Network, lambda names: {n: n.removeprefix(_PREFIX) for n in names}, _second_head)
check_tensors = LAYOUT.check
