"""`python -m dflash_mlx.benchmark`: methods against plain decoding, interleaved by prompt."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dflash_mlx import cli
from dflash_mlx.chat import prompt_tokens
from dflash_mlx.config import DecodeConfig, PairConfig, SamplingConfig
from dflash_mlx.errors import DFlashError
from dflash_mlx.load import Pair, load_pair
from dflash_mlx.machine import describe_machine, describe_versions
from dflash_mlx.observer import RoundTimer
from dflash_mlx.prompts import Row, read_prompts
from dflash_mlx.report import (
    Run,
    first_difference,
    format_table,
    import_pyplot,
    plot,
    summarise,
)
from dflash_mlx.stream import Answer, Session, collect

PROGRAM = "dflash_mlx.benchmark"

_DETAILS = ("block_size", "budget", "branches", "growth")  # that a method's name may set


def main(argv: Sequence[str]) -> None:
    """Run the benchmark. Raises DFlashError for bad input, before any work."""
    arguments = parser().parse_args(argv)
    rows = read_prompts(arguments.prompts, arguments.limit)
    config = cli.read_decode_config(arguments)
    config = replace(config, sampling=config.sampling.with_seed())
    methods = read_methods(arguments.methods, config)
    check_outputs(arguments.prompts, arguments.json, arguments.plot)
    pair = load_pair(cli.read_pair_config(arguments), *methods.values())
    report = {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "pair": {"target": pair.target.name, "drafter": pair.drafter_name},
        "settings": settings(arguments, len(rows), methods),
    }
    report |= summarise(run_all(pair, rows, methods))
    print(format_table(report), flush=True)
    if arguments.json is not None:
        write_whole(arguments.json, json.dumps(report, indent=1) + "\n")
    if arguments.plot is not None:
        plot(report, arguments.plot)


def settings(
    arguments: argparse.Namespace, prompts: int, methods: dict[str, DecodeConfig]
) -> dict[str, Any]:
    """All that decides the figures, for the report."""
    return {
        "prompts_file": arguments.prompts.name,
        "prompts": prompts,
        "limit": arguments.limit,
        "methods": {name: asdict(config) for name, config in methods.items()},
    }


def write_whole(file: Path, text: str) -> None:
    """Write `text` to `file`, all of it or nothing."""
    part = file.with_name(file.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DFlashError(f"{file} cannot be written ({error})", "name another file") from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(prog=PROGRAM, description="Compare decoding methods on a set of prompts.")
    result.add_argument(
        "--prompts", type=Path, required=True, help="JSON lines with id, category and messages"
    )
    result.add_argument(
        "--methods",
        default="none,dflash,d2sd",
        help="comma-separated; a block size or settings may follow, as in "
        "dflash:4,ddtree:budget=16,d2sd:8:growth=paper (default: %(default)s); none is always run",
    )
    result.add_argument("--limit", type=int, help="use the first N prompts of each category")
    result.add_argument("--json", type=Path, help="write the report here")
    result.add_argument("--plot", type=Path, help="draw the report here (PNG)")
    cli.add_options(result, PairConfig, DecodeConfig, SamplingConfig, without=["method"])
    return result


def read_methods(names: str, config: DecodeConfig) -> dict[str, DecodeConfig]:
    """Settings by method name; `none` first, since the others are compared with it."""
    methods = {"none": replace(config, method="none", block_size=None)}
    for name in (part.strip() for part in names.split(",")):
        method, *details = name.split(":")
        if method != "none":
            given = dict(_detail(name, detail) for detail in details)
            methods[name] = replace(config, method=method, **given)
    return methods


def _detail(name: str, detail: str) -> tuple[str, Any]:
    """A block size, or one of the settings in _DETAILS as key=value."""
    key, equals, value = detail.partition("=")
    if not equals:
        key, value = "block_size", detail
    if key not in _DETAILS:
        raise DFlashError(f"{name!r} sets {key!r}", f"choose from {', '.join(_DETAILS)}")
    if key == "growth":
        return key, value
    if not value.isdecimal():
        what = "the block size" if key == "block_size" else key
        raise DFlashError(f"{what} in {name!r} is {value!r}", "give a whole number")
    return key, int(value)


def check_outputs(prompts: Path, report: Path | None, picture: Path | None) -> None:
    """Refuse what could not be written before the work starts."""
    for file in (report, picture):
        if file is None:
            continue
        if file.is_dir() or file.absolute() == prompts.absolute():
            raise DFlashError(f"{file} is a folder or the prompts themselves", "name another file")
        if not file.parent.is_dir():
            raise DFlashError(f"there is no folder {file.parent}", "make it, or name another file")
    if picture is not None:
        import_pyplot()


def run_all(pair: Pair, rows: list[Row], methods: dict[str, DecodeConfig]) -> list[Run]:
    """Every prompt with every method in turn, after one unmeasured answer with each.

    The order of the methods turns from prompt to prompt, so that none is always the first.
    """
    prompts = [prompt_tokens(pair.tokenizer, row["messages"], None, raw=False) for row in rows]
    for config in methods.values():
        session = Session(pair, config)
        for prompt in prompts:
            session.check(prompt)
        answer(pair, prompts[0], replace(config, max_tokens=8))
    runs = []
    names = list(methods)
    for i, (row, prompt) in enumerate(zip(tqdm(rows, unit="prompt"), prompts, strict=True)):
        turned = names[i % len(names) :] + names[: i % len(names)]
        answers = {name: answer(pair, prompt, methods[name]) for name in turned}
        runs += [compare(pair, row, prompt, name, answers) for name in names]
    return runs


def answer(pair: Pair, prompt: list[int], config: DecodeConfig) -> tuple[Answer, RoundTimer]:
    """One answer and the time its rounds took."""
    timer = RoundTimer()
    return collect(Session(pair, config).stream(prompt, timer)), timer


def compare(
    pair: Pair,
    row: Row,
    prompt: list[int],
    method: str,
    answers: dict[str, tuple[Answer, RoundTimer]],
) -> Run:
    """An answer beside the plain one."""
    plain, _ = answers["none"]
    other, timer = answers[method]
    return Run(
        prompt=str(row.get("id", "")),
        category=row["category"],
        method=method,
        statistics=other.statistics,
        seconds=timer.seconds,
        plain=plain.statistics,
        difference=first_difference(pair.target, prompt, plain.tokens, other.tokens),
    )


if __name__ == "__main__":
    cli.run(main, PROGRAM)
