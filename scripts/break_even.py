"""At which cost of its second pass D2SD would be ahead of DDTree, from tokens per round and times.

    .venv/bin/python scripts/break_even.py --counts COUNTS.json
    .venv/bin/python scripts/break_even.py --corpus ANSWERS.jsonl --every 4

COUNTS.json is written by simulate_trees.py for `ddtree:budget=N` and `d2sd:budget=N` with several
N. Of each method the number of rows counts that brings most tokens per second, where passes over a
target and its first draft take what the roofline says of them.

With a corpus both methods walk known answers as in simulate_trees.py and choose each round's rows
and passes themselves, as `auto` does, while a clock goes on by those times. The second pass takes
the given shares of a plain target pass, however many branches it has.

Acceptance is that of the pair that was simulated, whatever the target.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_mlx.cli import options as cli  # isort: skip  # loads the BLAS before MLX

import simulate_trees
from roofline import ROWS, Traffic, draft_time, pass_time, table
from roofline_data import MACHINES, TARGETS

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.adaptive import Adaptive, Scope
from dflash_mlx.drafters.dual_diffusion import METHOD, DualDiffusion
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.two_pass import FirstDraft, TwoPass
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import Context, State
from dflash_mlx.models.load import load_pair
from dflash_mlx.train.features import vocabulary_size
from dflash_mlx.verifier.pass_times import PassTimes

MACHINE = MACHINES["M4 Max"]
SIZES = ("Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B")
BITS = (4, 8, 16)
WALKED = 8  # bits, for which walks are worth their time: with 4 few rows pay, with 16 many
SHARES = (0.05, 0.1, 0.25)  # of a plain target pass, that the second draft takes
BLOCK, BRANCHES, NODES = 8, 4, 48
HEADS = ("target", "bits", "16 rows", "first draft", "second draft", "`ddtree` x plain")


@dataclass(frozen=True)
class Terms:
    """Seconds: of target passes, of the first draft, and of the second; None to leave it out."""

    passes: PassTimes
    first: float
    second: float | None


class Simulated(TwoPass):
    """D2SD under `auto`, or DDTree where there is no second pass, whose passes take its terms."""

    name, rounds_ahead = METHOD.name, 0

    def __init__(self, both: DualDiffusion, terms: Terms) -> None:
        self.now, self.aux_layers = 0.0, both.aux_layers
        self.continued = 0
        self._both, self._terms = both, terms
        scope = Scope(tuple(source.name for source in METHOD.sources))
        self._auto = Adaptive(self, {"draft": self}, terms.passes, scope, lambda: self.now)
        arm, second = self._auto.experience.arms[1], self._auto.experience.second
        arm.drafts.timed = PassTimes((1,), (terms.first,))
        second.times.timed = PassTimes((1,), (terms.second or terms.first,))

    def new_context(self) -> Context:
        return self._both.new_context()

    def propose(self, states: Sequence[State], budget: int) -> list[Proposal]:
        """What `auto` proposes; the pass over it is over when it returns."""
        found = self._auto.propose(states, budget)
        self.now += float(self._terms.passes.of(sum(len(each.tree) for each in found)))
        return found

    def first_pass(self, states: Sequence[State], rooms: Sequence[int]) -> list[FirstDraft]:
        self.now += self._terms.first
        drafts = self._both.first_pass(states, rooms)
        return drafts if self._terms.second else [replace(each, branches={}) for each in drafts]

    def second_pass(
        self, states: Sequence[State], drafts: Sequence[FirstDraft], counts: Sequence[int]
    ) -> list[Proposal]:
        self.now += self._terms.second or 0.0
        self.continued += 1
        return self._both.second_pass(states, drafts, counts)


def terms_of(name: str, bits: int, traffic: Traffic) -> tuple[Terms, float]:
    """Of a target by the roofline, and what it says of the second pass."""
    target = TARGETS[name]
    passes = [pass_time(MACHINE, target, bits, rows, traffic).seconds for rows in ROWS]
    first, second = (
        draft_time(MACHINE, target, bits, rows, traffic, bits).seconds
        for rows in (BLOCK, BRANCHES * BLOCK)
    )
    return Terms(PassTimes(ROWS, tuple(passes)), first, None), second


def read_counts(file: Path) -> dict[str, dict[int, float]]:
    """Tokens per round by method and budget; DFlashError for a file that has none."""
    tokens: dict[str, dict[int, float]] = {"ddtree": {1: 1.0}, "d2sd": {}}
    try:
        for walk, figures in json.loads(file.read_text(encoding="utf-8")).items():
            method, _, budget = walk.partition(":budget=")
            if method in tokens and budget.isdecimal():
                tokens[method][int(budget)] = figures["all"]["mean_accepted"]
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        what = f"{file} holds no counts ({error})"
        raise DFlashError(what, "name a file of simulate_trees.py --json") from None
    if min(map(len, tokens.values())) < 2:
        raise DFlashError(f"{file} lacks ddtree:budget=N or d2sd:budget=N", "simulate them")
    return tokens


def by_counts(counts: Path) -> str:
    """The cost at which both methods are as fast, for each target and width, in Markdown.

    With n rows of a tree of both drafts, and alpha(n) tokens, a round is as good as one of DDTree's
    best when it takes alpha(n) times what they take for a token.
    """
    tokens = read_counts(counts)
    lines = []
    for name in SIZES:
        for bits in BITS:
            terms, second = terms_of(name, bits, Traffic.read())
            passes = {n: float(terms.passes.of(n)) for known in tokens.values() for n in known}
            alone = tokens["ddtree"]
            best = min(alone, key=lambda n: (passes[n] + terms.first * (n > 1)) / alone[n])
            a_token = (passes[best] + terms.first * (best > 1)) / alone[best]
            left = {n: found * a_token - passes[n] for n, found in tokens["d2sd"].items()}
            rows = max(left, key=lambda n: left[n])
            plain = passes[1]
            even = (left[rows] - terms.first) / plain
            cells = [f"{x / plain:.2f}" for x in (float(terms.passes.of(16)), terms.first, second)]
            speed = f"{plain / a_token:.2f} ({best})"
            lines.append([name, str(bits), *cells, speed, f"{even:.2f} ({rows})"])
    return table([*HEADS, "even at (rows)"], iter(lines))


def compare(pair: Pair, corpus: Path, every: int) -> str:
    """How much faster than DDTree at several costs, for each target, in Markdown.

    In brackets the rounds in which a second pass was made.
    """
    both = make_drafter(pair, replace(simulate_trees.NEEDS_TREES, budget=NODES))
    assert isinstance(both, DualDiffusion)
    traffic = Traffic.read()
    kinds = [(name, WALKED, *terms_of(name, WALKED, traffic)) for name in SIZES]
    walks: dict[str, Simulated] = {}
    for name, bits, terms, _ in kinds:
        plain = terms.passes.seconds[0]
        for label, seconds in {
            "none": None,
            **{str(share): share * plain for share in SHARES},
        }.items():
            walks[f"{name} {bits} {label}"] = Simulated(both, replace(terms, second=seconds))
    rows = simulate_trees.read_answers(corpus, vocabulary_size(pair.target))[::every]
    with simulate_trees.remembering() as memory:
        counts = simulate_trees.simulate(pair, dict(walks), rows, memory)

    found = {walk: count.figures()["all"] for walk, count in counts.items()}

    def speed(walk: str) -> float:
        return float(found[walk]["tokens"]) / walks[walk].now

    lines = []
    for name, bits, terms, second in kinds:
        key, plain = f"{name} {bits}", terms.passes.seconds[0]
        alone = speed(f"{key} none")
        cells = []
        for label in map(str, SHARES):
            walk = f"{key} {label}"
            made = walks[walk].continued / found[walk]["rounds"]
            cells.append(f"{speed(walk) / alone:.3f} ({made:.0%})")
        sixteen = float(terms.passes.of(16)) / plain
        ratios = [f"{x / plain:.2f}" for x in (terms.first, second)]
        lines.append([name, str(bits), f"{sixteen:.2f}", *ratios, f"{alone * plain:.2f}", *cells])
    return table([*HEADS, *(f"at {share:g}" for share in SHARES)], iter(lines))


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser(prog="break_even.py", description="What a second draft pass may cost.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--counts", type=Path, help="figures of simulate_trees.py")
    source.add_argument("--corpus", type=Path, help="answers of one temperature")
    parser.add_argument("--every", type=int, default=1, help="use only every N-th answer")
    cli.add_options(parser, PairConfig)
    arguments: argparse.Namespace = parser.parse_args(argv)
    simulate_trees.check_every(arguments.every)
    if arguments.counts is not None:
        print(by_counts(arguments.counts))
        return
    pair = load_pair(cli.read_pair_config(arguments), simulate_trees.NEEDS_TREES)
    print(compare(pair, arguments.corpus, arguments.every))


if __name__ == "__main__":
    cli.run(main, "break_even.py")
