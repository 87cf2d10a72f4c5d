"""The methods of `--method`, by name."""

from __future__ import annotations

from dflash_mlx.config import DecodeConfig
from dflash_mlx.drafters.base import Drafter
from dflash_mlx.drafters.block_diffusion import BlockDiffusion
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.errors import DFlashError
from dflash_mlx.load import Pair


def _none(pair: Pair, config: DecodeConfig) -> Drafter:
    return NoDraft()


def _dflash(pair: Pair, config: DecodeConfig) -> Drafter:
    if pair.network is None or pair.network_config is None:
        raise DFlashError(
            f"no drafter is known for {pair.target.name}",
            "name one with --drafter, or use --method none",
        )
    return BlockDiffusion(pair.network, pair.network_config, pair.target, config.block_size)


METHODS = {"none": _none, "dflash": _dflash}


def make_drafter(pair: Pair, config: DecodeConfig) -> Drafter:
    """The drafter of `config.method`; DFlashError when the pair has none that fits."""
    return METHODS[config.method](pair, config)
