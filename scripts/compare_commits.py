"""Two checkouts of this program decode the same prompts in turn: speed as paired ratios, parity.

    .venv/bin/python scripts/compare_commits.py OLD NEW --prompts PROMPTS.jsonl --limit 14

OLD and NEW are checkouts, each with the .venv that its scripts/test made. Every prompt is answered
by both, one right after the other, and the order turns from prompt to prompt; plain decoding by one
of them in turn comes twice, as the control. Whoever answers after the other has a slower first pass
(its threads still spin), so both do equally often. Only names of README's Python section are used,
so that most commits can be compared. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ANSWER = """
import json, sys
from dflash_mlx import DecodeConfig, Session, load, prompt_tokens
pair = load(*json.loads(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    method, messages, count = json.loads(line)
    session = Session(pair, DecodeConfig(method=method, max_tokens=count))
    tokens = []
    for delta in session.stream(prompt_tokens(pair.tokenizer, messages)):
        tokens += delta.tokens
    told = delta.statistics
    print(json.dumps([tokens, told.tokens_per_second, told.time_to_first_token]), flush=True)
"""


class Checkout:
    """A process that answers with one checkout's program."""

    def __init__(self, folder: Path, model: Sequence[str]) -> None:
        command = [str(folder / ".venv" / "bin" / "python"), "-c", ANSWER, json.dumps(model)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, text=True)
        self._read()

    def answer(self, method: str, messages: Any, tokens: int) -> tuple[list[int], float, float]:
        """Tokens, tokens per second of decoding, and seconds to the first token."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, messages, tokens]) + "\n")
        self._process.stdin.flush()
        found: tuple[list[int], float, float] = json.loads(self._read())
        return found

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args!r} ended with {self._process.wait()}")
        return line


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of the median over resamples of the prompts."""
    rows = np.array(ratios)
    draws = np.random.default_rng(0).integers(len(rows), size=(2000, len(rows)))
    low, high = np.percentile(np.median(rows[draws], axis=1), (2.5, 97.5))
    return float(low), float(high)


def main() -> None:
    """Compare, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, as for benchmarks")
    parser.add_argument("--limit", type=int, default=14, help="prompts of each category")
    parser.add_argument("--methods", default="none,auto")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--model", nargs="*", default=[], help="target, and drafter (default pair)")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    seen: dict[str, int] = {}
    prompts = []
    for row in rows:
        seen[row["category"]] = count = seen.get(row["category"], 0) + 1
        if count <= arguments.limit:
            prompts.append(row["messages"])
    sides = [Checkout(folder, arguments.model) for folder in (arguments.old, arguments.new)]
    for method in arguments.methods.split(","):
        for side in sides:  # the first passes of every size
            side.answer(method, prompts[0], arguments.max_tokens)
    ratios: dict[str, list[float]] = {}
    same = 0
    for i, messages in enumerate(prompts):
        for method in arguments.methods.split(","):
            order = [sides[i % 2], sides[1 - i % 2]]
            by_side = {side: side.answer(method, messages, arguments.max_tokens) for side in order}
            old, new = (by_side[side] for side in sides)
            same += old[0] == new[0]
            ratios.setdefault(f"new / old, {method}", []).append(new[1] / old[1])
            ratios.setdefault(f"first token, old / new, {method}", []).append(old[2] / new[2])
        again = [sides[i % 2].answer("none", messages, arguments.max_tokens)[1] for _ in range(2)]
        ratios.setdefault("control: plain, second / first", []).append(again[1] / again[0])
    print("| what | median | 95 % | worst |\n| --- | --- | --- | --- |")
    for name, found in ratios.items():
        low, high = interval(found)
        print(f"| {name} | {median(found):.3f} | {low:.3f} to {high:.3f} | {min(found):.3f} |")
    answers = len(prompts) * len(arguments.methods.split(","))
    print(f"\n{len(prompts)} prompts; {same} of {answers} answers equal")


if __name__ == "__main__":
    main()
