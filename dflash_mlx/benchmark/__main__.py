"""`python -m dflash_mlx.benchmark`: methods against plain decoding, interleaved by prompt."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from dflash_mlx.benchmark.measure import Run, run_all, summarise
from dflash_mlx.benchmark.quick import what_pays
from dflash_mlx.benchmark.report import (
    FINISHED,
    Report,
    describe,
    finished_runs,
    format_report,
    read_report,
    save,
    settings,
)
from dflash_mlx.benchmark.selection import (
    BenchmarkPrompt,
    questions,
    read_contexts,
    read_methods,
    settle_all,
)
from dflash_mlx.cli import options as cli
from dflash_mlx.cli.prompts import first_of_each, name_of, read_prompts
from dflash_mlx.core.config import DecodeConfig, PairConfig, SamplingConfig, StructureConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters import paper
from dflash_mlx.engine.pair import Pair

PROGRAM = "dflash_mlx.benchmark"


def main(argv: Sequence[str], reader: cli.TargetReader = cli.WHOLE) -> None:
    """Run the benchmark. Raises DFlashError for bad input, before any work."""
    paper.add_controls()
    arguments = parser().parse_args(argv)
    source = read_prompts(arguments.prompts)
    rows = first_of_each(source, arguments.limit)
    contexts = read_contexts(arguments.context)
    before = read_before(arguments)
    config = read_config(arguments, before)
    methods = read_methods(arguments.methods, config, paper.KNOBS)
    check_output(arguments.prompts, arguments.json)
    pair = cli.open_pair(arguments, *methods.values(), reader=reader)
    methods = settle_all(methods, pair.capabilities)
    report = describe(pair, cli.read_pair_config(arguments))
    if reader.parts > 1:
        report["pair"]["ranks"] = reader.parts
    asked = questions(pair.tokenizer, rows, contexts, source, pair.template)
    file = Path(name_of(arguments.prompts)).name
    given = {"prompts_file": file, "limit": arguments.limit}
    report["settings"] = given | settings(asked, methods, config.sampling)
    runs = [] if before is None else finished_runs(before, report, asked, arguments.json)
    if before is not None and before[FINISHED]:
        report = before
    else:
        report = measure(pair, asked, methods, report, runs, arguments.json)
    try:
        if arguments.json is not None:
            save(arguments.json, report)
    finally:  # neither a full disk nor a reader who has left takes the other
        pays = f"\n\n{what_pays(report, pair.capabilities)}." if len(methods) > 1 else ""
        print(format_report(report) + pays, flush=True)


def measure(
    pair: Pair,
    asked: Sequence[BenchmarkPrompt],
    methods: Mapping[str, DecodeConfig],
    report: Report,
    runs: list[Run],
    file: Path | None,
) -> Report:
    """The report with figures. runs: of finished prompts; file: written after every prompt."""
    done, total = len(runs) // len(methods), len(asked) * len(methods)
    with tqdm(total=total, initial=len(runs), unit="answer") as bar:
        for some in run_all(pair, asked, methods, done):
            runs += some or []
            bar.update(some == [])
            if some and file is not None:
                save(file, report | summarise(runs), runs)
    return report | summarise(runs)


def read_before(arguments: argparse.Namespace) -> Report | None:
    """The report to go on with, None for a new one; DFlashError where there is none."""
    if not arguments.resume:
        return None
    if arguments.json is None:
        raise DFlashError("--resume has no report to continue", "name it with --json")
    return read_report(arguments.json)


def read_config(arguments: argparse.Namespace, before: Report | None) -> DecodeConfig:
    """Settings of all methods, with a seed: the earlier report's, unless one was given."""
    config = cli.read_decode_config(arguments)
    sampling = config.sampling
    if before is not None and sampling.seed is None:
        sampling = replace(sampling, seed=before["settings"]["sampling"].get("seed"))
    return replace(config, sampling=sampling.with_seed())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(prog=PROGRAM, description="Compare decoding methods on a set of prompts.")
    result.add_argument(
        "--prompts",
        type=Path,
        required=True,
        help="JSON lines with id, category and messages, a published data set as it is, or a "
        "folder of such files; - reads standard input",
    )
    result.add_argument(
        "--methods",
        default="none,auto",
        help="comma-separated; a block size or settings may follow, as in "
        "dflash:4,ddtree:budget=16,d2sd:8:growth=paper (default: %(default)s); none is always run; "
        "controls are resample, naive draws from the first draft, as many as --branches, and "
        "dflash1, a fixed block without the selector of DFlash 2",
    )
    result.add_argument(
        "--context",
        help="pad prompts with the text of the other prompts in the file to this many tokens; "
        "several lengths, as in 128,4096, are compared in one run",
    )
    result.add_argument("--limit", type=int, help="use the first N prompts of each category")
    result.add_argument(
        "--json", type=Path, help="keep the report here; after Ctrl+C it has what is finished"
    )
    result.add_argument(
        "--resume",
        action="store_true",
        help="resume the report of --json; it must have the same settings",
    )
    settings = (PairConfig, DecodeConfig, SamplingConfig, StructureConfig)
    cli.add_options(result, *settings, without=["method"])
    return result


def check_output(prompts: Path, report: Path | None) -> None:
    """Refuse what could not be written before the work starts."""
    cli.check_output(report)
    if report is not None and report.absolute() == prompts.absolute():
        raise DFlashError(f"{report} holds the prompts themselves", "name another file")


if __name__ == "__main__":
    cli.run(main, PROGRAM, mode=cli.RankMode.FOLLOW)
