"""Every prompt with every method in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dflash_mlx.benchmark.prompts import BenchmarkPrompt
from dflash_mlx.core.config import PLAIN, DecodeConfig
from dflash_mlx.core.observer import RoundTimer
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.engine.delta import Answer, collect
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.parity import Difference, first_difference
from dflash_mlx.session.new_sequence import check_length
from dflash_mlx.session.session import Session

TERMS = ("draft", "verify", "commit", "overhead")


class RoundSize(NamedTuple):
    """A round after the fact."""

    tokens: int  # committed, without what a stop cut off
    rows: int  # nodes that the target verified


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
    rounds: tuple[RoundSize, ...]
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
        check_length(pair.target, Prompt.of(question.tokens))
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
) -> tuple[Answer, Mapping[str, float], tuple[RoundSize, ...]]:
    """One answer, as `Run` has it; its rounds are looked at when it is finished, at no cost."""
    timer = RoundTimer()
    deltas = list(Session(pair, config).stream(prompt, timer))
    behind = deltas[1:]  # the first token came with the prompt
    rounds = tuple(RoundSize(len(delta.tokens), len(delta.accepted.tree)) for delta in behind)
    return collect(iter(deltas)), timer.seconds, rounds
