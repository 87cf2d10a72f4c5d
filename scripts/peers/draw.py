"""Pictures of what was measured; bars have their intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from dflash_mlx.benchmark.measure import interval
from peers.report import OURS, Count, answers, pairs, rate, ratios, together
from peers.runs import Runs
from peers.table import ALONE, SERVERS


@contextmanager
def _figure(file: Path, height: float = 4.2) -> Iterator[Any]:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, height), layout="constrained")
    yield axes
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _apart(middle: float, ends: Sequence[float]) -> list[list[float]]:
    low, high = ends or (middle, middle)
    return [[max(middle - low, 0.0)], [max(high - middle, 0.0)]]


def servers(runs: Runs, count: Count, file: Path) -> None:
    """Tokens per second of all servers, by clients."""
    numbers = sorted({line["clients"] for line in runs.lines})
    names = [name for name in SERVERS if runs.has(peer=name)]
    width = 0.8 / len(names)
    with _figure(file) as axes:
        for i, name in enumerate(names):
            for at, clients in enumerate(numbers):
                if not (found := answers(runs.lines, clients, name)):
                    continue
                rows = pairs(found, found, count)
                middle = clients * together(np.array(rows))
                ends = [clients * end for end in interval(rows, together)]
                x = at + (i - (len(names) - 1) / 2) * width
                label = name if runs.lines and at == 0 else None
                axes.bar(x, middle, width, color=f"C{i}", label=label)
                axes.errorbar(x, middle, _apart(middle, ends), color="black", linewidth=1)
        axes.set_xticks(range(len(numbers)), [str(n) for n in numbers])
        axes.set(xlabel="clients", ylabel="tokens per second of all together")
        axes.grid(alpha=0.3, axis="y")
        axes.legend(fontsize=8)


def peers(runs: Runs, file: Path) -> None:
    """Our speed over that of each, the median over prompts, by context."""
    contexts = list(dict.fromkeys(line["context"] for line in runs.lines))
    names = [n for n in ALONE if n != OURS and any(n in line["answers"] for line in runs.lines)]
    height = 0.8 / len(contexts)
    with _figure(file, 1.2 + 0.45 * len(names) * len(contexts)) as axes:
        for i, context in enumerate(contexts):
            some = [line for line in runs.lines if line["context"] == context]
            for at, name in enumerate(names):
                if not (found := ratios(some, name, rate)):
                    continue
                middle, y = float(np.median(found)), at + i * height
                label = (f"{context} tokens" if context else "short prompts") if at == 0 else None
                axes.barh(y, middle, height, color=f"C{i}", label=label)
                apart = _apart(middle, interval(found, np.median))
                axes.errorbar(middle, y, xerr=apart, color="black", linewidth=1)
        axes.set_yticks([at + (len(contexts) - 1) * height / 2 for at in range(len(names))], names)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set(xlabel="our speed over theirs, median over prompts")
        axes.legend(fontsize=8)
