"""`python -m dflash_mlx.corpus`: the target's answers to prompts, as training data for drafters."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from dflash_mlx.cli import options as cli
from dflash_mlx.cli.prompts import read_prompts
from dflash_mlx.core.config import ALL_BUT_MODEL, CorpusConfig, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.load import load_target
from dflash_mlx.train.corpus.collect import Collection, make_header
from dflash_mlx.train.corpus.self_prompt import read_openings
from dflash_mlx.train.corpus.writer import CorpusFile

PROGRAM = "dflash_mlx.corpus"


def main(argv: Sequence[str]) -> None:
    """Answer prompts until the file has all. Raises DFlashError for bad input."""
    arguments = parser().parse_args(argv)
    config = read_config(arguments)
    prompts = [] if arguments.prompts is None else read_prompts(arguments.prompts, None)
    with CorpusFile(arguments.out) as file:
        chosen = cli.read_pair_config(arguments)
        pair = replace(load_target(chosen.model), template=chosen.template_arguments)
        file.begin(make_header(pair, config))
        collection = Collection(pair, config, file)
        missing, begin = collection.ask(prompts), time.perf_counter()
        with tqdm(total=missing, unit="row", miniters=0) as bar:
            for rows in collection.run():
                rate = collection.decoder.generated / (time.perf_counter() - begin)
                looped = collection.finishes["loop"] / max(collection.finishes.total(), 1)
                bar.set_postfix_str(f"{rate:.0f} tok/s, {looped:.0%} looped", refresh=False)
                bar.update(len(rows))
    print(report(collection))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(
        prog=PROGRAM,
        description="Collect the target's own answers, as training data for drafters. A run that "
        "was stopped continues when it is started again with the same options.",
    )
    result.add_argument(
        "--prompts", type=Path, help="JSON lines with id, category, and messages or prompt"
    )
    result.add_argument("--out", type=Path, required=True, help="the corpus; rows are appended")
    result.add_argument("--openings", type=Path, help="a JSON list of openings, see --opening")
    cli.add_options(
        result, PairConfig, CorpusConfig, without=tuple(set(ALL_BUT_MODEL) - {"template"})
    )
    return result


def read_config(arguments: argparse.Namespace) -> CorpusConfig:
    """The settings; DFlashError for options that do not go together."""
    config = cli.read_options(arguments, CorpusConfig)
    if (arguments.prompts is None) == (config.self_prompt is None):
        raise DFlashError("there must be one source of prompts", "give --prompts or --self-prompt")
    if arguments.openings is not None:
        config = replace(config, opening=config.opening + read_openings(arguments.openings))
    if config.opening and config.self_prompt is None:
        raise DFlashError("openings begin the turns of --self-prompt", "leave them out, or give it")
    if config.limit is not None and config.self_prompt is not None:
        raise DFlashError("--limit counts prompts of a file", "give the number to --self-prompt")
    return config


def report(collection: Collection) -> str:
    """One line for people."""
    finishes = collection.finishes
    parts = [f"{finishes.total()} rows, {finishes['loop']} cut where they looped"]
    if collection.skipped:
        parts.append(f"{collection.skipped} prompts were longer than the context and left out")
    if collection.turns is not None and (rejected := collection.turns.rejected):
        parts.append(f"{rejected} user turns were empty, too long or not new")
    return "; ".join(parts)


if __name__ == "__main__":
    cli.run(main, PROGRAM)
