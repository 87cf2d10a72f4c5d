"""A report as a picture: panels of lines, which are x and y by name; a level line has no x."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_mlx.benchmark.measure import groups
from dflash_mlx.cli.options import import_pyplot
from dflash_mlx.core.config import AUTO
from dflash_mlx.system.files import replacing

Lines = dict[str, tuple[Any, Any]]
_SHOWN = {"speedup": "speed-up over plain decoding", "mean_accepted": "tokens per round"}


def draw_report(report: dict[str, Any], file: Path) -> None:
    """Save speed and acceptance of the methods, and those over a sweep, as a PNG.

    Raises DFlashError without matplotlib.
    """
    pyplot = import_pyplot()
    panels = _panels(report)
    rows = len(panels) // 2
    figure = pyplot.figure(figsize=(11, 1 + 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False)
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


def _panels(report: dict[str, Any]) -> dict[str, Lines]:
    every = groups(report)
    panels: dict[str, Lines] = {
        title: {
            name: (list(every), [methods[name][key] for methods in every.values()])
            for name in report["methods"]
        }
        for key, title in _SHOWN.items()
    }
    if sweep := report.get("sweep"):
        for category, methods in every.items():
            for key, title in _SHOWN.items():
                values = {name: figures[key] for name, figures in methods.items()}
                name = f"{category}: {title} over {sweep['setting']}"
                panels[name] = _swept(sweep["lines"], values)
    return panels


def _swept(sweep: dict[str, dict[str, str]], values: dict[str, float]) -> Lines:
    """Methods without the setting, and `auto`, are level lines."""
    lines: Lines = {}
    for name, runs in sweep.items():
        points = sorted((int(v), values.pop(run)) for v, run in runs.items() if v != AUTO)
        if points:
            lines[name] = tuple(zip(*points, strict=True))  # type: ignore[assignment]
        if AUTO in runs:
            lines[f"{name}, {AUTO}"] = ((), values.pop(runs[AUTO]))
    return lines | {name: ((), value) for name, value in values.items()}
