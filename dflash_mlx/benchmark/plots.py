"""A report as a picture: panels of lines, which are x and y by name; a level line has no x."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_mlx.benchmark.method_stats import MethodStats, groups
from dflash_mlx.cli.plotting import import_pyplot
from dflash_mlx.core.config import AUTO
from dflash_mlx.system.files import replacing

Lines = dict[str, tuple[Any, Any]]
_TOKENS = ("mean_accepted", "tokens per round")
_SPEEDUP = ("speedup", "speed-up over plain decoding (median of paired ratios)")
_MEDIANS = ("ratio_of_medians", "speed, plain decoding is 1 (medians)")


def draw_report(report: dict[str, Any], file: Path) -> None:
    """Save speed and acceptance of the methods, and those over a sweep; a PNG.

    Raises DFlashError without matplotlib.
    """
    every = groups(report)
    panels = {title: _by_category(every, key) for key, title in (_SPEEDUP, _TOKENS)}
    if sweep := report.get("sweep"):
        panels |= {
            f"{category}: {title} over {sweep['setting']}": _swept(sweep["lines"], figures, key)
            for category, figures in every.items()
            for key, title in (_TOKENS, _MEDIANS)
        }
    _draw(panels, file)


def draw_sweep(sweep: dict[str, Any], methods: dict[str, MethodStats], file: Path) -> None:
    """Save tokens per round over the swept setting alone; DFlashError without matplotlib."""
    key, title = _TOKENS
    _draw({f"{title} over {sweep['setting']}": _swept(sweep["lines"], methods, key)}, file)


def _draw(panels: dict[str, Lines], file: Path) -> None:
    """Two panels side by side, one legend for all."""
    pyplot = import_pyplot()
    rows = (len(panels) + 1) // 2
    figure = pyplot.figure(figsize=(11, 1 + 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, min(2, len(panels)), squeeze=False)
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=True):
        for i, (name, (x, y)) in enumerate(lines.items()):
            if x:
                axis.plot(x, y, ".-", color=f"C{i}", label=name)
            else:
                axis.axhline(y, linestyle="--", color=f"C{i}", label=name)
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7)
    try:
        with replacing(file) as partial:
            figure.savefig(partial, dpi=120)
    finally:
        pyplot.close(figure)


def _by_category(every: dict[str, dict[str, MethodStats]], key: str) -> Lines:
    names = every["all"]
    return {name: (list(every), [each[name][key] for each in every.values()]) for name in names}


def _swept(sweep: dict[str, dict[str, str]], methods: dict[str, MethodStats], key: str) -> Lines:
    """Methods without the setting, and `auto`, are level lines."""
    values = {name: figures[key] for name, figures in methods.items()}
    lines: Lines = {}
    for name, runs in sweep.items():
        points = sorted((int(v), values.pop(run)) for v, run in runs.items() if v != AUTO)
        if points:
            lines[name] = tuple(zip(*points, strict=True))  # type: ignore[assignment]
        if AUTO in runs:
            lines[f"{name}, {AUTO}"] = ((), values.pop(runs[AUTO]))
    return lines | {name: ((), value) for name, value in values.items()}
