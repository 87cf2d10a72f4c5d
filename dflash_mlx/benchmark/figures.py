"""From runs to figures: medians, paired ratios, parity, the four terms of a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from dflash_mlx.benchmark.measure import TERMS, Run
from dflash_mlx.benchmark.rounds import committed, merging, reliability
from dflash_mlx.target.pass_times import PassTimes


def summarise(runs: Sequence[Run], times: PassTimes | None = None) -> dict[str, Any]:
    """Figures per method, over all prompts and per category.

    times: of target passes, for what merging saves; without them it is given in rows alone.
    """
    categories = list(dict.fromkeys(run.category for run in runs))
    return {
        "methods": _by_method(runs, times),
        "categories": {
            category: _by_method([run for run in runs if run.category == category], times)
            for category in categories
        },
    }


def _by_method(runs: Sequence[Run], times: PassTimes | None) -> dict[str, Any]:
    methods = list(dict.fromkeys(run.method for run in runs))
    return {name: _figures([run for run in runs if run.method == name], times) for name in methods}


def _figures(runs: Sequence[Run], times: PassTimes | None) -> dict[str, Any]:
    """Medians over prompts; tokens per round and acceptance over all rounds together."""
    rounds = [round_ for run in runs for round_ in run.rounds]
    drafted = sum(run.statistics.drafted.total() for run in runs)
    accepted = sum(run.statistics.accepted.total() for run in runs)
    rate = median(run.statistics.tokens_per_second for run in runs)
    return {
        "tokens_per_second": rate,
        "speedup": median(run.speedup for run in runs),
        "ratio_of_medians": rate / median(run.plain.tokens_per_second for run in runs),
        "mean_accepted": sum(r.tokens for r in rounds) / len(rounds),
        "rows_per_round": sum(r.rows for r in rounds) / len(rounds),
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "accepted_by_position": _by_position(runs),
        "committed": committed(rounds),
        "reliability": reliability(rounds),
        "merging": merging(rounds, times),
        "modes": dict(sum((run.statistics.modes for run in runs), Counter())),
        "guard": _guard(runs),
        "parity": sum(run.difference is None for run in runs) / len(runs),
        "first_differences": [
            {"id": run.prompt, "position": run.difference.position, "margin": run.difference.margin}
            for run in runs
            if run.difference is not None
        ],
        "round_ms": {term: median(run.round_ms(term) for run in runs) for term in TERMS},
    }


def _by_position(runs: Sequence[Run]) -> list[float]:
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for run in runs:
        drafted.update(run.statistics.drafted)
        accepted.update(run.statistics.accepted)
    return [accepted[k] / drafted[k] for k in sorted(drafted)]


def _guard(runs: Sequence[Run]) -> dict[str, float]:
    """What the near-tie guard counted, over all answers; nothing where there is none."""
    total: Counter[str] = Counter()
    for run in runs:
        found = run.statistics.as_dict()
        total.update({key: n for key, n in found.items() if key.startswith("guard_")})
    return dict(total)
