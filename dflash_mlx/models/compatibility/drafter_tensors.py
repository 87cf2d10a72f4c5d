"""A drafter's configuration and its tensors, one against the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import Finding
from dflash_mlx.drafters.dflash.checkpoint import parse_config
from dflash_mlx.drafters.dflash.network import NetworkConfig
from dflash_mlx.drafters.dflash.tensors import (
    DOWNLOAD_AGAIN,
    Header,
    differences,
    optional_headers,
    plain_names,
    wanted_headers,
)
from dflash_mlx.models.compatibility.model_source import ModelSource
from dflash_mlx.models.compatibility.weight_files import Weights

MAX_BLOCK = 1024  # positions; published drafters have 4 to 16


def network_config(source: ModelSource, raw: Mapping[str, Any], weights: Weights) -> NetworkConfig:
    """The configuration; DFlashError where it is incomplete or contradicts itself."""
    config = parse_config(dict(raw), source.name, weights.tensors.keys())
    if config.block_size > MAX_BLOCK:
        what = f"block_size in {source.name} is {config.block_size}, not up to {MAX_BLOCK}"
        raise DFlashError(what, DOWNLOAD_AGAIN)
    return config


def check_tensors(
    source: ModelSource, config: NetworkConfig, weights: Weights
) -> Iterator[Finding]:
    """Tensors that are missing, unexpected or of another shape than the configuration's.

    Raises DFlashError for a configuration of which no network can be made.
    """
    if not weights.tensors:
        what = f"the .safetensors files in {source.name} hold no tensors"
        yield Finding("error", what, DOWNLOAD_AGAIN, source.name, "", "none", "a drafter's")
        return
    wanted = wanted_headers(config, source.name)
    plain = plain_names(weights.tensors)
    found = {plain[name]: Header.of(t.dtype, t.shape) for name, t in weights.tensors.items()}
    for name, has, needs in differences(found, wanted, optional_headers(config)):
        what = f"tensor {name} in {source.name} is {has}, but its config.json asks for {needs}"
        yield Finding("error", what, DOWNLOAD_AGAIN, source.name, name, has, needs)


def notes(source: ModelSource, config: NetworkConfig) -> Iterator[Finding]:
    """What reading the configuration had to assume."""
    for note in config.notes:
        step = "if nothing is accepted, compare it with how the drafter was trained"
        yield Finding("note", note, step, source.place("config.json"))
