"""The methods of `--method`, by name."""

from __future__ import annotations

from dflash_mlx.config import DecodeConfig
from dflash_mlx.drafters.base import Drafter
from dflash_mlx.drafters.block_diffusion import BlockDiffusion
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.load import Pair, require_drafter


def _none(pair: Pair, config: DecodeConfig) -> Drafter:
    return NoDraft()


def _dflash(pair: Pair, config: DecodeConfig) -> Drafter:
    network_config = require_drafter(pair.network_config, pair.target.name)
    assert pair.network is not None
    return BlockDiffusion(pair.network, network_config, pair.target, config.block_size)


METHODS = {"none": _none, "dflash": _dflash}


def make_drafter(pair: Pair, config: DecodeConfig) -> Drafter:
    """The drafter of `config.method`; DFlashError when the pair has none that fits."""
    return METHODS[config.method](pair, config)
