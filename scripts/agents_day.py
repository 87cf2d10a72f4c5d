"""What stores of earlier texts bring to a day of an agent, whose requests resemble each other.

    .venv/bin/python scripts/agents_day.py [--requests 50] [--day 0] [--kinds tools,edits] \
        [--model MODEL] [--drafter DRAFTER] [--method auto] [--max-tokens 96] [--out RUNS.jsonl]

Nobody's transcripts are used: these are made by a seed, in four kinds. `tools`: the same tools
called with other arguments. `edits`: files that are written again with a small change. `json`:
records by the same schema. `tests`: output of tests that is told again with other failures. A
request has a system prompt, up to two earlier turns as they might have been recorded, and a
question; its answer is the model's own, so small models say little that makes sense. Each request
is answered plainly, by the method with this conversation alone ("off"), and by the method with a
store of one kind that learns as it goes ("on"), in an order that turns from request to
request. Intervals are bootstrap over requests (95 %), ratios are paired. `--requests 2` with
`--max-tokens 8` tries whether all works. Let nothing else run meanwhile.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_mlx.cli import options as cli  # isort: skip  # loads the BLAS before MLX

import numpy as np

from dflash_mlx.benchmark.measure import interval, tokens_a_round
from dflash_mlx.core.config import PLAIN, DecodeConfig, PairConfig, SamplingConfig
from dflash_mlx.core.option import require
from dflash_mlx.drafters.continuations.store import Store
from dflash_mlx.engine.delta import collect
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.load import load_pair
from dflash_mlx.session.scheduler import Drafters
from dflash_mlx.session.session import Session
from dflash_mlx.session.templates import prompt_tokens

OFF, ON = "off", "on"
Turn = tuple[str, str]  # what is asked, and what is answered
NOUNS = ("order", "invoice", "customer", "cart", "payment", "address", "coupon", "parcel", "report")
VERBS = ("load", "save", "check", "merge", "price", "print", "count", "close")
PLACES = ("src", "lib", "app", "core")


def tools(draw: random.Random) -> Turn:
    """A call of one of three tools."""
    noun, verb = draw.choice(NOUNS), draw.choice(VERBS)
    file = f"{draw.choice(PLACES)}/{noun}s.py"
    name, arguments, asked = draw.choice((
        ("read_file", {"path": file, "first": draw.randrange(1, 90), "lines": 40}, f"Show {file}."),
        ("search", {"pattern": f"def {verb}_{noun}", "path": draw.choice(PLACES), "limit": 20},
         f"Where is {verb}_{noun} defined?"),
        ("run_tests", {"path": f"tests/test_{noun}s.py", "keyword": verb, "verbose": True},
         f"Run the tests of {noun}s that {verb}."),
    ))  # fmt: skip
    called = json.dumps({"name": name, "arguments": arguments})
    return asked, f"<tool_call>\n{called}\n</tool_call>"


def _source(noun: str, limit: int, word: str) -> str:
    return f'''def check_{noun}({noun}, limit={limit}):
    """Return whether the {noun} may be used."""
    if {noun} is None:
        raise ValueError("there is no {noun}")
    if {noun}.size > limit:
        logger.{word}("the %s of %d is too large", {noun}.name, {noun}.size)
        return False
    return {noun}.is_open and not {noun}.is_locked
'''


def edits(draw: random.Random) -> Turn:
    """A file with one change."""
    noun, limit = draw.choice(NOUNS), draw.randrange(10, 99)
    before, changed = _source(noun, limit, "info"), draw.randrange(2)
    wish = "log a warning instead of an info" if changed else f"set the limit to {limit + 1}"
    after = _source(noun, limit, "warning") if changed else _source(noun, limit + 1, "info")
    asked = f"Change this file: {wish}. Write all of it.\n\n```python\n{before}```"
    return asked, f"```python\n{after}```"


def records(draw: random.Random) -> Turn:
    """An object by a schema."""
    noun, number = draw.choice(NOUNS), draw.randrange(1000, 9999)
    price, state = draw.randrange(5, 500), draw.choice(("open", "paid", "sent", "returned"))
    told = {
        **{"id": f"{noun}-{number}", "kind": noun, "state": state, "items": draw.randrange(1, 9)},
        "total": {"amount": price, "currency": "EUR", "tax_included": True},
        "contact": {"email": f"{noun}{number}@shop.example", "language": "en", "newsletter": False},
    }
    asked = f"As JSON: {noun} number {number} is {state}, {told['items']} items, {price} euros."
    return asked, json.dumps(told, indent=2)


def tests(draw: random.Random) -> Turn:
    """Output of tests, and the same told in words."""
    nouns = draw.sample(NOUNS, 4)
    bad = draw.choice(nouns)
    lines = [f"tests/test_{n}s.py::test_{draw.choice(VERBS)}_{n} PASSED" for n in nouns]
    at = nouns.index(bad)
    lines[at] = lines[at].replace("PASSED", "FAILED")
    failed = lines[at].split()[0]
    output = "\n".join(
        [*lines, f"E   AssertionError: assert {bad}.total == 0", "1 failed, 3 passed"]
    )
    answer = f"{output}\n\nOne test failed: {failed}. The {bad}'s total is not 0 at its end."
    return f"Repeat this output and say what failed.\n\n{output}", answer


KINDS: dict[str, tuple[str, Callable[[random.Random], Turn]]] = {
    "tools": ("You are a coding agent. Answer with one call of read_file, search or run_tests: "
              '<tool_call>{"name": ..., "arguments": {...}}</tool_call>', tools),
    "edits": ("You are a coding agent. Write changed files as a whole.", edits),
    "json": ("You turn sentences into JSON of one schema: id, kind, state, items, total, contact.",
             records),
    "tests": ("You are a coding agent. You report the output of tests.", tests),
}  # fmt: skip


def day(kind: str, requests: int, seed: int) -> Iterator[list[dict[str, str]]]:
    """The conversations of a kind, each up to the question that is to be answered."""
    system, make = KINDS[kind]
    draw = random.Random(f"{seed} {kind}")
    for _ in range(requests):
        messages = [{"role": "system", "content": system}]
        for asked, answered in [make(draw) for _ in range(draw.randrange(3))]:
            messages += [{"role": "user", "content": asked}]
            messages += [{"role": "assistant", "content": answered}]
        yield [*messages, {"role": "user", "content": make(draw)[0]}]


@dataclass
class Cell:
    """A way to answer; what it learns of drafts is its own."""

    pair: Pair
    config: DecodeConfig
    store: Store | None = None
    drafters: Drafters = field(default_factory=dict)

    def answer(self, prompt: Sequence[int]) -> dict[str, float]:
        session = Session(self.pair, self.config, None, self.drafters, self.store)
        found = collect(session.stream(prompt)).statistics
        if self.store is not None:
            self.store.wait()  # what is said is known before the next request
        seconds, tokens = found.decode_seconds, found.generated_tokens
        return {"tokens": tokens, "rounds": found.rounds, "seconds": seconds}


def run(pair: Pair, config: DecodeConfig, kind: str, asked: Any) -> list[dict[str, Any]]:
    """The requests of a kind, each in all three ways."""
    cells = {PLAIN: Cell(pair, replace(config, method=PLAIN))}
    cells |= {name: Cell(replace(pair, learned={}), config) for name in (OFF, ON)}
    names, runs = list(cells), list[dict[str, Any]]()
    for i, messages in enumerate(day(kind, asked.requests, asked.day)):
        prompt = prompt_tokens(pair.tokenizer, messages, template=pair.template)
        if not i:  # builds what the first answer would pay for
            for each in cells.values():
                replace(each, config=replace(each.config, max_tokens=8)).answer(prompt)
            cells[ON].store = Store()
        turned = names[i % 3 :] + names[: i % 3]
        runs.append({"kind": kind, "request": i, **{n: cells[n].answer(prompt) for n in turned}})
    return runs


def print_row(kind: str, runs: Sequence[dict[str, Any]]) -> None:
    """Tokens a round off and on, and how many times as fast as off, and as plain, on is."""

    def cell(values: Any, statistic: Any) -> str:
        low, high = interval(list(values), statistic) or (float("nan"), float("nan"))
        return f"{statistic(np.array(values)):.2f} ({low:.2f} to {high:.2f})"

    def speeds(name: str) -> Any:
        return np.array([run[name]["tokens"] / run[name]["seconds"] for run in timed])

    timed = [run for run in runs if all(run[name]["rounds"] for name in (PLAIN, OFF, ON))]
    if not timed:
        print(f"| {kind} | no answer had a round |")
        return
    sums = {n: [(run[n]["tokens"], run[n]["rounds"]) for run in timed] for n in (OFF, ON)}
    columns = [cell(sums[name], tokens_a_round) for name in (OFF, ON)]
    columns += [cell(speeds(ON) / speeds(name), np.median) for name in (OFF, PLAIN)]
    print(f"| {kind} | {len(timed)} | " + " | ".join(columns) + " |", flush=True)


def main(argv: Sequence[str]) -> None:
    asked = parser().parse_args(argv)
    kinds = asked.kinds.split(",")
    require(asked.requests > 0, "requests", asked.requests, "1 or more")
    require({*kinds} <= {*KINDS}, "kinds", asked.kinds, f"some of {', '.join(KINDS)}")
    config, pair = cli.read_decode_config(asked), load_pair(cli.read_pair_config(asked))
    config = config if "max_tokens" in vars(asked) else replace(config, max_tokens=96)
    print("| kind | requests | tokens a round, off | on | times as fast as off | as plain |")
    print("| --- | --- | --- | --- | --- | --- |")
    known: list[dict[str, Any]] = []
    for kind in kinds:
        runs = run(pair, config, kind, asked)
        print_row(kind, runs)
        known += runs
        if asked.out is not None:
            text = "".join(json.dumps(each) + "\n" for each in known)
            asked.out.write_text(text, encoding="utf-8")
    print_row("all", known)


def parser() -> Any:
    result = cli.Parser(prog="agents_day.py", description="What stores bring to an agent.")
    result.add_argument("--requests", type=int, default=50, help="of each kind")
    result.add_argument("--day", type=int, default=0, help="seed of the texts")
    result.add_argument("--kinds", default=",".join(KINDS), help="some of " + ", ".join(KINDS))
    result.add_argument("--out", type=Path, help="a file for all runs, one a line")
    cli.add_options(result, PairConfig, DecodeConfig, SamplingConfig)
    return result


if __name__ == "__main__":
    cli.run(main, "agents_day.py")
