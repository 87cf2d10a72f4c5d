"""A report as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_mlx.benchmark.measure import TERMS
from dflash_mlx.benchmark.rounds import BINS

Figures = dict[str, Any]


def format_report(report: dict[str, Any]) -> str:
    """All tables that the report has figures for, the comparison of the methods first."""
    sections = [
        format_table(report),
        _notes(report),
        _histogram(report["methods"]),
        _reliability(report["methods"]),
        _merging(report["methods"]),
        _guard(report["methods"]),
        _sweep(report),
    ]
    return "\n\n".join(section for section in sections if section)


def format_table(report: dict[str, Any]) -> str:
    """One row per category and method."""
    header = ["category", "method", "tok/s", "speed-up", "tokens/round", "rows/round"]
    header += ["accepted", "parity", *(f"{term} ms" for term in TERMS)]
    return _table(header, [_row(*each) for each in _every(report)])


def _every(report: dict[str, Any]) -> list[tuple[str, str, Figures]]:
    """Category, method and figures; all categories together first."""
    groups = {"all": report["methods"], **report["categories"]}
    return [(category, name, f) for category, group in groups.items() for name, f in group.items()]


def _row(category: str, method: str, figures: Figures) -> list[str]:
    return [
        category,
        method,
        f"{figures['tokens_per_second']:.1f}",
        f"{figures['speedup']:.2f}",
        f"{figures['mean_accepted']:.2f}",
        f"{figures['rows_per_round']:.1f}",
        f"{figures['acceptance_rate']:.0%}",
        f"{figures['parity']:.1%}",
        *(f"{figures['round_ms'][term]:.1f}" for term in TERMS),
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _notes(report: dict[str, Any]) -> str:
    """What the figures hold for, where it is not the usual."""
    notes = []
    settings = report.get("settings", {})
    sampling = settings.get("sampling", {})
    pair = report.get("pair", {})
    changed = [f"{k} {pair[k]}" for k in ("drafter_bits", "kv_bits", "draft_window") if pair.get(k)]
    if changed:
        notes.append(f"With {', '.join(changed)}.")
    if sampling.get("temperature", 0) > 0:
        notes.append(
            f"Sampled at temperature {sampling['temperature']:g} with seed {sampling['seed']}; "
            "parity is with plain decoding by the same seed."
        )
    lengths = settings.get("prompt_tokens", {})
    if lengths.get("asked"):
        notes.append(
            f"Prompts padded with the text of other prompts: {lengths['shortest']} to "
            f"{lengths['longest']} tokens, {lengths['longer_than_asked']} longer than asked."
        )
    modes = {name: figures["modes"] for name, figures in report["methods"].items()}
    for name, counts in modes.items():
        if counts:
            listed = ", ".join(f"{mode} {count}" for mode, count in sorted(counts.items()))
            notes.append(f"Rounds of {name} by mode: {listed}.")
    return "\n".join(notes)


def _histogram(methods: dict[str, Figures]) -> str:
    """Rounds by tokens committed."""
    most = max(len(figures["committed"]) for figures in methods.values())
    columns = [str(tokens) for tokens in range(1, most + 1)]
    rows = [
        [name, *(str(figures["committed"].get(tokens, 0)) for tokens in columns)]
        for name, figures in methods.items()
    ]
    return "Rounds by tokens committed:\n\n" + _table(["method", *columns], rows)


def _reliability(methods: dict[str, Figures]) -> str:
    """Share of drafted tokens accepted after their parent, by the drafter's confidence."""
    without = [name for name, figures in methods.items() if figures["reliability"] is None]
    rows = [
        [name, depth, *_reliability_cells(diagram)]
        for name, figures in methods.items()
        for depth, diagram in (figures["reliability"] or {}).items()
    ]
    parts = []
    if rows:
        bins = [f"{i / BINS:.1f}-{(i + 1) / BINS:.1f}" for i in range(BINS)]
        header = ["method", "depth", *bins, "error"]
        title = "Accepted after an accepted parent (of so many nodes), by drafter confidence:"
        parts.append(f"{title}\n\n{_table(header, rows)}")
    if without:
        names = ", ".join(without)
        parts.append(f"No reliability diagram where trees carry no confidences: {names}.")
    return "\n\n".join(parts)


def _reliability_cells(diagram: dict[str, Any]) -> list[str]:
    cells = [""] * BINS
    for found in diagram["bins"]:
        cells[found["bin"]] = f"{found['accepted']:.0%} ({found['nodes']})"
    return [*cells, f"{diagram['calibration_error']:.3f}"]


def _merging(methods: dict[str, Figures]) -> str:
    """Merged branches against separate ones."""
    rows = []
    for name, figures in methods.items():
        if (merging := figures["merging"]) is not None:
            merged, separate = merging["merged_rows"], merging["separate_rows"]
            cells = [f"{merged:.1f}", f"{separate:.1f}", f"{1 - merged / separate:.0%}"]
            timed = [merging.get("merged_ms"), merging.get("separate_ms")]
            rows.append([name, *cells, *("" if ms is None else f"{ms:.1f}" for ms in timed)])
    if not rows:
        return ""
    header = ["method", "merged rows", "separate rows", "saved", "merged ms", "separate ms"]
    title = "Rows per round, branches merged and as separate blocks, and target passes of that size"
    return f"{title}:\n\n{_table(header, rows)}"


def _guard(methods: dict[str, Figures]) -> str:
    """What the near-tie guard did, where it did anything."""
    counts = {name: figures["guard"] for name, figures in methods.items()}
    if not any(any(found.values()) for found in counts.values()):
        return ""
    keys = list(dict.fromkeys(key for found in counts.values() for key in found))
    header = ["method", "tokens", *(key.removeprefix("guard_").replace("_", " ") for key in keys)]
    rows = [
        [name, str(_tokens(methods[name])), *(f"{found.get(key, 0):.6g}" for key in keys)]
        for name, found in counts.items()
    ]
    return f"Near-tie guard, over all answers:\n\n{_table(header, rows)}"


def _tokens(figures: Figures) -> int:
    """Tokens of all answers."""
    return sum(int(tokens) * rounds for tokens, rounds in figures["committed"].items())


def _sweep(report: dict[str, Any]) -> str:
    """Every value of the swept setting by category, and the runs without it beside them."""
    if "sweep" not in report:
        return ""
    setting, lines = report["sweep"]["setting"], report["sweep"]["lines"]
    value_of = {run: (name, v) for name, runs in lines.items() for v, run in runs.items()}
    rows = []
    for category, run, figures in _every(report):
        name, value = value_of.get(run, (run, ""))
        rows.append([category, name, value, *_sweep_cells(figures)])
    header = ["category", "method", setting, "tokens/round", "rows/round", "tok/s"]
    header += ["of plain (medians)", "of plain (paired)"]
    return f"Sweep over {setting}:\n\n{_table(header, rows)}"


def _sweep_cells(figures: Figures) -> list[str]:
    return [
        f"{figures['mean_accepted']:.2f}",
        f"{figures['rows_per_round']:.1f}",
        f"{figures['tokens_per_second']:.1f}",
        f"{figures['ratio_of_medians']:.2f}",
        f"{figures['speedup']:.2f}",
    ]
