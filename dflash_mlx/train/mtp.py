"""A head for multi-token prediction in training: what a new one starts as."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.mtp.checkpoint import FILES, our_config
from dflash_mlx.drafters.mtp.kinds import text_of
from dflash_mlx.drafters.mtp.model import HeadConfig, Network
from dflash_mlx.drafters.networks.fields import Fields
from dflash_mlx.drafters.networks.model import last_norm
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.paired import PairedTrainee
from dflash_mlx.train.trainee import BLOCK_SIZE, START_FROM, take_layers
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target

_TOKENS = 64  # that tell how large a target's states are


@dataclass(frozen=True)
class HeadTrainee(PairedTrainee):
    """One layer of the target's own kind."""

    network: Network
    config: HeadConfig
    files: ClassVar[Any] = FILES

    def __post_init__(self) -> None:
        self.network.bind(last_norm(self.target) if self.config.hidden_normed else None)

    @classmethod
    def new(cls, config: TrainConfig, pair: Pair) -> HeadTrainee:
        """The target's last layer or noise, behind its last states, and deaf to the token."""
        for name in ("layers", "taps"):
            if (given := getattr(config, name)) not in (1, None):
                what = f"{name} is {given}, but a head for multi-token prediction has one"
                raise DFlashError(what, "leave it out", name)
        target = pair.target
        args: Any = getattr(target.model, "args", None)
        if args is None:
            what = f"{target.name} does not say how its layers are built"
            raise DFlashError(what, "start from a head that fits it, with --init")
        states: Fields = {"hidden_normed": False, "feeds_normed": False}
        raw = our_config(
            text_of(asdict(args)), block_size=config.block_size or BLOCK_SIZE, **states
        )
        trainee = cls.fresh(raw, target, config.seed)
        if config.start == "target":
            take_layers(trainee, [target.num_layers - 1])
            norm = trainee.network.pre_fc_norm_hidden
            norm.weight = norm.weight * _size_of_states(target)  # those that its layer is used to
        return trainee

    @classmethod
    def read(cls, folder: Path, target: Target) -> HeadTrainee:
        found = super().read(folder, target)
        if not found.config.attends_drafts:
            what = f"{folder} holds a head that sees no drafted tokens"
            raise DFlashError(what, START_FROM)
        return found


def _size_of_states(target: Target) -> mx.array:
    """Root mean square of the last layer's states, of most tokens."""
    last = (target.num_layers - 1,)
    target.tap(last)
    _, states = target.forward(mx.arange(_TOKENS), target.new_cache(), Block(_TOKENS), last)
    assert states is not None
    sizes = mx.sqrt(states.square().mean(axis=-1))
    return mx.sort(sizes)[len(sizes) // 2]  # of some tokens they are far larger than of others
