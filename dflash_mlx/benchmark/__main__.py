"""`python -m dflash_mlx.benchmark`: methods against plain decoding, interleaved by prompt."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dflash_mlx.benchmark.figures import summarise
from dflash_mlx.benchmark.measure import run_all, separate_rows
from dflash_mlx.benchmark.plots import draw_all
from dflash_mlx.benchmark.prompts import describe_lengths, questions, read_contexts
from dflash_mlx.benchmark.selection import expand, read_methods, settle_all
from dflash_mlx.benchmark.tables import CHANGES, format_report
from dflash_mlx.cli import options as cli
from dflash_mlx.cli.plotting import import_pyplot
from dflash_mlx.cli.prompts import read_prompts
from dflash_mlx.core.config import DecodeConfig, PairConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.method import BRANCHES
from dflash_mlx.drafters.ngram import DEFAULT_SIZE
from dflash_mlx.engine.pair import Pair
from dflash_mlx.system.files import write_report
from dflash_mlx.system.machine import describe_machine, describe_versions
from dflash_mlx.target.pass_times import PassTimes, stored_times

PROGRAM = "dflash_mlx.benchmark"


def main(argv: Sequence[str]) -> None:
    """Run the benchmark. Raises DFlashError for bad input, before any work."""
    arguments = parser().parse_args(argv)
    rows = read_prompts(arguments.prompts, arguments.limit)
    contexts = read_contexts(arguments.context)
    config = cli.read_decode_config(arguments)
    config = replace(config, sampling=config.sampling.with_seed())
    methods = read_methods(arguments.methods, config)
    sweep = arguments.sweep
    checked = methods if sweep is None else expand(sweep, methods, largest_block=2)[0]
    check_outputs(arguments.prompts, arguments.json, arguments.plots)
    pair = cli.open_pair(arguments, *checked.values())
    methods, report = settle_all(methods, pair.means), describe(arguments, pair)
    if sweep is not None:
        largest = min((model.block_size for model in pair.drafters), default=DEFAULT_SIZE)
        methods, report["sweep"] = expand(sweep, methods, largest)
    source = read_prompts(arguments.prompts, None)
    asked = questions(pair.tokenizer, rows, contexts, source, pair.template)
    report["settings"] |= {
        "prompts": len(asked),
        "prompt_tokens": describe_lengths(asked),
        "sampling": asdict(config.sampling),
        "methods": {
            name: asdict(replace(method, branches=method.branches or BRANCHES))
            for name, method in methods.items()
        },
    }
    times = merge_times(pair, methods)
    report |= summarise(run_all(pair, asked, methods), times)
    print(format_report(report), flush=True)
    if arguments.json is not None:
        write_report(arguments.json, json.dumps(report, indent=1) + "\n")
    if arguments.plots is not None:
        draw_all(report, arguments.plots)


def describe(arguments: argparse.Namespace, pair: Pair) -> dict[str, Any]:
    """What is measured on what."""
    config = cli.read_pair_config(arguments)
    return {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "pair": {
            "target": pair.target.name,
            "drafter": pair.drafter_name,
            **{name: getattr(config, name) for name in CHANGES},
            "notes": list(pair.notes),
        },
        "settings": {"prompts_file": arguments.prompts.name, "limit": arguments.limit},
    }


def merge_times(pair: Pair, methods: Mapping[str, DecodeConfig]) -> PassTimes | None:
    """Times of target passes where a method merges blocks, measured if they are not stored."""
    for config in methods.values():
        if separate_rows(config, 2) is not None:
            return pair.target.pass_times or stored_times(pair.target, config.recalibrate)
    return None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(prog=PROGRAM, description="Compare decoding methods on a set of prompts.")
    result.add_argument(
        "--prompts", type=Path, required=True, help="JSON lines with id, category and messages"
    )
    result.add_argument(
        "--methods",
        default="none,auto",
        help="comma-separated; a block size or settings may follow, as in "
        "dflash:4,ddtree:budget=16,d2sd:8:growth=paper (default: %(default)s); none is always run; "
        "resample is a control: naive draws from the first draft, as many as --branches",
    )
    result.add_argument(
        "--sweep",
        help="try values of block, branches or budget with the methods that have it, as in "
        "budget=auto,8,16; without values, the usual ones",
    )
    result.add_argument(
        "--context",
        help="pad prompts with the text of the other prompts in the file to so many tokens; "
        "several lengths, as in 128,4096, are compared in one run",
    )
    result.add_argument("--limit", type=int, help="use the first N prompts of each category")
    result.add_argument("--json", type=Path, help="write the report here")
    result.add_argument("--plots", type=Path, help="draw the report into this folder (PNG)")
    cli.add_options(result, PairConfig, DecodeConfig, SamplingConfig, without=["method"])
    return result


def check_outputs(prompts: Path, report: Path | None, pictures: Path | None) -> None:
    """Refuse what could not be written before the work starts."""
    cli.check_output(report)
    if report is not None and report.absolute() == prompts.absolute():
        raise DFlashError(f"{report} holds the prompts themselves", "name another file")
    if pictures is not None:
        cli.check_folder(pictures)
        import_pyplot()


if __name__ == "__main__":
    cli.run(main, PROGRAM)
