"""Tokens per round of any methods on known answers, without decoding them.

    .venv/bin/python scripts/simulate_trees.py --corpus ANSWERS.jsonl \
        --methods dflash:8,d2sd:growth=paper,d2sd:budget=16,ddtree:budget=16

ANSWERS.jsonl is made by `dflash_mlx.corpus`, with `--greedy-share 1`, or with 0 and a temperature.
An answer decides which drafts are right, so the target reads every answer once, all methods walk it
together, and a draft that several of them ask for is made once. Counts are those of decoding,
near-ties of the target apart: drafts are kept as far as they match what the target chose or drew
(`--acceptance match`), and what it draws does not depend on them.
Methods are written as in `dflash_mlx.benchmark`. Times are not simulated, so an automatic budget
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

from dflash_mlx.benchmark.measure import interval, tokens_a_round
from dflash_mlx.benchmark.selection import PLAIN, read_methods
from dflash_mlx.core.config import DecodeConfig, PairConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.tree import Accepted, Choose, accept
from dflash_mlx.drafters import paper
from dflash_mlx.drafters.dflash.block_model import Ask, BlockModel, FeatureContext
from dflash_mlx.drafters.dual_diffusion import DualContext
from dflash_mlx.drafters.growth.grow import Choices
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.none import NoContext
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import Context
from dflash_mlx.engine.step import NO_LIMIT
from dflash_mlx.models.load import load_pair
from dflash_mlx.system.files import write_report
from dflash_mlx.train.data import vocabulary_size
from dflash_mlx.train.rows import CorpusRow, read_rows
from dflash_mlx.verifier.block import Block

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
        key = (id(model.module), id(ask.context), ask.rows, repr(ask.prefixes), width)
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
    constraint: None = None
    earlier: Any = None

    @property
    def tokens(self) -> list[int]:
        return self.text[: self.position + 1]

    @property
    def anchor(self) -> mx.array:
        return mx.array(self.text[self.position : self.position + 1])

    @property
    def remaining(self) -> int:
        return len(self.text) - 1 - self.position

    def move(self, accepted: Accepted) -> None:
        self.last = accepted
        self.position += len(accepted.path)


@dataclass
class Count:
    """Rounds of one method, the tokens and the tree nodes in them: of each answer, by category."""

    answers: defaultdict[str, list[tuple[int, int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, category: str, rounds: Sequence[tuple[int, int]]) -> None:
        """An answer's rounds: the tokens and nodes of each."""
        tokens, nodes = (sum(each) for each in zip(*rounds, strict=True)) if rounds else (0, 0)
        for name in (category, "all"):
            self.answers[name].append((tokens, len(rounds), nodes))

    def figures(self) -> dict[str, dict[str, Any]]:
        """By category; tokens per round with their interval over answers."""
        return {name: _figures(answers) for name, answers in self.answers.items()}


def _figures(answers: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    tokens, rounds, nodes = (sum(each) for each in zip(*answers, strict=True))
    pairs = [(tokens, rounds) for tokens, rounds, _ in answers]
    return {
        "answers": len(answers),
        "tokens": tokens,
        "rounds": rounds,
        "mean_accepted": tokens / max(rounds, 1),
        "rows_per_round": nodes / max(rounds, 1),
        "intervals": {"mean_accepted": interval(pairs, tokens_a_round)},
    }


@dataclass
class Reading:
    """A context that is told a text as far as it is known. features: [T, m*d] or None."""

    context: Context
    text: list[int]
    features: mx.array | None
    done: int = 0

    def read_to(self, end: int) -> None:
        """Up to a position."""
        if self.done < end:
            new = slice(self.done, end)
            told = None if self.features is None else self.features[new]
            self.context.append(mx.array(self.text[new]), told)
            self.done = end


def simulate(
    pair: Pair, drafters: dict[str, Drafter], rows: Sequence[CorpusRow], memory: Memory
) -> dict[str, Count]:
    """Walk every answer with every drafter."""
    counts = {name: Count() for name in drafters}
    for row in tqdm(rows, unit="answer"):
        text, prompt = [*row.prompt, *row.answer], len(row.prompt)
        readings = read(pair, drafters, text)
        places: dict[str, Any] = {
            name: Place(text, of_drafter(drafters[name], reading.context), prompt)
            for name, reading in readings.items()
        }
        rounds: dict[str, list[tuple[int, int]]] = {name: [] for name in drafters}
        for anchor in range(prompt, len(text) - 1):
            memory.forget()
            for name in (name for name, place in places.items() if place.position == anchor):
                readings[name].read_to(anchor)
                tree = drafters[name].propose([places[name]], NO_LIMIT)[0].tree
                accepted = accept(tree, continuing(text, anchor))
                rounds[name].append((len(accepted.path), len(tree)))
                places[name].move(accepted)
        for name, found in rounds.items():
            counts[name].add(row.category, found)
    return counts


def continuing(text: list[int], anchor: int) -> Choose:
    """The target's choices where it wrote `text`."""
    return lambda path: text[anchor + len(path)]


def read(pair: Pair, drafters: dict[str, Drafter], text: list[int]) -> dict[str, Reading]:
    """What each drafter reads of a text; those of the DFlash family read it together."""
    shared = [name for name, drafter in drafters.items() if shares(drafter)]
    both = [make_drafter(pair, NEEDS_TREES)] if shared else []
    aux_layers = tuple(
        sorted({tap for drafter in (*drafters.values(), *both) for tap in drafter.aux_layers})
    )
    layers = dict(zip(aux_layers, read_layers(pair, text, aux_layers), strict=True))

    def reading(drafter: Drafter) -> Reading:
        own = [layers[tap] for tap in drafter.aux_layers]
        return Reading(drafter.new_context(), text, mx.concatenate(own, axis=-1) if own else None)

    together = [*map(reading, both)]
    return {
        name: together[0] if name in shared else reading(drafter)
        for name, drafter in drafters.items()
    }


def read_layers(pair: Pair, text: list[int], aux_layers: tuple[int, ...]) -> list[mx.array]:
    """The outputs [T, d] of the target's layers `aux_layers` behind every token of a text."""
    cache, parts = pair.target.new_cache(), []
    for start in range(0, len(text) if aux_layers else 0, 512):
        piece = mx.array(text[start : start + 512])
        _, features = pair.target.forward(piece, cache, Block(piece.size), aux_layers)
        assert features is not None
        mx.eval(features, cache.arrays)
        parts.append(features)
        cache.commit(range(piece.size))
    return mx.split(mx.concatenate(parts), len(aux_layers), axis=-1) if aux_layers else []


def shares(drafter: Drafter) -> bool:
    """Whether it reads the contexts of D2SD, or one of them."""
    return isinstance(drafter.new_context(), (FeatureContext, DualContext))


def of_drafter(drafter: Drafter, context: Context) -> Context:
    """The part of its reading's context that a drafter reads."""
    made = drafter.new_context()
    if not isinstance(context, DualContext) or isinstance(made, NoContext):
        return context
    if isinstance(made, FeatureContext):
        return context.contexts[0]
    assert isinstance(made, DualContext)
    # one where it continues its own drafts
    return replace(made, contexts=context.contexts[: len(made.contexts)])


def read_answers(file: Path, vocab_size: int) -> list[CorpusRow]:
    """The rows of a corpus; DFlashError where they were not all chosen or drawn alike."""
    rows = read_rows(file, vocab_size)
    heats = sorted({(row.temperature, row.top_p) for row in rows})
    if len(heats) > 1:
        found = ", ".join(f"{heat:g} ({top_p:g})" for heat, top_p in heats)
        what = f"{file} has answers at several temperatures (and top-p): {found}"
        raise DFlashError(what, "make it with --greedy-share 1, or with 0")
    return rows


def check_every(number: int) -> None:
    """Raise DFlashError for a share of the answers that cannot be taken."""
    if number < 1:
        raise DFlashError(f"--every is {number}", "choose 1 or more")


def main(argv: Sequence[str]) -> None:
    arguments = parser().parse_args(argv)
    cli.check_output(arguments.json)
    methods = simulated(arguments.methods, cli.read_decode_config(arguments))
    check_every(arguments.every)
    pair = load_pair(cli.read_pair_config(arguments), *methods.values())
    rows = read_answers(arguments.corpus, vocabulary_size(pair.target))[:: arguments.every]
    with remembering() as memory:
        counts = simulate(pair, dict(made(pair, methods)), rows, memory)
    report = {name: count.figures() for name, count in counts.items()}
    print(f"{len(rows)} answers at temperature {rows[0].temperature:g}, top-p {rows[0].top_p:g}")
    print_table(report)
    if arguments.json is not None:
        write_report(arguments.json, json.dumps(report, indent=1) + "\n")


def simulated(names: str, config: DecodeConfig) -> dict[str, DecodeConfig]:
    """The methods to walk with; DFlashError where times would decide."""
    paper.add_controls()
    methods = read_methods(names, config, paper.KNOBS)
    del methods[PLAIN]
    if not methods:
        raise DFlashError(f"there is nothing to simulate in {names!r}", "name a drafting method")
    if config.draws_drafts:
        raise DFlashError("the acceptance of drawn drafts is no walk", "add --acceptance match")
    for name, method in methods.items():
        if lacks := by_times(method):
            what, example = lacks
            raise DFlashError(f"the {what} of {name!r} depends on times", f"try {name}:{example}")
    return methods


def by_times(config: DecodeConfig) -> tuple[str, str] | None:
    """What times decide with a method, and how to write it so that they do not; None for none."""
    block = config.method in ("dflash", "ngram", "eagle3", "mtp", "assistant", "lm", "specdiff")
    if block and config.block_size is None and config.budget is None:
        return "length", "8"
    options = config.options
    cut = config.method in ("ddtree", "d2sd") and (options is None or options.cuts)
    return ("budget", "budget=16") if cut and config.budget is None else None


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
            f"{figures[c]['mean_accepted']:.2f} ({figures[c]['rows_per_round']:.1f})".rjust(14)
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
