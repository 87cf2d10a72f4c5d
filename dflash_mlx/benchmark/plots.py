"""A report as pictures: panels of lines, which are x and y by name; a level line has no x."""

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


def draw_all(report: dict[str, Any], folder: Path) -> list[Path]:
    """Save every picture that the report has figures for as a PNG in `folder`; the files."""
    folder.mkdir(exist_ok=True)
    methods, every = report["methods"], groups(report)
    sweep = report.get("sweep", {"setting": "", "lines": {}})
    pictures = {
        "speed": _speed(every),
        "acceptance": {"share of the rounds by tokens committed": _committed(methods)},
        "reliability": {
            f"accepted after an accepted parent by drafter confidence, {depth}": lines
            for depth in ("all", "depth 1")
            if (lines := _reliability(methods, depth))
        },
        "sweep": {
            f"{category}: {title} over {sweep['setting']}": _swept(sweep["lines"], figures, key)
            for category, figures in every.items()
            for key, title in (_TOKENS, _MEDIANS)
            if sweep["lines"]
        },
    }
    files = {folder / f"{name}.png": panels for name, panels in pictures.items() if panels}
    for file, panels in files.items():
        _draw(panels, file)
    return list(files)


def draw_speed(report: dict[str, Any], file: Path) -> None:
    """Save the comparison of the methods alone; DFlashError without matplotlib."""
    _draw(_speed(groups(report)), file)


def draw_sweep(sweep: dict[str, Any], methods: dict[str, MethodStats], file: Path) -> None:
    """Save tokens per round over the swept setting alone; DFlashError without matplotlib."""
    key, title = _TOKENS
    _draw({f"{title} over {sweep['setting']}": _swept(sweep["lines"], methods, key)}, file)


def _speed(every: dict[str, dict[str, MethodStats]]) -> dict[str, Lines]:
    return {title: _by_category(every, key) for key, title in (_SPEEDUP, _TOKENS)}


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


def _committed(methods: dict[str, MethodStats]) -> Lines:
    counts = {name: figures["committed"] for name, figures in methods.items()}
    return {
        name: ([int(n) for n in found], [n / sum(found.values()) for n in found.values()])
        for name, found in counts.items()
    }


def _reliability(methods: dict[str, MethodStats], depth: str) -> Lines:
    found = {
        name: f["reliability"][depth]["bins"] for name, f in methods.items() if f["reliability"]
    }
    lines = {
        name: ([each["confidence"] for each in bins], [each["accepted"] for each in bins])
        for name, bins in found.items()
    }
    return {**lines, "as often right as sure": ([0, 1], [0, 1])} if lines else {}


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
