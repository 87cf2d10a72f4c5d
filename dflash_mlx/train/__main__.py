"""`python -m dflash_mlx.train`: train a drafter for a target on its own answers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from dflash_mlx.cli import options as cli
from dflash_mlx.core.config import ALL_BUT_MODEL, PairConfig
from dflash_mlx.core.option import require
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.load import load_target
from dflash_mlx.models.names import find_source
from dflash_mlx.train.config import DataConfig, TrainConfig
from dflash_mlx.train.data import read_texts
from dflash_mlx.train.dflash import DFlashTrainee
from dflash_mlx.train.paired import EagleTrainee, HeadTrainee
from dflash_mlx.train.run import Record, TrainingRun, check_out
from dflash_mlx.train.specdiff import SpecDiffTrainee
from dflash_mlx.train.trainee import Trainee
from dflash_mlx.train.trainer import Trainer

PROGRAM = "dflash_mlx.train"
TRAINEES: dict[str, type[Trainee]] = {  # by `TrainConfig.mode`
    "dflash": DFlashTrainee,
    "variable-prefix": DFlashTrainee,
    "specdiff": SpecDiffTrainee,
    "eagle3": EagleTrainee,
    "mtp": HeadTrainee,
}
# By --recipe: settings as their authors have them, for what is not given.
RECIPES = {
    "d2sd": {  # arXiv 2606.04446 and its code, which counts the anchor as a visible token
        "mode": "variable-prefix", "loss": "decay", "tau": 7.0, "soft": 0.0, "short_share": 0.0,
        "prefix_base": 0.9, "least_prefix": 1,
    },
}  # fmt: skip


def main(argv: Sequence[str]) -> None:
    """Train until the time or the steps are used up. Raises DFlashError for bad input."""
    reading = parser()
    reading.set_defaults(**RECIPES.get(reading.parse_args(argv).recipe, {}))
    arguments = reading.parse_args(argv)
    data = cli.read_options(arguments, DataConfig)
    config = cli.read_options(arguments, TrainConfig)
    check_out(arguments.out)
    pair = load_target(cli.read_pair_config(arguments).model)
    trainee = begin(config, pair)
    texts = read_texts(data, pair, trainee.aux_layers)
    train, held_out = texts.split(config.held_out)
    trainer = Trainer(trainee, train, config)
    run = TrainingRun(trainer, held_out, arguments.out, texts.name)
    print(trainer.vocabulary.describe(), file=sys.stderr)
    for event in trainer.show(run):
        if isinstance(event, Record):
            tqdm.write(event.describe(), file=sys.stderr)


def begin(config: TrainConfig, pair: Pair) -> Trainee:
    """The drafter that a run starts from; its config.json says what it is trained to be."""
    kind = TRAINEES[config.mode]
    if config.init is None:
        trainee = kind.new(config, pair)
    else:
        trainee = kind.read(find_source(config.init, "init").fetch().here, pair.target)
    trainee = trainee.prepared(config.mode, config.block_size)
    size, least = trainee.config.block_size, config.least_prefix
    fits = config.mode != "variable-prefix" or least <= size - 2
    require(fits, "least_prefix", least, f"up to {size - 2}, to draft any of blocks of {size}")
    return trainee


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(prog=PROGRAM, description="Train a drafter on its target's own answers.")
    result.add_argument(
        "--out",
        required=True,
        type=Path,
        help="folder of the drafter; a run that was stopped resumes",
    )
    result.add_argument(
        "--recipe", choices=tuple(RECIPES), help="settings of a paper, where others are not given"
    )
    cli.add_options(result, PairConfig, without=ALL_BUT_MODEL)
    cli.add_options(result, DataConfig, TrainConfig)
    return result


if __name__ == "__main__":
    cli.run(main, PROGRAM)
