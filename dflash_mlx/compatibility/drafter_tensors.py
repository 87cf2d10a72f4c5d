"""A drafter's configuration and its tensors, one against the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_mlx.compatibility.model_source import ModelSource
from dflash_mlx.compatibility.weight_files import Weights
from dflash_mlx.drafters.checkpoint import parse_config
from dflash_mlx.drafters.network import Network, NetworkConfig
from dflash_mlx.findings import Finding

_DOWNLOAD_AGAIN = "download the drafter again, or choose another one with --drafter"


def network_config(source: ModelSource, raw: Mapping[str, Any]) -> NetworkConfig:
    """The configuration; DFlashError where it is incomplete or contradicts itself."""
    return parse_config(dict(raw), source.name)


def expected_tensors(
    source: ModelSource, config: NetworkConfig, weights: Weights
) -> Iterator[Finding]:
    """Tensors that are missing, unexpected or of another shape than the configuration's."""
    try:
        network = Network(config)
    except (ValueError, KeyError) as error:
        what = f"the rope in {source.name} is {config.rope}, which mlx-lm refuses ({error})"
        place = source.place("config.json")
        yield Finding("error", what, _DOWNLOAD_AGAIN, place, "rope_parameters", str(config.rope))
        return
    parameters: list[tuple[str, mx.array]] = tree_flatten(network.parameters())  # type: ignore[assignment]
    wanted = {name: tuple(array.shape) for name, array in parameters}
    for name in sorted(wanted.keys() | weights.tensors.keys()):
        has = weights.tensors[name].shape if name in weights.tensors else "missing"
        needs = wanted.get(name, "no such tensor")
        if has != needs:
            what = f"tensor {name} in {source.name} is {has}, but its config.json asks for {needs}"
            yield Finding("error", what, _DOWNLOAD_AGAIN, source.name, name, str(has), str(needs))
