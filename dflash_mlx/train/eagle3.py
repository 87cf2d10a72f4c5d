"""EAGLE-3 in training: what a new one starts as, and which layers it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.eagle3.checkpoint import FILES, LAYERS_READ, RAW
from dflash_mlx.drafters.eagle3.model import (
    USUAL_TAPS,
    EagleConfig,
    Network,
    increase,
    usual_layers,
)
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.paired import PairedTrainee
from dflash_mlx.train.trainee import like_target, spread_aux_layers, take_layers
from dflash_mlx.verifier.model import Target


@dataclass(frozen=True)
class EagleTrainee(PairedTrainee):
    """EAGLE-3's layer and what it makes of three layers' features."""

    network: Network
    config: EagleConfig
    files: ClassVar[Any] = FILES

    @classmethod
    def new(cls, config: TrainConfig, pair: Pair) -> EagleTrainee:
        """One layer, the target's last or noise, behind the last tap, and deaf to the token."""
        if config.layers not in (1, None):
            what = f"layers is {config.layers}, but an EAGLE-3 drafter has one"
            raise DFlashError(what, "leave it out", "layers")
        target = pair.target
        raw = {
            **like_target(target, 1, config),
            "architectures": [RAW],
            "model_type": "llama",
            "eagle_config": {LAYERS_READ: list(_aux_layers(target, config))},
            "num_target_layers": target.num_layers,
        }
        trainee = cls.fresh(raw, target, config.seed)
        if config.start == "target":
            take_layers(trainee, [target.num_layers - 1], _called)
        return trainee


def _called(_: int, name: str) -> str:
    # The norm before a layer is that of the features here; that of the embeddings is its own.
    return f"midlayer.{name.replace('input_layernorm', 'hidden_norm')}"


def _aux_layers(target: Target, config: TrainConfig) -> tuple[int, ...]:
    if config.taps is None and increase(usual := usual_layers(target.num_layers)):
        return usual
    return spread_aux_layers(target, config.taps, USUAL_TAPS)
