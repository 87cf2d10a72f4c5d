"""What adapting the default draft model brings on texts unlike those that it was trained on.

    python scripts/adapt.py --evaluation PROMPTS.jsonl --out FOLDER --minutes 5 15 45

The shifted texts are the target's own answers to questions about SQL, of which its training has
hardly any. Tokens a round are those of blocks in greedy answers that no training saw: SQL about
other things, and those to the evaluation prompts. Each number of minutes, of processor time, is a
training of its own, from the published draft model. Last comes what an answer waits that arrives
between two pieces. Answers stay in FOLDER, so that a run that was stopped goes on with the next
part.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from dflash_mlx.cli import options as cli  # isort: skip  # loads the BLAS before MLX

import numpy as np

from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.corpus import main as collect
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.load import load, load_target
from dflash_mlx.models.names import find_names, shipped_folder
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.templates import prompt_tokens
from dflash_mlx.session.worker import Begun, Job, Request, Worker
from dflash_mlx.train import trainer as training
from dflash_mlx.train.acceptance import measure
from dflash_mlx.train.adapt import Adaptation, open_trainee
from dflash_mlx.train.config import DataConfig
from dflash_mlx.train.data import Texts, read_texts
from dflash_mlx.train.rows import read_rows
from dflash_mlx.train.trainee import Trainee
from dflash_mlx.train.trainer import Trainer

LEARNED = (
    *("customers", "orders", "products", "employees", "books", "authors", "students", "courses"),
    *("flights", "hotels", "invoices", "payments", "suppliers", "patients", "doctors", "tickets"),
    *("songs", "albums", "recipes", "cities"),
)
OTHERS = ("cars", "drivers", "films", "actors", "museums", "paintings", "farms", "harvests")
TASKS = (
    "Write an SQL statement that creates a table of {}, with five columns.",
    "Write SQL statements that insert three rows into a table of {}.",
    "Write an SQL query that counts {} by year.",
    "Write an SQL query that finds the ten newest {}.",
    "Write an SQL query that joins {} with another table, and explain the join.",
    "Write an SQL statement that updates a column of {} under a condition.",
    "Write an SQL statement that deletes {} older than a year.",
    "Write an SQL query with a subquery over {}.",
)


def prompts(things: Sequence[str]) -> Iterator[str]:
    for thing in things:
        for i, task in enumerate(TASKS):
            row = {"id": f"{thing}-{i}", "category": "sql", "prompt": task.format(thing)}
            yield json.dumps(row) + "\n"


def answers(asked: argparse.Namespace, name: str, source: Path, *options: str) -> Path:
    """The target's answers to a file of prompts, collected once."""
    file = asked.out / f"{name}-answers.jsonl"
    given = ["--prompts", str(source), "--out", str(file), "--seed", "1"]
    collect([*given, "--batch-size", "32", *options])
    return file


def accepted(trainee: Trainee, texts: Texts) -> np.ndarray:
    """[texts] tokens a round, the mean over 16 blocks that are evenly spread."""
    hits = measure(trainee, texts).sum(axis=-1)
    return 1 + hits.reshape(len(texts), -1).mean(axis=1)


def told(before: np.ndarray, after: np.ndarray) -> str:
    """Means, and an interval of their quotient by bootstrap over texts, paired."""
    drawn = np.random.default_rng(0).integers(len(before), size=(2000, len(before)))
    low, high = np.percentile(after[drawn].mean(axis=1) / before[drawn].mean(axis=1), [2.5, 97.5])
    ratio = after.mean() / before.mean()
    return f"{before.mean():.3f} -> {after.mean():.3f}, {ratio:.3f} [{low:.3f}, {high:.3f}]"


def adapt(asked: argparse.Namespace, pair: Pair, folder: Path, minutes: float) -> Trainee:
    """What one adaptation trains, kept or not; prints what its pieces took."""
    adaptation = Adaptation(pair, folder, read_rows(asked.out / "sql-answers.jsonl"), minutes)
    adaptation.file = asked.out / f"{minutes:g}.safetensors"
    adaptation.file.unlink(missing_ok=True)
    spent, trainers, doing = defaultdict(list), [], "opening"
    losses = Trainer.losses
    Trainer.losses = lambda self: trainers.append(self) or losses(self)  # type: ignore
    training.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore
    while doing:
        begun = time.perf_counter(), time.process_time()
        doing = adaptation.step()
        ended = time.perf_counter(), time.process_time()
        spent[doing.partition(",")[0] or "last"].append(np.subtract(ended, begun))
    Trainer.losses, training.time = losses, time
    steps, became = trainers[0].step, "kept" if adaptation.kept else "dropped"
    print(f"\n{minutes:g} minutes, {steps} steps: {adaptation.told}, {became}")
    print("pieces, their number, seconds, processor seconds; ms of one: median, 99 %, most")
    for name, some in spent.items():
        wall, busy = np.sum(some, axis=0)
        each = (f"{1e3 * value:.0f}" for value in np.percentile(some, [50, 99, 100], axis=0)[:, 1])
        print(f"  {name}: {len(some)}, {wall:.0f}, {busy:.0f}; processor {', '.join(each)}")
    return trainers[0].trainee


class Arrivals:
    """A worker that answers one prompt, and adapts while nobody asks."""

    def __init__(self, pair: Pair, adaptation: Adaptation) -> None:
        self._news: SimpleQueue[tuple[Any, object]] = SimpleQueue()
        self._worker = Worker(lambda some: [self._news.put(each) for each in some])
        self._worker.serve(lambda: Scheduler(pair)).result()
        self._adaptation, self._draw = adaptation, random.Random(0)
        text = "Write an SQL query that lists all planets by size."
        self._prompt = tuple(prompt_tokens(pair.tokenizer, text))

    def close(self) -> None:
        self._worker.close(10.0)

    def seconds(self, adapts: bool, typing: bool) -> Any:
        """Of time and of processor time, to the first token of an answer.

        adapts: until it arrives. typing: or until shortly before.
        """
        job = self._worker.run(self._idle, idle=True) if adapts else None
        time.sleep(self._draw.uniform(0.3, 0.6))
        if job and typing:
            self._worker.withdraw(job)
            time.sleep(0.2)
        found = self._answer()
        if job:
            self._worker.withdraw(job)
        return found

    def _idle(self, _: Job) -> Iterator[object]:
        while self._adaptation.step():
            yield None

    def _answer(self) -> Any:
        begun, first = np.array([time.perf_counter(), time.process_time()]), None
        request = Request(self._prompt, DecodeConfig(max_tokens=8))
        self._worker.submit(request)
        while True:
            of, said = self._news.get()
            if of is request and not isinstance(said, Begun):
                now = np.array([time.perf_counter(), time.process_time()])
                first = now - begun if first is None else first
                if getattr(said, "finish_reason", "") is not None:
                    return first


def waits(asked: argparse.Namespace, pair: Pair, folder: Path) -> None:
    """Seconds to the first token of answers that arrive alone, within pieces, and after typing."""
    adaptation = Adaptation(pair, folder, read_rows(asked.out / "sql-answers.jsonl"), 60)
    adaptation.file = asked.out / "never.safetensors"
    if asked.trained:  # past reading, so that answers arrive while it trains
        while not adaptation.step().startswith("training"):
            pass
    arrivals, found = Arrivals(pair, adaptation), defaultdict(list)
    kinds = {"alone": (False, False), "within a piece": (True, False), "after typing": (True, True)}
    arrivals.seconds(False, False)
    for _ in range(asked.arrivals):
        for kind, how in kinds.items():
            found[kind].append(arrivals.seconds(*how))
    arrivals.close()
    for kind, some in found.items():
        wall, busy = 1e3 * np.median(some, axis=0)
        print(f"first token, {kind}: {wall:.0f} ms (median), {busy:.0f} of processor time")


def main(argv: Sequence[str]) -> None:
    """Collect, adapt, measure, print."""
    asked = parser().parse_args(argv)
    asked.out.mkdir(parents=True, exist_ok=True)
    for name, things in (("sql", LEARNED), ("others", OTHERS)):
        (asked.out / f"{name}.jsonl").write_text("".join(prompts(things)))
    (asked.out / "usual.jsonl").write_text(asked.evaluation.read_text())
    length = "--max-tokens", str(asked.max_tokens)
    answers(asked, "sql", asked.out / "sql.jsonl", *length, "--limit", str(asked.limit))
    greedy = *length, "--greedy-share", "1", "--limit", str(asked.others)
    files = {n: answers(asked, n, asked.out / f"{n}.jsonl", *greedy) for n in ("others", "usual")}
    pair, name = load_target(), find_names(PairConfig()).drafter
    folder = shipped_folder(name or "")
    assert folder is not None
    published = open_trainee(folder, pair)
    layers, cache = published.aux_layers, asked.out / "features"
    texts = {n: read_texts(DataConfig((f,), cache), pair, layers) for n, f in files.items()}
    before = {n: accepted(published, each) for n, each in texts.items() if asked.minutes}
    for minutes in asked.minutes:
        trainee = adapt(asked, pair, folder, minutes)
        for n, each in texts.items():
            print(f"  tokens a round, {n}: {told(before[n], accepted(trainee, each))}", flush=True)
    if asked.arrivals:
        waits(asked, load(), folder)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(prog="adapt.py", description=__doc__.splitlines()[0])
    result.add_argument("--evaluation", type=Path, required=True, help="prompts, as for a corpus")
    result.add_argument("--limit", type=int, default=160, help="answers to learn from")
    result.add_argument("--others", type=int, default=120, help="answers to measure with, a kind")
    result.add_argument("--max-tokens", type=int, default=160, help="of an answer")
    result.add_argument("--out", type=Path, required=True, help="folder of answers and deltas")
    result.add_argument("--minutes", type=float, nargs="*", default=[5, 15, 45])
    result.add_argument(
        "--arrivals", type=int, default=20, help="answers that arrive, of each kind"
    )
    result.add_argument("--trained", action="store_true", help="they arrive while it trains")
    return result


if __name__ == "__main__":
    cli.run(main, "adapt.py")
