"""Speed and tokens per round with stores of 0, 100, 1,000 and 3,000 earlier answers.

    .venv/bin/python scripts/said_before.py --prompts PROMPTS.jsonl --corpus ANSWERS.jsonl.gz \
        --out FOLDER [--methods ngram,auto] [--answers 0,100,1000,3000] [--max-tokens 128]

ANSWERS.jsonl(.gz) is made by `dflash_mlx.corpus` with the same target: other questions than those
of PROMPTS.jsonl, which are left out of the stores if they are there. Every prompt is answered by
plain decoding and by each method with each store in turn, and the order turns from prompt to
prompt; stores do not learn here. `ngram` is what `auto` is without a draft model. Each prompt is a
line in FOLDER/runs.jsonl, and a run that was stopped goes on with what is missing. Intervals are
bootstrap over prompts (95 %); ratios are paired. Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_mlx.cli import options as cli  # isort: skip  # loads the BLAS before MLX

import numpy as np

from dflash_mlx.benchmark.measure import interval, tokens_a_round
from dflash_mlx.benchmark.selection import questions
from dflash_mlx.cli.prompts import read_prompts
from dflash_mlx.core.config import PLAIN, DecodeConfig, PairConfig, SamplingConfig
from dflash_mlx.drafters.continuations.store import Store
from dflash_mlx.engine.delta import collect
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.load import load_pair
from dflash_mlx.session.scheduler import Drafters
from dflash_mlx.session.session import Session
from dflash_mlx.system.files import locked

_DAY = 1.7e9  # Unix seconds at which the stores' answers were said: any


class Frozen(Store):
    """Learns nothing while it is measured."""

    def add(self, tokens: Sequence[int], said: float = 0.0) -> None:
        pass


@dataclass
class Cell:
    """A method with a store; what it learns of drafts is its own."""

    pair: Pair
    config: DecodeConfig
    store: Frozen | None
    drafters: Drafters = field(default_factory=dict)

    def answer(self, prompt: Sequence[int]) -> dict[str, float]:
        session = Session(self.pair, self.config, None, self.drafters, self.store)
        found = collect(session.stream(prompt)).statistics
        return {
            "tokens": found.generated_tokens,
            "rounds": found.rounds,
            "seconds": found.decode_seconds,
        }


def read_corpus(file: Path) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompts and answers."""
    opened: Any = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if "p" in row:
                yield tuple(row["p"]), tuple(row["o"])


def stores(corpus: Path, sizes: Sequence[int], asked: set[tuple[int, ...]]) -> dict[int, Any]:
    """A store with each number of answers, in an order that has no system."""
    rows = [row for row in read_corpus(corpus) if row[0] not in asked]
    order = np.random.default_rng(0).permutation(len(rows))
    found: dict[int, Any] = {0: None}
    for size in sizes:
        if size:
            found[size] = Frozen()
            for i in order[:size]:
                prompt, answer = rows[i]
                Store.add(found[size], [*prompt, *answer], _DAY + float(i))
            found[size].wait()
    return found


def run(cells: dict[str, Cell], rows: Sequence[Any], file: Path) -> None:
    """Answer what is missing in `file`."""
    done = {each["id"] for each in read_runs(file)}
    names = list(cells)
    for name in names:  # builds what the first answer would pay for
        warm = replace(cells[name], config=replace(cells[name].config, max_tokens=8))
        warm.answer(rows[0].tokens)
    for i, row in enumerate(rows):
        if row.id in done:
            continue
        shift = i % len(names)
        found = {n: cells[n].answer(row.tokens) for n in names[shift:] + names[:shift]}
        with open(file, "a", encoding="utf-8") as output:
            output.write(json.dumps({"id": row.id, "category": row.category, **found}) + "\n")
        print(f"{i + 1} of {len(rows)}", flush=True)


def read_runs(file: Path) -> list[dict[str, Any]]:
    """What was answered; a line that a kill cut off is none."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


def print_table(runs: Sequence[dict[str, Any]], cells: Sequence[str]) -> None:
    """Tokens a round, times plain (median, mean), and times the empty store (median), by cell."""

    def speeds(name: str) -> Any:
        return np.array([run[name]["tokens"] / run[name]["seconds"] for run in timed])

    def cell(values: Any, statistic: Any) -> str:
        low, high = interval(list(values), statistic) or (0, 0)
        return f"{statistic(np.array(values)):.2f} ({low:.2f} to {high:.2f})"

    timed = [run for run in runs if all(run[name]["rounds"] for name in (PLAIN, *cells))]
    plain = speeds(PLAIN)
    print(f"\n{len(timed)} prompts")
    print(
        "| method, answers | tokens a round | times plain, median | mean | times without, median |"
    )
    print("| --- | --- | --- | --- | --- |")
    for name in cells:
        sums = [(run[name]["tokens"], run[name]["rounds"]) for run in timed]
        rates, without = speeds(name), speeds(name.split(",")[0] + ", 0")
        columns = [
            cell(sums, tokens_a_round),
            cell(rates / plain, np.median),
            cell(rates / plain, np.mean),
            cell(rates / without, np.median),
        ]
        print(f"| {name} | " + " | ".join(columns) + " |")


def main(argv: Sequence[str]) -> None:
    asked = parser().parse_args(argv)
    sizes = [0, *(int(size) for size in asked.answers.split(",") if int(size))]
    config, file = cli.read_decode_config(asked), asked.out / "runs.jsonl"
    pair = load_pair(cli.read_pair_config(asked))
    rows = questions(pair.tokenizer, read_prompts(asked.prompts), (), (), pair.template)
    rows = rows[:: asked.every]
    found = stores(asked.corpus, sizes, {tuple(row.tokens) for row in rows})
    print({size: f"{store.nbytes / 1e6:.1f} MB" for size, store in found.items() if store})
    cells = {PLAIN: Cell(pair, replace(config, method=PLAIN), None)}
    for method in asked.methods.split(","):
        for size in sizes:
            own = replace(pair, learned={})
            cells[f"{method}, {size}"] = Cell(own, replace(config, method=method), found[size])
    asked.out.mkdir(parents=True, exist_ok=True)
    with locked(asked.out, wait=False):
        run(cells, rows, file)
    print_table(read_runs(file), [name for name in cells if name != PLAIN])


def parser() -> argparse.ArgumentParser:
    result = cli.Parser(prog="said_before.py", description="What earlier answers bring.")
    result.add_argument("--prompts", type=Path, required=True, help="as of the benchmark")
    result.add_argument("--corpus", type=Path, required=True, help="earlier answers")
    result.add_argument("--out", type=Path, required=True, help="a folder for the runs")
    result.add_argument("--methods", default="ngram,auto", help="of the benchmark, without options")
    result.add_argument("--answers", default="0,100,1000,3000", help="in the stores")
    result.add_argument("--every", type=int, default=1, help="use only every N-th prompt")
    cli.add_options(result, PairConfig, DecodeConfig, SamplingConfig, without=["method"])
    return result


if __name__ == "__main__":
    cli.run(main, "said_before.py")
