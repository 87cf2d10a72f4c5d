"""One table of drafting methods: acceptance on all prompts, times and speed-up on some of them.

    python scripts/compare_methods.py --prompts PROMPTS.jsonl --out FOLDER

Greedy and at temperature 1, with bootstrap intervals, for all prompts together and for each
category. Every part is a report of `dflash_mlx.benchmark` in FOLDER; a run that was stopped goes on
with what is missing. Let nothing else run while speed is measured; acceptance does not care.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dflash_mlx.benchmark.__main__ import main as benchmark
from dflash_mlx.benchmark.figures import groups

METHODS = {
    "none": "plain decoding",
    "ngram": "n-gram lookup",
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


def main() -> None:
    """Measure what is missing, and print the tables."""
    asked = parser().parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    methods = ",".join(asked.methods or METHODS)
    for temperature in asked.temperatures:
        found = {}
        for part, limit in (("speed", asked.timed), ("acceptance", None)):
            file = asked.out / f"{part}-{temperature}.json"
            given = ["--prompts", str(asked.prompts), "--methods", methods, "--json", str(file)]
            given += ["--max-tokens", str(asked.max_tokens), "--temperature", temperature]
            given += ["--limit", str(limit)] if limit else []
            benchmark(
                [*given, *(["--resume"] if file.exists() else ["--seed", "1"]), *asked.options]
            )
            found[part] = groups(json.loads(file.read_text(encoding="utf-8")))
        print(f"\n## Temperature {temperature}\n\n{table(**found)}")


def table(speed: dict[str, Any], acceptance: dict[str, Any]) -> str:
    """Markdown: tokens per round of `acceptance`, times of `speed`, by category."""
    lines = []
    for category, figures in acceptance.items():
        lines += ["", f"**{category}**", "", row(COLUMNS), row(["---"] * len(COLUMNS))]
        for name, accepted in figures.items():
            timed = speed[category][name]
            terms = [f"{timed['round_ms'][term]:.1f}" for term in ("draft", "verify")]
            cells = [METHODS.get(name, name), _within(accepted, "mean_accepted")]
            lines.append(row([*cells, *terms, _within(timed, "speedup")]))
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
    """The command line; what follows -- goes to every benchmark."""
    result = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    result.add_argument("--prompts", type=Path, required=True, help="as for dflash_mlx.benchmark")
    result.add_argument("--out", type=Path, required=True, help="folder of the reports")
    result.add_argument("--methods", nargs="*", help="as for dflash_mlx.benchmark (default: all)")
    result.add_argument("--temperatures", nargs="*", default=["0", "1"])
    result.add_argument("--timed", type=int, default=8, help="prompts of each category")
    result.add_argument("--max-tokens", type=int, default=96)
    result.add_argument("options", nargs="*", help="further options of dflash_mlx.benchmark")
    return result


if __name__ == "__main__":
    main()
