"""Tokens per round of any methods on known answers, without decoding them.

    .venv/bin/python scripts/simulate_trees.py --corpus ANSWERS.jsonl \
        --methods dflash:8,d2sd:growth=paper,d2sd:budget=16,ddtree:budget=16

ANSWERS.jsonl is made by `dflash_mlx.corpus`, with `--greedy-share 1`, or with 0 and a temperature.
An answer decides which drafts are right, so the target reads every answer once, all methods walk it
together, and a draft that several of them ask for is made once. Counts are those of decoding,
near-ties of the target apart: drafts are kept as far as they match what the target chose or drew
(`--acceptance match`), and what it draws does not depend on them.
Methods are written as in `dflash_mlx.benchmark`; times are not simulated, so an automatic budget
has no place here.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from dflash_mlx.cli import options as cli  # isort: skip  # loads the BLAS before MLX

import mlx.core as mx
from tqdm import tqdm

from dflash_mlx.benchmark.selection import PLAIN, read_methods
from dflash_mlx.core.accept import Accepted, Choose, accept
from dflash_mlx.core.config import DecodeConfig, PairConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.block_model import Ask, BlockModel
from dflash_mlx.drafters.dflash.context import DualContext, FeatureContext
from dflash_mlx.drafters.growth.grow import Choices
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.none import NoContext
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import Context
from dflash_mlx.engine.step import NO_LIMIT
from dflash_mlx.models.load import load_pair
from dflash_mlx.system.files import write_report
from dflash_mlx.target.block import Block
from dflash_mlx.train.corpus.rows import CorpusRow, read_rows
from dflash_mlx.train.features import vocabulary_size

_CHOICES = BlockModel.choices
NEEDS_TREES = DecodeConfig(method="d2sd", budget=2)


class Memory:
    """Answers the questions of drafters that were asked before at the same place in a text."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def forget(self) -> None:
        """The text goes on."""
        self._known.clear()

    def choices(self, model: BlockModel, asks: Sequence[Ask], width: int) -> list[list[Choices]]:
        """As `BlockModel.choices`; models over one network are one, and a place has one anchor."""
        return [self._recall(model, ask, width) for ask in asks]

    def _recall(self, model: BlockModel, ask: Ask, width: int) -> list[Choices]:
        key = (id(model._network), id(ask.context), ask.rows, repr(ask.prefixes), width)
        if key not in self._known:
            (self._known[key],) = _CHOICES(model, [ask], width)
        return self._known[key]  # type: ignore[no-any-return]


@contextmanager
def remembering() -> Iterator[Memory]:
    """Every draft is computed once."""
    memory = Memory()
    with mock.patch.object(BlockModel, "choices", lambda *asked: memory.choices(*asked)):
        yield memory


@dataclass(eq=False)
class Place:
    """What a drafter reads of a state: the tokens so far, the anchor last, and its context.

    text: the whole of it. position: of the anchor. last: what the last round accepted.
    """

    text: list[int]
    context: Context
    position: int
    last: Accepted | None = None
    paused: float = 0.0
    delayed: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.text[: self.position + 1]

    @property
    def anchor(self) -> mx.array:
        return mx.array(self.text[self.position : self.position + 1])

    @property
    def room(self) -> int:
        return len(self.text) - 1 - self.position

    def move(self, accepted: Accepted) -> None:
        self.last = accepted
        self.position += len(accepted.path)


@dataclass
class Count:
    """Rounds of one method, by category; tokens and tree nodes in them."""

    rounds: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    tokens: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    rows: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, category: str, tokens: int, rows: int) -> None:
        for name in (category, "all"):
            self.rounds[name] += 1
            self.tokens[name] += tokens
            self.rows[name] += rows

    def figures(self) -> dict[str, dict[str, float]]:
        return {
            name: {
                "rounds": self.rounds[name],
                "tokens_per_round": self.tokens[name] / self.rounds[name],
                "rows_per_round": self.rows[name] / self.rounds[name],
            }
            for name in self.rounds
        }


def simulate(
    pair: Pair, drafters: dict[str, Drafter], rows: Sequence[CorpusRow], memory: Memory
) -> dict[str, Count]:
    """Walk every answer with every drafter."""
    dual = make_drafter(pair, NEEDS_TREES)
    counts = {name: Count() for name in drafters}
    for row in tqdm(rows, unit="answer"):
        features = read(pair, row, dual.taps)
        context = dual.new_context()
        assert isinstance(context, DualContext)
        text = [*row.prompt, *row.answer]
        places: dict[str, Any] = {
            name: Place(text, context_of(drafter, context), len(row.prompt))
            for name, drafter in drafters.items()
        }
        done = 0
        for anchor in range(len(row.prompt), len(text) - 1):
            here = [name for name, place in places.items() if place.position == anchor]
            if not here:
                continue
            context.append(mx.array(text[done:anchor]), features[done:anchor])
            done = anchor
            memory.forget()
            for name in here:
                tree = drafters[name].propose([places[name]], NO_LIMIT)[0].tree
                accepted = accept(tree, continuing(text, anchor))
                counts[name].add(row.category, len(accepted.path), len(tree))
                places[name].move(accepted)
    return counts


def continuing(text: list[int], anchor: int) -> Choose:
    """The target's choices where it wrote `text`."""
    return lambda path: text[anchor + len(path)]


def context_of(drafter: Drafter, dual: DualContext) -> Context:
    """The part of the shared context that `drafter` reads."""
    made = drafter.new_context()
    if isinstance(made, FeatureContext):
        return dual.contexts[0]
    return made if isinstance(made, NoContext) else replace_contexts(made, dual)


def replace_contexts(made: Context, dual: DualContext) -> Context:
    """A lone drafter that continues its own drafts has one context, two drafters have two."""
    assert isinstance(made, DualContext)
    made.contexts = dual.contexts[: len(made.contexts)]
    return made


def read(pair: Pair, row: CorpusRow, taps: tuple[int, ...]) -> mx.array:
    """The target's features [T, m*d] of a prompt and its answer."""
    cache, parts = pair.target.new_cache(), []
    text = mx.array([*row.prompt, *row.answer])
    for start in range(0, text.size, 512):
        piece = text[start : start + 512]
        _, features = pair.target.forward(piece, cache, Block(piece.size), taps)
        assert features is not None
        mx.eval(features, cache.arrays)
        parts.append(features)
        cache.commit(range(piece.size))
    return mx.concatenate(parts)


def read_answers(file: Path, vocab_size: int) -> list[CorpusRow]:
    """The rows of a corpus; DFlashError where they were not all chosen or drawn alike."""
    rows = read_rows(file, vocab_size)
    heats = sorted({(row.temperature, row.top_p) for row in rows})
    if len(heats) > 1:
        found = ", ".join(f"{heat:g} ({top_p:g})" for heat, top_p in heats)
        what = f"{file} has answers at several temperatures (and top-p): {found}"
        raise DFlashError(what, "make it with --greedy-share 1, or with 0")
    return rows


def main(argv: Sequence[str]) -> None:
    arguments = parser().parse_args(argv)
    cli.check_output(arguments.json)
    methods = simulated(arguments.methods, cli.read_decode_config(arguments))
    if arguments.every < 1:
        raise DFlashError(f"--every is {arguments.every}", "choose 1 or more")
    pair = load_pair(cli.read_pair_config(arguments), NEEDS_TREES)
    rows = read_answers(arguments.corpus, vocabulary_size(pair.target))[:: arguments.every]
    with remembering() as memory:
        counts = simulate(pair, dict(made(pair, methods)), rows, memory)
    report = {name: count.figures() for name, count in counts.items()}
    print(f"{len(rows)} answers at temperature {rows[0].temperature:g}, top-p {rows[0].top_p:g}")
    print_table(report)
    if arguments.json is not None:
        write_report(arguments.json, json.dumps(report, indent=1) + "\n")


def simulated(names: str, config: DecodeConfig) -> dict[str, DecodeConfig]:
    """The methods to walk with; DFlashError where times would decide, or none is left."""
    methods = read_methods(names, config)
    del methods[PLAIN]
    if not methods:
        raise DFlashError(f"there is nothing to simulate in {names!r}", "name a drafting method")
    if config.draws_drafts:
        raise DFlashError("the acceptance of drawn drafts is no walk", "add --acceptance match")
    for name, method in methods.items():
        cut = method.method == "ddtree" or (method.method == "d2sd" and method.growth == "joint")
        if cut and method.budget is None:
            raise DFlashError(f"the budget of {name!r} depends on times", f"try {name}:budget=16")
        if method.method in ("dflash", "ngram") and method.block_size is None:
            raise DFlashError(f"the length of {name!r} depends on times", f"try {name}:8")
    return methods


def made(pair: Pair, methods: dict[str, DecodeConfig]) -> Iterator[tuple[str, Drafter]]:
    """The drafters; d2sd also with the first drafter as its own second."""
    for name, config in methods.items():
        yield name, make_drafter(pair, config)
        if config.method == "d2sd" and len(pair.drafters) > 1:
            alone = replace(pair, drafters=pair.drafters[:1])
            yield f"{name} alone", make_drafter(alone, config)


def print_table(report: dict[str, dict[str, dict[str, float]]]) -> None:
    categories = list(next(iter(report.values())))
    print("tokens per round (rows)".ljust(36), *(name.rjust(14) for name in categories))
    for name, figures in report.items():
        cells = (
            f"{figures[c]['tokens_per_round']:.2f} ({figures[c]['rows_per_round']:.1f})".rjust(14)
            for c in categories
        )
        print(name.ljust(36), *cells)


def parser() -> argparse.ArgumentParser:
    result = cli.Parser(prog="simulate_trees.py", description="Tokens per round on known answers.")
    result.add_argument("--corpus", type=Path, required=True, help="answers of one temperature")
    result.add_argument("--methods", required=True, help="as in dflash_mlx.benchmark")
    result.add_argument("--every", type=int, default=1, help="use only every N-th answer")
    result.add_argument("--json", type=Path, help="write the figures here")
    cli.add_options(result, PairConfig, DecodeConfig, SamplingConfig, without=["method"])
    return result


if __name__ == "__main__":
    cli.run(main, "simulate_trees.py")
