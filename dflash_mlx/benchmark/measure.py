"""Every prompt with every method in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from dflash_mlx.benchmark.prompts import Question
from dflash_mlx.benchmark.rounds import Round
from dflash_mlx.benchmark.selection import PLAIN
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.observer import RoundTimer
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.engine.parity import Difference, first_difference
from dflash_mlx.models.load import Pair
from dflash_mlx.session.stream import Answer, Session, collect

TERMS = ("draft", "verify", "commit", "overhead")


@dataclass(frozen=True)
class Measured:
    """An answer, the seconds its rounds spent by term, and what became of them."""

    answer: Answer
    seconds: Mapping[str, float]
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class Run:
    """One answer with one method, beside the plain answer to the same prompt.

    seconds: what the rounds spent in "draft", "verify" and "commit", by an observer.
    difference: None where the tokens are the plain ones.
    """

    prompt: str
    category: str
    method: str
    statistics: Statistics
    seconds: Mapping[str, float]
    rounds: tuple[Round, ...]
    plain: Statistics
    difference: Difference | None

    @property
    def speedup(self) -> float:
        """Tokens per second over plain decoding's, same prompt, same run."""
        return self.statistics.tokens_per_second / self.plain.tokens_per_second

    def round_ms(self, term: str) -> float:
        """Milliseconds per round in `term`; "overhead" is what the other terms leave."""
        whole = self.statistics.decode_seconds
        known = sum(self.seconds.get(name, 0.0) for name in TERMS[:-1])
        seconds = whole - known if term == "overhead" else self.seconds.get(term, 0.0)
        return 1e3 * seconds / self.statistics.rounds


def run_all(
    pair: Pair, questions: Sequence[Question], methods: dict[str, DecodeConfig]
) -> list[Run]:
    """All answers, after one unmeasured answer with each method.

    The order of the methods turns from prompt to prompt, so that none is always the first.
    """
    for config in methods.values():
        session = Session(pair, config)
        for question in questions:
            session.check(question.tokens)
        answer(pair, questions[0].tokens, replace(config, max_tokens=8))
    runs = []
    names = list(methods)
    for i, question in enumerate(tqdm(questions, unit="prompt")):
        turned = names[i % len(names) :] + names[: i % len(names)]
        answers = {name: answer(pair, question.tokens, methods[name]) for name in turned}
        runs += [compare(pair, question, name, answers) for name in names]
    return runs


def answer(pair: Pair, prompt: list[int], config: DecodeConfig) -> Measured:
    """One answer; its rounds are looked at when it is finished, so that this costs it no time."""
    timer = RoundTimer()
    deltas = list(Session(pair, config).stream(prompt, timer))
    rounds = tuple(Round.of(delta, config) for delta in deltas)
    return Measured(collect(iter(deltas)), timer.seconds, rounds)


def compare(pair: Pair, question: Question, method: str, answers: dict[str, Measured]) -> Run:
    """An answer beside the plain one."""
    plain, other = answers[PLAIN].answer, answers[method]
    return Run(
        prompt=question.id,
        category=question.category,
        method=method,
        statistics=other.answer.statistics,
        seconds=other.seconds,
        rounds=other.rounds,
        plain=plain.statistics,
        difference=first_difference(
            pair.target, question.tokens, plain.tokens, other.answer.tokens
        ),
    )
