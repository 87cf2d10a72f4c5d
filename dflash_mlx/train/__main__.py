"""`python -m dflash_mlx.train`: train a drafter for a target on its own answers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dflash_mlx.cli import options as cli
from dflash_mlx.cli.plotting import import_pyplot
from dflash_mlx.core.config import ALL_BUT_MODEL, PairConfig, TrainConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import parse_config
from dflash_mlx.drafters.dflash.network import Network, NetworkConfig
from dflash_mlx.models.load import Pair, load_target
from dflash_mlx.models.names import resolve_folder
from dflash_mlx.train.data import add_data_options, feature_place, read_texts
from dflash_mlx.train.evaluate import shares
from dflash_mlx.train.run import HISTORY, Record, Run
from dflash_mlx.train.start import (
    fresh_network,
    mask_token,
    new_config,
    open_drafter,
    warm_start,
    without_selector,
)
from dflash_mlx.train.state import has_state, restore_state
from dflash_mlx.train.trainer import Trainer

PROGRAM = "dflash_mlx.train"


def main(argv: Sequence[str]) -> None:
    """Train until the time or the steps are used up. Raises DFlashError for bad input."""
    arguments = parser().parse_args(argv)
    cli.check_output(arguments.plot)
    place = feature_place(arguments)
    if arguments.plot is not None:
        import_pyplot()
    config = cli.read_options(arguments, TrainConfig)
    check_out(arguments.out)
    pair = load_target(cli.read_pair_config(arguments).model)
    network, network_config, raw = drafter(config, pair)
    texts = read_texts(arguments.corpus, pair, network_config.target_layer_ids, place)
    train, held_out = texts.split(config.held_out)
    trainer = Trainer(network, network_config, pair.target, train, config)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / HISTORY).touch()
    if has_state(arguments.out):
        restore_state(arguments.out, trainer, texts.name)
    print(trainer.vocabulary.describe(train), file=sys.stderr)
    run = Run(trainer, pair.target, held_out, arguments.out, raw, texts.name)
    show(run, arguments.plot)


def drafter(config: TrainConfig, pair: Pair) -> tuple[Network, NetworkConfig, dict[str, Any]]:
    """The network that training starts from, its configuration, and its config.json."""
    if config.init is not None:
        found = open_drafter(resolve_folder(config.init, "init"), pair.target)
        network, network_config, raw = without_selector(*found)
    else:
        raw = new_config(pair.target, config, mask_token(pair.tokenizer))
        network_config = parse_config(raw, "the new drafter")
        network = fresh_network(network_config, config.seed)
        if config.start == "target":
            warm_start(network, pair.target)
    raw["dflash_config"].pop("training_mode", None)
    if config.mode == "variable-prefix":
        raw["dflash_config"]["training_mode"] = "vp_drafter"
    return network, network_config, raw


def check_out(folder: Path) -> None:
    """Raise DFlashError unless `folder` is new, empty, or holds a run to continue."""
    if not folder.exists() or has_state(folder):
        return
    history = folder / HISTORY  # made first; empty until the first state is complete
    stopped_early = history.exists() and not history.read_text(encoding="utf-8")
    if not folder.is_dir() or (any(folder.iterdir()) and not stopped_early):
        raise DFlashError(
            f"{folder} exists and holds no run to continue", "choose another folder with --out"
        )


def show(run: Run, plot: Path | None) -> None:
    """Work through the run with a progress bar and a line per measurement."""
    with tqdm(total=100, unit="%", bar_format="{l_bar}{bar}| {elapsed} {postfix}") as bar:
        for event in run:
            bar.n = round(100 * run.trainer.progress, 1)
            if isinstance(event, Record):
                tqdm.write(describe(event), file=sys.stderr)
                if plot is not None:
                    from dflash_mlx.train.plot import plot_history

                    plot_history(run.history, plot)
            else:
                bar.set_postfix_str(f"step {run.trainer.step} loss {event:.3f}")
            bar.refresh()


def describe(record: Record) -> str:
    """One line for people."""
    parts = [
        f"step {record.step}",
        f"{record.minutes:.1f} min",
        f"{record.tokens_per_round:.3f} tokens/round",
        f"by position {shares(record.by_position)}",
    ]
    if len(record.by_prefix) > 1:
        prefixes = " ".join(f"{length:.2f}" for length in record.by_prefix)
        parts.append(f"continuation by prefix {prefixes}")
    if record.loss is not None:
        parts += [f"loss {record.loss:.3f}", f"{record.tokens_per_second:.0f} block tokens/s"]
    return " | ".join(parts)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(prog=PROGRAM, description="Train a drafter on its target's own answers.")
    add_data_options(result)
    result.add_argument(
        "--out",
        required=True,
        type=Path,
        help="folder of the drafter; a run that was stopped goes on",
    )
    result.add_argument(
        "--plot", type=Path, help="a PNG of loss and acceptance, redrawn at every measurement"
    )
    cli.add_options(result, PairConfig, TrainConfig, without=ALL_BUT_MODEL)
    return result


if __name__ == "__main__":
    cli.run(main, PROGRAM)
