"""`python -m dflash_mlx.train.compare`: drafters side by side on the held-out rows of corpora."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_mlx import cli
from dflash_mlx.config import PairConfig
from dflash_mlx.errors import DFlashError
from dflash_mlx.load import load_target, resolve_folder
from dflash_mlx.train.data import Texts, add_data_options, read_texts
from dflash_mlx.train.evaluate import measure
from dflash_mlx.train.start import open_drafter

PROGRAM = "dflash_mlx.train.compare"


def main(argv: Sequence[str]) -> None:
    """Print a table. Raises DFlashError for bad input."""
    arguments = parser().parse_args(argv)
    target = load_target(cli.read_pair_config(arguments).model)
    drafters = {
        name: open_drafter(resolve_folder(name, "drafter"), target.target)[:2]
        for name in arguments.drafter
    }
    configs = [config for _, config in drafters.values()]
    if len({(config.target_layer_ids, config.block_size) for config in configs}) > 1:
        raise DFlashError(
            "the drafters have different block sizes or read different layers",
            "compare them one by one",
        )
    paths = [Path(name) for name in arguments.corpus]
    place = (arguments.cache, int(arguments.cache_gb * 1e9))
    taps = configs[0].target_layer_ids
    held_out = read_texts(paths, target, taps, place, arguments.held_out).held_out
    result = {}
    for name, (network, config) in drafters.items():
        lengths = range(config.block_size - 1)
        result[name] = {
            group: [measure(network, config, target.target, texts, n) for n in lengths]
            for group, texts in groups(held_out).items()
        }
    print(table({name: result[name]["all"] for name in result}))
    if arguments.json is not None:
        figures = {
            name: {
                group: {
                    "tokens_per_round": measured[0].tokens_per_round,
                    "by_position": measured[0].by_position,
                    "continuation_by_prefix": [m.tokens_per_round - 1 for m in measured],
                }
                for group, measured in by_group.items()
            }
            for name, by_group in result.items()
        }
        arguments.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


def groups(texts: Texts) -> dict[str, Texts]:
    """All texts, and those of each category that the corpora name."""
    categories = sorted({row.category for row in texts.rows} - {""})
    places = range(len(texts.rows))
    found = {"all": texts}
    for category in categories:
        found[category] = texts.only(i for i in places if texts.rows[i].category == category)
    return found


def table(measured: dict[str, list[Any]]) -> str:
    """Markdown: mean correct continuation after a kept prefix of 0, 1, ... tokens."""
    lengths = range(len(next(iter(measured.values()))))
    lines = [
        "| drafter | tokens/round | " + " | ".join(f"prefix {n}" for n in lengths) + " |",
        "| --- | --- |" + " --- |" * len(lengths),
    ]
    for name, results in measured.items():
        cells = " | ".join(f"{result.tokens_per_round - 1:.3f}" for result in results)
        lines.append(f"| {name} | {results[0].tokens_per_round:.3f} | {cells} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(
        prog=PROGRAM,
        description="Compare drafters on the rows of corpora that training keeps out: mean number "
        "of right drafts after a kept prefix of 0, 1, ... tokens.",
    )
    result.add_argument(
        "--drafter", required=True, action="append", help="may be given several times"
    )
    result.add_argument("--held-out", type=int, default=50, help="as in training (default: 50)")
    result.add_argument("--json", type=Path, help="write all figures, by category, to this file")
    add_data_options(result)
    cli.add_options(result, PairConfig, without=["drafter"])
    return result


if __name__ == "__main__":
    cli.run(main, PROGRAM)
