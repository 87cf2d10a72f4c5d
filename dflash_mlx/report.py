"""From runs to figures: medians, paired ratios, parity, the four terms of a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from dflash_mlx.cache import Block
from dflash_mlx.errors import DFlashError
from dflash_mlx.statistics import Statistics
from dflash_mlx.target import Target

TERMS = ("draft", "verify", "commit", "overhead")


@dataclass(frozen=True)
class Difference:
    """Where an answer first leaves the plain one.

    margin: how far apart the target's logits of the two tokens are there; None where one answer
    goes on after the other has ended, which no near-tie explains.
    """

    position: int
    margin: float | None

    @property
    def is_near_tie(self) -> bool:
        """Whether the order of floating-point sums can explain it."""
        return self.margin is not None and self.margin < 1e-3


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
    seconds: dict[str, float]
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


def first_difference(
    target: Target, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> Difference | None:
    """Compare two answers; the margin comes from one fresh pass over the shared tokens."""
    pairs = enumerate(zip(plain, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(other)))
    if at == len(plain) == len(other):
        return None
    if at in (len(plain), len(other)):
        return Difference(at, None)
    tokens = mx.array([*prompt, *plain[:at]])
    logits, _ = target.forward(tokens, target.new_cache(), Block(tokens.shape[0]))
    margin = mx.abs(logits[-1, plain[at]] - logits[-1, other[at]])
    return Difference(at, margin.item())  # type: ignore[arg-type]


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """Figures per method, over all prompts and per category."""
    categories = list(dict.fromkeys(run.category for run in runs))
    return {
        "methods": _by_method(runs),
        "categories": {
            category: _by_method([run for run in runs if run.category == category])
            for category in categories
        },
    }


def _by_method(runs: Sequence[Run]) -> dict[str, Any]:
    methods = list(dict.fromkeys(run.method for run in runs))
    return {method: _figures([run for run in runs if run.method == method]) for method in methods}


def _figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians over prompts; tokens per round and acceptance over all rounds together."""
    rounds = sum(run.statistics.rounds for run in runs)
    drafted = sum(run.statistics.drafted.total() for run in runs)
    accepted = sum(run.statistics.accepted.total() for run in runs)
    differences = [run for run in runs if run.difference is not None]
    return {
        "tokens_per_second": median(run.statistics.tokens_per_second for run in runs),
        "speedup": median(run.speedup for run in runs),
        "mean_accepted": sum(run.statistics.generated_tokens for run in runs) / rounds,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "accepted_by_position": _by_position(runs),
        "parity": 1 - len(differences) / len(runs),
        "first_differences": [
            {"id": run.prompt, "position": run.difference.position, "margin": run.difference.margin}
            for run in differences
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


def format_table(report: dict[str, Any]) -> str:
    """A Markdown table, one row per category and method."""
    header = (
        "| category | method | tok/s | speed-up | tokens/round | accepted | parity | "
        "draft ms | verify ms | commit ms | overhead ms |"
    )
    lines = [header, "|" + " --- |" * 11]
    for category, methods in {"all": report["methods"], **report["categories"]}.items():
        lines += [_table_row(category, name, figures) for name, figures in methods.items()]
    return "\n".join(lines)


def _table_row(category: str, method: str, figures: dict[str, Any]) -> str:
    cells = [
        category,
        method,
        f"{figures['tokens_per_second']:.1f}",
        f"{figures['speedup']:.2f}",
        f"{figures['mean_accepted']:.2f}",
        f"{figures['acceptance_rate']:.0%}",
        f"{figures['parity']:.1%}",
        *(f"{figures['round_ms'][term]:.1f}" for term in TERMS),
    ]
    return "| " + " | ".join(cells) + " |"


def plot(report: dict[str, Any], file: Path) -> None:
    """Speed-up and tokens per round by category and method, as a PNG."""
    pyplot = import_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    _bars(left, report, "speedup", "speed-up over plain decoding (median of paired ratios)")
    _bars(right, report, "mean_accepted", "tokens per round")
    left.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _bars(axis: Any, report: dict[str, Any], key: str, title: str) -> None:
    groups = {"all": report["methods"], **report["categories"]}
    names = list(report["methods"])
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [x + i * width for x in range(len(groups))]
        axis.bar(at, [methods[name][key] for methods in groups.values()], width, label=name)
    axis.set_xticks([x + 0.4 - width / 2 for x in range(len(groups))], list(groups))
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_title(title)


def import_pyplot() -> Any:
    """Matplotlib's pyplot, drawing to files; DFlashError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise DFlashError("--plot needs matplotlib", "install it: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
