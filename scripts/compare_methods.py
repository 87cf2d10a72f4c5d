"""One table of drafting methods: acceptance on all prompts, times and speed-up on some of them.

    python scripts/compare_methods.py --prompts PROMPTS.jsonl --out FOLDER

Greedy and at temperature 1, with bootstrap intervals, for all prompts together and for each
category. For its tokens per round a method walks the target's own answers, which are collected
once (see simulate_trees.py); where a measured budget decides the trees, they are those of the timed
prompts. Every part is a file in FOLDER, and a run that was stopped goes on with what is missing.
Let nothing else run while speed is measured, which comes first; the rest does not care.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_mlx.cli import options as cli  # isort: skip  # loads the BLAS before MLX

import simulate_trees

from dflash_mlx.benchmark.__main__ import main as benchmark
from dflash_mlx.benchmark.measure import groups
from dflash_mlx.benchmark.report import FINISHED
from dflash_mlx.benchmark.selection import read_methods
from dflash_mlx.cli.prompts import read_prompts
from dflash_mlx.core.config import ALL_BUT_MODEL, PLAIN, DecodeConfig, PairConfig
from dflash_mlx.corpus import main as collect
from dflash_mlx.drafters import paper

METHODS = {
    "none": "plain decoding",
    "ngram": "prompt lookup",
    "eagle3:8": "EAGLE-3, chain",
    "eagle3:budget=16": "EAGLE-3, tree of 16",
    "dflash1:8": "DFlash, block 8 (selector off)",
    "dflash:8": "DFlash 2, block 8 (selector on)",
    "ddtree:budget=16": "DDTree, 16 nodes",
    "ddtree": "DDTree, as many as pay",
    "d2sd:growth=paper": "D2SD, published tree",
    "d2sd:budget=16": "D2SD, joint tree of 16",
    "d2sd": "D2SD, as many as pay",
    "specdiff:8:steps=1": "SpecDiff, chain, 1 step",
    "specdiff:8:steps=2": "SpecDiff, chain, 2 steps",
    "specdiff:8:steps=4": "SpecDiff, chain, 4 steps",
    "specdiff:budget=16:steps=1": "SpecDiff, tree of 16, 1 step",
    "specdiff:budget=16:steps=2": "SpecDiff, tree of 16, 2 steps",
    "specdiff:budget=16:steps=4": "SpecDiff, tree of 16, 4 steps",
}
COLUMNS = ("method", "tokens/round", "draft ms", "verify ms", "speed-up")
SEED = "1"


def main(argv: Sequence[str]) -> None:
    """Measure what is missing, and print the tables."""
    asked = parser().parse_args(argv)
    methods = asked.methods or list(METHODS)
    walked = fixed(methods)
    read_prompts(asked.prompts)
    asked.out.mkdir(exist_ok=True)
    for temperature in asked.temperatures:
        speed = timed(asked, methods, temperature)
        walks = walk(asked, walked, temperature) if walked else {}
        print(f"\n## Temperature {temperature}\n\n{table(groups(speed), walks)}", flush=True)


def fixed(methods: list[str]) -> list[str]:
    """The methods whose drafts do not depend on times, plain decoding left out."""
    paper.add_controls()
    known = read_methods(",".join(methods), DecodeConfig(), paper.KNOBS)
    return [m for m in methods if m != PLAIN and not simulate_trees.by_times(known[m])]


def timed(asked: argparse.Namespace, methods: list[str], temperature: str) -> Any:
    """The benchmark's report on the first prompts of each category."""
    file = asked.out / f"speed-{temperature}.json"
    if file.exists() and (before := json.loads(file.read_text(encoding="utf-8")))[FINISHED]:
        return before
    given = ["--prompts", str(asked.prompts), "--methods", ",".join(methods), "--json", str(file)]
    given += ["--max-tokens", str(asked.max_tokens), "--temperature", temperature]
    given += ["--limit", str(asked.timed), *(["--resume"] if file.exists() else ["--seed", SEED])]
    benchmark([*given, *asked.options])
    return json.loads(file.read_text(encoding="utf-8"))


def walk(asked: argparse.Namespace, methods: list[str], temperature: str) -> Any:
    """Figures on the answers to all prompts: by method, then by category."""
    answers, file = (asked.out / f"{name}-{temperature}" for name in ("answers", "walks"))
    answers, file = answers.with_suffix(".jsonl"), file.with_suffix(".json")
    if not file.exists():
        greedy = "1" if temperature == "0" else "0"
        given = ["--prompts", str(asked.prompts), "--out", str(answers), "--greedy-share", greedy]
        given += ["--max-tokens", str(asked.max_tokens), "--seed", SEED, "--top-p", "1"]
        given += of_the_model(asked.options)
        collect(given if greedy == "1" else [*given, "--temperature", temperature])
        given = ["--corpus", str(answers), "--methods", ",".join(methods), "--json", str(file)]
        simulate_trees.main([*given, *asked.options])
    return json.loads(file.read_text(encoding="utf-8"))


def of_the_model(options: Sequence[str]) -> list[str]:
    """The benchmark's options that decide whose answers are collected, and what helps with them."""
    others = [name for name in ALL_BUT_MODEL if name not in ("drafter", "template")]
    known = cli.Parser(add_help=False)
    cli.add_options(known, PairConfig, without=others)
    given, _ = known.parse_known_args(options)
    words = []
    for name, value in vars(given).items():
        for each in value if isinstance(value, list) else [value]:
            words += [cli.option_name(name), each]
    return words


def table(speed: dict[str, Any], walks: dict[str, Any]) -> str:
    """Markdown, by category: times of `speed`, tokens per round of `walks` where they are there."""
    lines = []
    for category, figures in speed.items():
        lines += ["", f"**{category}**", "", row(COLUMNS), row(["---"] * len(COLUMNS))]
        for name, own in figures.items():
            accepted = walks[name][category] if name in walks else own
            terms = [f"{own['round_ms'][term]:.1f}" for term in ("draft", "verify")]
            cells = [METHODS.get(name, name), _within(accepted, "mean_accepted")]
            lines.append(row([*cells, *terms, _within(own, "speedup")]))
    return "\n".join(lines)


def row(cells: Any) -> str:
    """Of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def _within(figures: dict[str, Any], name: str) -> str:
    """With its interval; "-" where no answer had a speed."""
    if not (interval := figures["intervals"][name]):
        return "-"
    low, high = interval
    return f"{figures[name]:.2f} [{low:.2f}, {high:.2f}]"


def parser() -> argparse.ArgumentParser:
    """The command line; what follows -- goes to every benchmark and every walk."""
    result = cli.Parser(prog="compare_methods.py", description=__doc__.splitlines()[0])
    result.add_argument("--prompts", type=Path, required=True, help="as for dflash_mlx.benchmark")
    result.add_argument("--out", type=Path, required=True, help="folder of the reports")
    result.add_argument("--methods", nargs="*", help="as for dflash_mlx.benchmark (default: all)")
    result.add_argument("--temperatures", nargs="*", default=["0", "1"])
    result.add_argument("--timed", type=int, default=8, help="prompts of each category")
    result.add_argument("--max-tokens", type=int, default=96)
    result.add_argument("options", nargs="*", help="of the model and its drafters")
    return result


if __name__ == "__main__":
    cli.run(main, "compare_methods.py")
