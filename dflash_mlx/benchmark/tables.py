"""A report as Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from dflash_mlx.benchmark.measure import TERMS
from dflash_mlx.benchmark.method_stats import MethodStats, groups

CHANGES = ("drafter_bits", "kv_bits", "draft_window")  # of a pair, in its own report
# What stands in a column, by its heading.
_COLUMNS = {
    "tok/s": "{tokens_per_second:.1f}",
    "speed-up": "{speedup:.2f} {intervals[speedup]}",
    "tokens/round": "{mean_accepted:.2f} {intervals[mean_accepted]}",
    "rows/round": "{rows_per_round:.1f}",
    "accepted": "{acceptance_rate:.0%}",
    "parity": "{parity:.1%}",
    **{f"{term} ms": f"{{round_ms[{term}]:.1f}}" for term in TERMS},
}
_SWEPT = {
    **{heading: _COLUMNS[heading] for heading in ("tokens/round", "rows/round", "tok/s")},
    "of plain (medians)": "{ratio_of_medians:.2f}",
    "of plain (paired)": "{speedup:.2f}",
}


def format_report(report: dict[str, Any]) -> str:
    """All tables that the report has figures for, the comparison of the methods first."""
    methods = report["methods"]
    sections = [
        _table("", ["category", "method", *_COLUMNS], _rows(report, _COLUMNS)),
        _notes(report),
        _histogram(methods),
        _guard(methods),
    ]
    if "sweep" in report:
        sections.append(_sweep(report, **report["sweep"]))
    return "\n\n".join(section for section in sections if section)


def _rows(report: dict[str, Any], columns: dict[str, str]) -> list[list[str]]:
    """One per category and method."""
    return [
        [category, name, *(cell.format(**_readable(figures)).strip() for cell in columns.values())]
        for category, methods in groups(report).items()
        for name, figures in methods.items()
    ]


def _readable(figures: MethodStats) -> MethodStats:
    """With intervals in words, "" where there is none."""
    found: dict[str, list[float]] = figures.get("intervals", {})
    words = {name: f"[{ends[0]:.2f}, {ends[1]:.2f}]" for name, ends in found.items() if ends}
    return {**figures, "intervals": defaultdict(str, words)}


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table below its title; nothing where it has no rows."""
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return (f"{title}:\n\n{table}" if title else table) if rows else ""


def _notes(report: dict[str, Any]) -> str:
    """What the figures hold for, where it is not the usual."""
    notes = []
    settings, pair = report.get("settings", {}), report.get("pair", {})
    sampling = settings.get("sampling", {})
    changed = [f"{name} {pair[name]}" for name in (*CHANGES, "ranks") if pair.get(name)]
    if changed:
        notes.append(f"With {', '.join(changed)}.")
    if sampling.get("temperature", 0) > 0:
        notes.append(
            f"Sampled at temperature {sampling['temperature']:g} with seed {sampling['seed']}; "
            "parity is with plain decoding by the same seed."
        )
    if (lengths := settings.get("prompt_tokens", {})).get("asked"):
        notes.append(
            f"Prompts padded with the text of other prompts: {lengths['shortest']} to "
            f"{lengths['longest']} tokens, {lengths['longer_than_asked']} longer than asked."
        )
    for name, figures in report["methods"].items():
        if figures["modes"]:
            listed = ", ".join(f"{mode} {n}" for mode, n in sorted(figures["modes"].items()))
            notes.append(f"Rounds of {name} by mode: {listed}.")
    return "\n".join(notes)


def _histogram(methods: dict[str, MethodStats]) -> str:
    counts: dict[str, dict[str, int]] = {name: f["committed"] for name, f in methods.items()}
    tokens = max(map(list, counts.values()), key=len)
    rows = [[name, *(str(found.get(n, 0)) for n in tokens)] for name, found in counts.items()]
    return _table("Rounds by tokens committed", ["method", *tokens], rows)


def _guard(methods: dict[str, MethodStats]) -> str:
    """What the near-tie guard did, where it did anything."""
    rows = []
    for name, figures in methods.items():
        tokens = sum(int(n) * rounds for n, rounds in figures["committed"].items())
        rows.append([name, str(tokens), *(f"{n:.6g}" for n in figures["guard"].values())])
    if not any(any(figures["guard"].values()) for figures in methods.values()):
        return ""
    keys = [key.removeprefix("guard_").replace("_", " ") for key in figures["guard"]]
    return _table("Near-tie guard, over all answers", ["method", "tokens", *keys], rows)


def _sweep(report: dict[str, Any], setting: str, lines: dict[str, dict[str, str]]) -> str:
    """Every value of the swept setting by category, and the runs without it beside them."""
    value_of = {run: [name, v] for name, runs in lines.items() for v, run in runs.items()}
    rows = [
        [category, *value_of.get(run, [run, ""]), *cells]
        for category, run, *cells in _rows(report, _SWEPT)
    ]
    return _table(f"Sweep over {setting}", ["category", "method", setting, *_SWEPT], rows)
