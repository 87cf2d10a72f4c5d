"""Every prompt with every method in turn; then medians, paired ratios, parity, terms of a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from dflash_mlx.benchmark.selection import BenchmarkPrompt
from dflash_mlx.core.config import PLAIN, DecodeConfig
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.core.statistics import RoundTimer, Statistics
from dflash_mlx.core.tree import NearTies
from dflash_mlx.engine.delta import Answer, Delta, collect
from dflash_mlx.engine.exact import Difference, first_difference
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.sequence import check_length
from dflash_mlx.session.session import Session

TERMS = ("draft", "verify", "commit", "overhead")
RESAMPLES = 1000
MethodStats = dict[str, Any]


class RoundSize(NamedTuple):
    """Of a round that is over."""

    tokens: int  # committed, without what a stop cut off
    rows: int  # nodes that the target verified


@dataclass(frozen=True)
class Run:
    """One answer with one method, beside the plain answer to the same prompt."""

    question: BenchmarkPrompt
    method: str
    statistics: Statistics
    seconds: Mapping[str, float]  # by term, over all rounds
    rounds: tuple[RoundSize, ...]
    plain: Statistics  # of the plain answer
    difference: Difference | None  # None where the tokens are the plain ones

    def round_ms(self, term: str) -> float:
        """Milliseconds per round in one of TERMS; the overhead is what the other terms leave."""
        known = {name: self.seconds.get(name, 0.0) for name in TERMS[:-1]}
        overhead = self.statistics.decode_seconds - sum(known.values())
        return 1e3 * known.get(term, overhead) / self.statistics.rounds


def run_all(
    pair: Pair,
    questions: Sequence[BenchmarkPrompt],
    methods: Mapping[str, DecodeConfig],
    done: int = 0,
) -> Iterator[list[Run] | None]:
    """All answers, after one unmeasured answer with each method.

    Yields the runs of each prompt when it is finished, [] after each of its answers, and None after
    each pass. The order of the methods turns from prompt to prompt. done: prompts that were
    finished before.
    """
    for config in methods.values():
        Session(pair, config)  # raises where it does not fit the pair
    for question in questions:
        check_length(pair.target, Prompt.of(question.tokens))
    for config in methods.values():
        yield from answer(pair, questions[0].tokens, replace(config, max_tokens=8))
    names = list(methods)
    for i, question in list(enumerate(questions))[done:]:
        answers = {}
        for name in names[i % len(names) :] + names[: i % len(names)]:
            answers[name] = yield from answer(pair, question.tokens, methods[name])
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
) -> Generator[None, None, tuple[Answer, Mapping[str, float], tuple[RoundSize, ...]]]:
    """One answer, its seconds by term, and its rounds; yields after each pass."""
    timer, deltas = RoundTimer(), list[Delta]()
    for delta in Session(pair, config).stream(prompt, timer):
        deltas.append(delta)
        yield
    behind = deltas[1:]  # the first token came with the prompt
    rounds = tuple(RoundSize(len(delta.tokens), len(delta.accepted.tree)) for delta in behind)
    return collect(iter(deltas)), timer.seconds, rounds


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """Figures per method, over all prompts and per category."""

    def by_method(some: Sequence[Run]) -> dict[str, MethodStats]:
        methods = dict.fromkeys(run.method for run in some)
        return {m: _figures([run for run in some if run.method == m]) for m in methods}

    each: dict[str, list[Run]] = {}
    for run in runs:
        each.setdefault(run.question.category, []).append(run)
    return {"methods": by_method(runs), "categories": {c: by_method(r) for c, r in each.items()}}


def groups(report: dict[str, Any]) -> dict[str, dict[str, MethodStats]]:
    """Figures by category and method, of all categories together first."""
    return {"all": report["methods"], **report["categories"]}


def _figures(runs: Sequence[Run]) -> MethodStats:
    """Medians over prompts; tokens per round and acceptance over all rounds together.

    Answers that ended with their first token, which the prompt's own pass gave, have no speed.
    """
    rounds = [round_ for run in runs for round_ in run.rounds]
    sizes = Counter(round_.tokens for round_ in rounds)
    total, ties = Statistics(""), NearTies()
    for found in (run.statistics for run in runs):
        total.drafted.update(found.drafted)
        total.accepted.update(found.accepted)
        total.modes.update(found.modes)
        ties += found.near_ties or NearTies()
    timed = [run for run in runs if run.statistics.rounds and run.plain.rounds]
    rates = [run.statistics.tokens_per_second for run in timed]
    plain = [run.plain.tokens_per_second for run in timed]
    speedups = [own / other for own, other in zip(rates, plain, strict=True)]
    slow = min(zip(speedups, timed, strict=True), key=lambda each: each[0], default=None)
    by_prompt = [(sum(r.tokens for r in run.rounds), len(run.rounds)) for run in runs]
    return {
        "tokens_per_second": _middle(rates),
        "speedup": _middle(speedups),
        "slowest": slow and {"id": slow[1].question.id, "speedup": slow[0]},
        "intervals": {
            "speedup": interval(speedups, np.median),
            "mean_accepted": interval(by_prompt, tokens_a_round),
        },
        "ratio_of_medians": _middle(rates) / (_middle(plain) or 1.0),
        "mean_accepted": fmean([round_.tokens for round_ in rounds] or [0]),
        "rows_per_round": fmean([round_.rows for round_ in rounds] or [0]),
        "acceptance_rate": total.acceptance_rate,
        "accepted_by_position": total.accepted_by_position,
        "committed": {str(n): sizes[n] for n in range(1, max(sizes, default=0) + 1)},
        "modes": dict(total.modes),
        "guard": {f"guard_{name}": n for name, n in asdict(ties).items()},
        "parity": sum(run.difference is None for run in runs) / len(runs),
        "first_differences": [
            {"id": run.question.id, **asdict(run.difference)} for run in runs if run.difference
        ],
        "round_ms": {term: _middle([run.round_ms(term) for run in timed]) for term in TERMS},
    }


def _middle(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def interval(values: Sequence[Any], statistic: Callable[[Any], Any]) -> list[float]:
    """The middle 95 % of a statistic over resamples of the prompts (bootstrap); [] of one alone.

    values: one for each prompt. statistic: of as many rows.
    """
    if len(values) < 2:
        return []
    rows, chosen = np.array(values), np.random.default_rng(0)
    draws = chosen.integers(len(rows), size=(RESAMPLES, len(rows)))
    low, high = np.percentile([statistic(rows[draw]) for draw in draws], (2.5, 97.5))
    return [float(low), float(high)]


def tokens_a_round(sums: Any) -> float:
    """Tokens a round, of rows [n, 2] of tokens and rounds."""
    tokens, rounds = sums.sum(axis=0)
    return float(tokens / max(rounds, 1))
