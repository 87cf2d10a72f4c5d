"""Every prompt with every method in turn, and what became of every round's draft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp

from dflash_mlx.benchmark.prompts import BenchmarkPrompt
from dflash_mlx.core.config import PLAIN, DecodeConfig
from dflash_mlx.core.observer import RoundTimer
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.drafters.method import BRANCHES
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.parity import Difference, first_difference
from dflash_mlx.session.answer import Answer, TextDelta, check_length, collect
from dflash_mlx.session.stream import Session

TERMS = ("draft", "verify", "commit", "overhead")


@dataclass(frozen=True)
class CheckedNode:
    """A drafted token that was compared with the target's choice, its parent being accepted.

    confidence: its probability as its drafter sees it, given the tokens before it.
    """

    depth: int
    confidence: float
    accepted: bool


@dataclass(frozen=True)
class RoundFigures:
    """A round after the fact.

    tokens: committed, without what a stop cut off. rows: nodes that the target verified.
    separate_rows: what they would be if every branch were a block of its own, as D2SD is published;
    None for methods that do not merge blocks. checked: () where the tree has no confidences.
    """

    tokens: int
    rows: int
    separate_rows: int | None
    checked: tuple[CheckedNode, ...]

    @classmethod
    def of(cls, delta: TextDelta, config: DecodeConfig) -> RoundFigures:
        """The round behind one delta of an answer that was decoded with `config`."""
        tree, path = delta.accepted.tree, set(delta.accepted.path)
        compared = (i for i in range(1, len(tree)) if tree.logprobs and tree.parents[i] in path)
        nodes = (CheckedNode(tree.depths[i], exp(tree.logprobs[i]), i in path) for i in compared)
        separate = separate_rows(config, max(tree.depths) + 1)
        return cls(len(delta.tokens), len(tree), separate, tuple(nodes))


def separate_rows(config: DecodeConfig, block: int) -> int | None:
    """Rows of the first draft and of every branch as separate blocks of `block` tokens.

    D2SD continues K prefixes of the first draft, of which a block has block - 1; a lone anchor has
    nothing to branch from.
    """
    branches = config.branches or BRANCHES
    if config.method == "d2sd" and config.growth != "joint":
        branches = min(branches, block - 1)
    elif config.method != "resample":
        return None
    return (branches + 1) * block if block > 1 else 1


@dataclass(frozen=True)
class Run:
    """One answer with one method, beside the plain answer to the same prompt.

    statistics, plain: of the two. seconds: that its rounds spent by term. difference: None where
    the tokens are the plain ones.
    """

    question: BenchmarkPrompt
    method: str
    statistics: Statistics
    seconds: Mapping[str, float]
    rounds: tuple[RoundFigures, ...]
    plain: Statistics
    difference: Difference | None

    def round_ms(self, term: str) -> float:
        """Milliseconds per round in one of TERMS; "overhead" is what the other terms leave."""
        known = {name: self.seconds.get(name, 0.0) for name in TERMS[:-1]}
        overhead = self.statistics.decode_seconds - sum(known.values())
        return 1e3 * known.get(term, overhead) / self.statistics.rounds


def run_all(
    pair: Pair,
    questions: Sequence[BenchmarkPrompt],
    methods: Mapping[str, DecodeConfig],
    done: int = 0,
) -> Iterator[list[Run]]:
    """All answers, after one unmeasured answer with each method.

    Yields the runs of each prompt when it is finished, and [] after each of its answers, so that
    whoever asks may leave. The order of the methods turns from prompt to prompt, so that none is
    always the first. done: prompts that were finished before.
    """
    for config in methods.values():
        Session(pair, config)  # raises where it does not fit the pair
    for question in questions:
        check_length(pair.target, question.tokens)
    for config in methods.values():
        answer(pair, questions[0].tokens, replace(config, max_tokens=8))
    names = list(methods)
    for i, question in list(enumerate(questions))[done:]:
        answers = {}
        for name in names[i % len(names) :] + names[: i % len(names)]:
            answers[name] = answer(pair, question.tokens, methods[name])
            yield []
        plain, *_ = answers[PLAIN]
        runs = []
        for name in names:
            own, seconds, rounds = answers[name]
            apart = first_difference(pair.target, question.tokens, plain.tokens, own.tokens)
            told = own.statistics, seconds, rounds, plain.statistics
            runs.append(Run(question, name, *told, apart))
        yield runs


def answer(
    pair: Pair, prompt: list[int], config: DecodeConfig
) -> tuple[Answer, Mapping[str, float], tuple[RoundFigures, ...]]:
    """One answer, as `Run` has it; its rounds are looked at when it is finished, at no cost."""
    timer = RoundTimer()
    deltas = list(Session(pair, config).stream(prompt, timer))
    rounds = tuple(RoundFigures.of(delta, config) for delta in deltas[1:])  # behind the prompt
    return collect(iter(deltas)), timer.seconds, rounds
