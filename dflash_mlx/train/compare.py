"""`python -m dflash_mlx.train.compare`: drafters side by side, without decoding anything."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_mlx.cli import options as cli
from dflash_mlx.core.config import ALL_BUT_MODEL, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.load import load_target
from dflash_mlx.models.names import resolve_folder
from dflash_mlx.system.files import write_report
from dflash_mlx.train.data import Texts, add_data_options, feature_place, read_texts
from dflash_mlx.train.evaluate import measure, walk
from dflash_mlx.train.trainee import Trainee

PROGRAM = "dflash_mlx.train.compare"


def main(argv: Sequence[str]) -> None:
    """Print a table. Raises DFlashError for bad input."""
    arguments = parser().parse_args(argv)
    cli.check_output(arguments.json)
    place = feature_place(arguments)
    pair = load_target(cli.read_pair_config(arguments).model)
    drafters = {
        name: Trainee.read(resolve_folder(name, "drafter"), pair.target)
        for name in arguments.drafter
    }
    taps = {drafter.config.target_layer_ids for drafter in drafters.values()}
    if len(taps) > 1:
        raise DFlashError("the drafters read different layers", "compare them one by one")
    texts = read_texts(arguments.corpus, pair, taps.pop(), place)
    if not arguments.all_rows:
        _, texts = texts.split(arguments.held_out)
    if not len(texts.greedy()):
        raise DFlashError("the rows are all sampled", "compare with greedy answers")
    figures = {name: by_category(drafter, texts.greedy()) for name, drafter in drafters.items()}
    print(table(figures))
    if arguments.json is not None:
        write_report(arguments.json, json.dumps(figures, indent=1) + "\n")


def by_category(drafter: Trainee, texts: Texts) -> dict[str, Any]:
    """The figures of all texts, and of each category that the corpora name."""
    rounds = walk(drafter, texts)
    prefixes = range(drafter.config.block_size - 1)
    continuations = [measure(drafter, texts, n) for n in prefixes]
    groups = {"all": list(range(len(texts)))}
    for i, text in enumerate(texts.texts):
        if text.row.category:
            groups.setdefault(text.row.category, []).append(i)
    result = {}
    for category, chosen in groups.items():
        walked = rounds.of(chosen)
        result[category] = {
            "texts": len(chosen),
            "rounds": len(walked.hits),
            "tokens_per_round": walked.tokens_per_round,
            "by_position": walked.by_position,
            "by_prefix": [measured.of(chosen).tokens_per_round - 1 for measured in continuations],
        }
    return result


def table(figures: dict[str, Any]) -> str:
    """Markdown: a row per drafter and category."""
    width = max(len(part["all"]["by_prefix"]) for part in figures.values())
    head = ["drafter", "texts", "tokens/round", *(f"prefix {n}" for n in range(width))]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name, parts in figures.items():
        for category, part in parts.items():
            cells = [f"{name} ({category})", str(part["texts"]), f"{part['tokens_per_round']:.3f}"]
            cells += [f"{length:.2f}" for length in part["by_prefix"]]
            cells += [""] * (len(head) - len(cells))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(
        prog=PROGRAM,
        description="Compare drafters on greedy texts of the target: tokens per round of "
        "decoding, and the mean number of right drafts after a kept prefix of 0, 1, ... tokens.",
    )
    result.add_argument(
        "--drafter", required=True, action="append", help="may be given several times"
    )
    rows = result.add_mutually_exclusive_group()
    rows.add_argument("--held-out", type=int, default=50, help="as in training (default: 50)")
    rows.add_argument("--all-rows", action="store_true", help="use every row of the corpora")
    result.add_argument("--json", type=Path, help="write all figures to this file")
    add_data_options(result)
    cli.add_options(result, PairConfig, without=ALL_BUT_MODEL)
    return result


if __name__ == "__main__":
    cli.run(main, PROGRAM)
