"""Which drafters can be trained, and what a run starts from."""

from __future__ import annotations

from pathlib import Path

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.networks.tensors import read_json
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.names import resolve_folder
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.dflash import DFlashTrainee
from dflash_mlx.train.eagle3 import EagleTrainee
from dflash_mlx.train.specdiff import SpecDiffTrainee
from dflash_mlx.train.trainee import Trainee
from dflash_mlx.verifier.model import Target

TRAINEES: dict[str, type[Trainee]] = {  # by `TrainConfig.mode`
    "dflash": DFlashTrainee,
    "variable-prefix": DFlashTrainee,
    "specdiff": SpecDiffTrainee,
    "eagle3": EagleTrainee,
}


def begin(config: TrainConfig, pair: Pair) -> Trainee:
    """The drafter that a run starts from; its config.json says what it is trained to be."""
    kind = TRAINEES[config.mode]
    if config.init is None:
        trainee = kind.new(config, pair)
    else:
        trainee = kind.read(resolve_folder(config.init, "init"), pair.target)
    trainee = trainee.prepared(config.mode, config.block_size)
    most = trainee.config.block_size - 2
    if config.mode == "variable-prefix" and config.least_prefix > most:
        what = f"least_prefix is {config.least_prefix}, which leaves nothing to draft in blocks of "
        raise DFlashError(what + str(most + 2), f"choose up to {most}", "least_prefix")
    return trainee


def read_trainee(folder: Path, target: Target) -> Trainee:
    """An existing drafter of any family; DFlashError for one that cannot be trained here."""
    raw = read_json(folder)
    kinds = TRAINEES.values() if isinstance(raw, dict) else ()
    found = (kind for kind in kinds if kind.files.recognises(raw))
    if (kind := next(found, None)) is None:
        raise DFlashError(f"{folder} holds no drafter that can be trained", "choose another one")
    return kind.read(folder, target)
