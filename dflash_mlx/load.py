"""From names to a pair: a target with its tokenizer, and a drafter that fits it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

from dflash_mlx.config import DecodeConfig, PairConfig
from dflash_mlx.drafters.checkpoint import check_block_size, check_fit, load_network, read_config
from dflash_mlx.drafters.network import Network, NetworkConfig
from dflash_mlx.errors import DFlashError
from dflash_mlx.resolve import DEFAULT_DRAFTER, DEFAULT_MODEL, drafter_folders
from dflash_mlx.target import Target
from dflash_mlx.target_loading import open_target
from kernels_metal.dispatch import Mode

DRAFTED = ("dflash", "ddtree", "d2sd", "resample")  # methods that need a drafter network


@dataclass(frozen=True)
class Pair:
    """A target with its tokenizer, and the drafter networks that fit it, if any.

    tokenizer: mlx-lm's TokenizerWrapper. second_network: D2SD's variable-prefix drafter.
    experience: what sessions have learned about drafting, by method and settings.
    """

    target: Target
    tokenizer: Any
    network: Network | None = None
    network_config: NetworkConfig | None = None
    drafter_name: str | None = None
    second_network: Network | None = None
    second_config: NetworkConfig | None = None
    experience: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


def load(model: str | None = None, drafter: str | None = None) -> Pair:
    """Load a target and its drafter.

    model, drafter: a Hugging Face id or a local folder. Without `model`, the embedded default
    target, with its own drafter unless another is named. Without `drafter`, any other model is
    loaded alone and can decode plainly. Raises DFlashError for what cannot be found or read, and
    for a drafter that does not fit.
    """
    return load_pair(PairConfig(model, drafter))


def load_pair(config: PairConfig, *uses: DecodeConfig) -> Pair:
    """`load` from settings; whether all fits is checked before weights are fetched or read.

    uses: settings that the pair will be used with; DFlashError where it cannot serve them.
    """
    name = DEFAULT_MODEL if config.model is None else config.model
    folders = drafter_folders(config, uses)
    network_configs = [read_config(folder) for folder in folders]
    for use in uses:
        if use.method in DRAFTED:
            first = require_drafter(next(iter(network_configs), None), name)
            check_block_size(use.block_size, first)
        if use.method == "d2sd":
            check_block_size(use.block_size, network_configs[-1])

    def check(target_config: dict[str, Any]) -> None:
        for network_config in network_configs:
            check_fit(network_config, target_config, name)

    target, tokenizer = open_target(config.model, check)
    target.use_kernels(cast(Mode, config.kernels))
    pair = Pair(target, tokenizer)
    loaded = [
        (load_network(folder, network_config, target.dtype), network_config)
        for folder, network_config in zip(folders, network_configs, strict=True)
    ]
    if loaded:
        pair = replace(pair, network=loaded[0][0], network_config=loaded[0][1])
        pair = replace(pair, drafter_name=config.drafter or DEFAULT_DRAFTER)
    if len(loaded) > 1:
        pair = replace(pair, second_network=loaded[1][0], second_config=loaded[1][1])
    return pair


def load_target(name: str | None = None) -> Pair:
    """A target alone, the default one without a name; raises as `load` does.

    Its kernels are off: they have no gradients, and batch work has more rows than they take.
    """
    return Pair(*open_target(name, lambda target_config: None))


def require_drafter(config: NetworkConfig | None, target_name: str) -> NetworkConfig:
    """The drafter's configuration, or DFlashError where there is no drafter."""
    if config is None:
        raise DFlashError(
            f"no drafter is known for {target_name}",
            "name one with --drafter, or use --method none",
        )
    return config
