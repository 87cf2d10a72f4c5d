"""A report as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_mlx.benchmark.selection import AUTO
from dflash_mlx.cli.plotting import import_pyplot


def draw_all(report: dict[str, Any], folder: Path) -> list[Path]:
    """Save every picture that the report has figures for as a PNG in `folder`; the files."""
    folder.mkdir(exist_ok=True)
    pictures = {"speed.png": draw_speed, "acceptance.png": draw_acceptance}
    if any(figures["reliability"] for figures in report["methods"].values()):
        pictures["reliability.png"] = draw_reliability
    if "sweep" in report:
        pictures["sweep.png"] = draw_sweep
    for name, draw in pictures.items():
        draw(report, folder / name)
    return [folder / name for name in pictures]


def _groups(report: dict[str, Any]) -> dict[str, Any]:
    return {"all": report["methods"], **report["categories"]}


def _save(figure: Any, file: Path) -> None:
    figure.savefig(file, dpi=120)
    import_pyplot().close(figure)


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure and its axes [rows, columns]; sizes in inches."""
    size = (width, height)
    figure = import_pyplot().figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def draw_speed(report: dict[str, Any], file: Path) -> None:
    """Speed-up and tokens per round by category and method."""
    figure, axes = _figure(1, 2, 11, 4)
    left, right = axes[0]
    _bars(left, report, "speedup", "speed-up over plain decoding (median of paired ratios)")
    _bars(right, report, "mean_accepted", "tokens per round")
    left.legend(fontsize=7)
    _save(figure, file)


def _bars(axis: Any, report: dict[str, Any], key: str, title: str) -> None:
    groups = _groups(report)
    names = list(report["methods"])
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [x + i * width for x in range(len(groups))]
        axis.bar(at, [methods[name][key] for methods in groups.values()], width, label=name)
    axis.set_xticks([x + 0.4 - width / 2 for x in range(len(groups))], list(groups))
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_title(title)


def draw_acceptance(report: dict[str, Any], file: Path) -> None:
    """Acceptance histogram: shares of the rounds by tokens committed, a bar per method."""
    methods = report["methods"]
    figure, axes = _figure(1, 1, 9, 1.5 + 0.35 * len(methods))
    axis = axes[0, 0]
    most = max(len(figures["committed"]) for figures in methods.values())
    colors = import_pyplot().get_cmap("viridis")
    totals = {name: sum(figures["committed"].values()) for name, figures in methods.items()}
    left = dict.fromkeys(methods, 0.0)
    for tokens in range(1, most + 1):
        shares = {
            name: figures["committed"].get(str(tokens), 0) / totals[name]
            for name, figures in methods.items()
        }
        color = colors((tokens - 1) / max(1, most - 1))
        axis.barh(
            list(methods),
            list(shares.values()),
            left=list(left.values()),
            color=color,
            label=str(tokens),
        )
        left = {name: left[name] + shares[name] for name in methods}
    axis.invert_yaxis()
    axis.set(title="Rounds by tokens committed", xlabel="share of the rounds", xlim=(0, 1))
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    _save(figure, file)


def draw_reliability(report: dict[str, Any], file: Path) -> None:
    """Reliability diagram: confidence against acceptance, over all depths and at depth 1."""
    figure, axes = _figure(1, 2, 11, 5)
    for axis, depth in zip(axes[0], ("all", "depth 1"), strict=True):
        axis.plot([0, 1], [0, 1], color="black", linewidth=0.8)
        for name, figures in report["methods"].items():
            if figures["reliability"] is not None:
                _reliability_line(axis, name, figures["reliability"][depth])
        axis.set(xlabel="drafter confidence", xlim=(0, 1), ylim=(0, 1))
        axis.set_title("all depths" if depth == "all" else depth)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("accepted after an accepted parent")
    axes[0, 0].legend(fontsize=7)
    _save(figure, file)


def _reliability_line(axis: Any, name: str, diagram: dict[str, Any]) -> None:
    """A line through the bins; the larger a dot, the more nodes."""
    bins = diagram["bins"]
    nodes = sum(found["nodes"] for found in bins)
    x = [found["confidence"] for found in bins]
    y = [found["accepted"] for found in bins]
    (line,) = axis.plot(x, y, linewidth=1, label=name)
    sizes = [200 * found["nodes"] / nodes for found in bins]
    axis.scatter(x, y, sizes, color=line.get_color(), clip_on=False)


def draw_sweep(report: dict[str, Any], file: Path) -> None:
    """Tokens per round and speed over the swept setting, a row per category.

    Methods without the setting, and its automatic value, are level lines.
    """
    groups = _groups(report)
    figure, axes = _figure(len(groups), 2, 11, 3.2 * len(groups))
    measures = {
        "mean_accepted": "tokens per round",
        "ratio_of_medians": "speed, plain decoding is 1 (medians)",
    }
    for row, (category, methods) in zip(axes, groups.items(), strict=True):
        for axis, (key, title) in zip(row, measures.items(), strict=True):
            _sweep_lines(axis, {name: f[key] for name, f in methods.items()}, report["sweep"])
            axis.set(title=f"{category}: {title}", xlabel=report["sweep"]["setting"])
            axis.grid(alpha=0.3)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7)
    _save(figure, file)


def _sweep_lines(axis: Any, values: dict[str, float], sweep: dict[str, Any]) -> None:
    """values: by the name of the run."""
    colors = import_pyplot().rcParams["axes.prop_cycle"].by_key()["color"]
    swept = {run for runs in sweep["lines"].values() for run in runs.values()}
    level = {name: (value, ":") for name, value in values.items() if name not in swept}
    for i, (name, runs) in enumerate(sweep["lines"].items()):
        color = colors[i % len(colors)]
        points = sorted((int(v), values[run]) for v, run in runs.items() if v != AUTO)
        if points:
            axis.plot(*zip(*points, strict=True), ".-", color=color, label=name)
        if AUTO in runs:
            label = f"{name}, {AUTO}"
            axis.axhline(values[runs[AUTO]], linestyle="--", color=color, label=label)
    for i, (name, (value, style)) in enumerate(level.items(), start=len(sweep["lines"])):
        color = "black" if name == "none" else colors[i % len(colors)]
        axis.axhline(value, linestyle=style, color=color, label=name)
