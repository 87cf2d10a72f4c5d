"""What `auto` means: the method that a pair is best used with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.models.registry import Advice

AUTO = "auto"


@dataclass(frozen=True)
class Means:
    """What a pair can draft with.

    drafters: networks, 0 to 2. trees: whether the target can verify them. advice: the registry's.
    """

    drafters: int
    trees: bool = True
    advice: Advice = Advice()


def settle(config: DecodeConfig, means: Means) -> DecodeConfig:
    """`config` with a method in place of `auto`, and with the block that pays, if it is known."""
    config = replace(config, method=_method(config, means))
    if config.method == "dflash" and config.block_size is None:
        return replace(config, block_size=means.advice.block_size)
    return config


def _method(config: DecodeConfig, means: Means) -> str:
    """What only some method can do chooses it; then what the target can do, then the advice.

    Rejection sampling is dflash's, the published tree and another number of branches d2sd's. Trees
    are cut by what pays, down to plain decoding, so they come before blocks of one size.
    """
    if config.method != AUTO:
        return config.method
    if means.drafters == 0:
        return "ngram"
    rejects = config.acceptance == "reject" and config.sampling.temperature > 0
    if rejects or not means.trees:
        return "dflash"
    if config.growth == "paper" or config.branches != DecodeConfig.branches:
        return "d2sd"
    if means.advice.method != AUTO:
        return means.advice.method
    return "d2sd" if means.drafters == 2 else "ddtree"
