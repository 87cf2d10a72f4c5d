"""From runs to figures: medians, paired ratios, parity, the four terms of a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

import numpy as np

from dflash_mlx.benchmark.measure import TERMS, RoundSize, Run
from dflash_mlx.core.accept import NearTies
from dflash_mlx.core.statistics import Statistics

RESAMPLES = 1000
MethodStats = dict[str, Any]


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
    """Figures by category and method; all categories together first."""
    return {"all": report["methods"], **report["categories"]}


def _figures(runs: Sequence[Run]) -> MethodStats:
    """Medians over prompts; tokens per round and acceptance over all rounds together.

    Answers that ended with their first token, which the prompt's own pass gave, have no speed.
    """
    rounds = [round_ for run in runs for round_ in run.rounds]
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
    by_prompt = [(sum(r.tokens for r in run.rounds), len(run.rounds)) for run in runs]
    return {
        "tokens_per_second": _middle(rates),
        "speedup": _middle(speedups),
        "intervals": {
            "speedup": interval(speedups, np.median),
            "mean_accepted": interval(by_prompt, tokens_a_round),
        },
        "ratio_of_medians": _middle(rates) / (_middle(plain) or 1.0),
        "mean_accepted": fmean([round_.tokens for round_ in rounds] or [0]),
        "rows_per_round": fmean([round_.rows for round_ in rounds] or [0]),
        "acceptance_rate": total.acceptance_rate,
        "accepted_by_position": total.accepted_by_position,
        "committed": committed(rounds),
        "modes": dict(total.modes),
        "guard": {f"guard_{name}": n for name, n in asdict(ties).items()},
        "parity": sum(run.difference is None for run in runs) / len(runs),
        "first_differences": [
            {"id": run.question.id, **asdict(run.difference)} for run in runs if run.difference
        ],
        "round_ms": {term: _middle([run.round_ms(term) for run in timed]) for term in TERMS},
    }


def _middle(values: Sequence[float]) -> float:
    """The median, 0 of nothing."""
    return median(values) if values else 0.0


def interval(values: Sequence[Any], statistic: Callable[[Any], Any]) -> list[float]:
    """The middle 95 % of a statistic over resamples of the prompts (bootstrap); [] of nothing.

    values: one for each prompt. statistic: of as many rows.
    """
    if not values:
        return []
    rows, chosen = np.array(values), np.random.default_rng(0)
    draws = chosen.integers(len(rows), size=(RESAMPLES, len(rows)))
    low, high = np.percentile([statistic(rows[draw]) for draw in draws], (2.5, 97.5))
    return [float(low), float(high)]


def tokens_a_round(sums: Any) -> float:
    """Tokens a round, of rows [n, 2] of tokens and rounds."""
    tokens, rounds = sums.sum(axis=0)
    return float(tokens / max(rounds, 1))


def committed(rounds: Sequence[RoundSize]) -> dict[str, int]:
    """Acceptance histogram: how many rounds committed 1, 2, ... tokens."""
    counts = Counter(round_.tokens for round_ in rounds)
    return {str(tokens): counts[tokens] for tokens in range(1, max(counts, default=0) + 1)}
