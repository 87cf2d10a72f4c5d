"""Reports: JSON that a later run goes on with, and Markdown."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dflash_mlx.benchmark.measure import TERMS, MethodStats, RoundSize, Run, groups
from dflash_mlx.benchmark.selection import BenchmarkPrompt, describe_lengths
from dflash_mlx.core.config import PLAIN, DecodeConfig, PairConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.core.text import markdown, read_json_file
from dflash_mlx.core.tree import NearTies
from dflash_mlx.engine.exact import Difference
from dflash_mlx.engine.pair import Pair
from dflash_mlx.system.files import write_report
from dflash_mlx.system.machine import describe_machine, describe_versions

Report = dict[str, Any]
FINISHED, RUNS = "finished", "runs"
_ANEW = "leave --resume out to measure again, or name another file with --json"
_COUNTERS = ("drafted", "accepted", "modes")  # of Statistics
_CHANGES = ("drafter_bits", "kv_bits", "draft_window")  # of a pair
_TABLES: dict[str, dict[str, str]] = {  # what stands below a heading, in narrow tables
    "": {
        "tok/s": "{tokens_per_second:.1f}",
        "speed-up": "{speedup:.2f}",
        "tokens/round": "{mean_accepted:.2f}",
        "accepted": "{acceptance_rate:.0%}",
        "parity": "{parity:.1%}",
    },
    "Intervals of 95 %, the slowest prompt, and the ratio of the medians of speeds:": {
        "speed-up": "{intervals[speedup]}",
        "tokens/round": "{intervals[mean_accepted]}",
        "slowest": "{slowest}",
        "of medians": "{ratio_of_medians:.2f}",
    },
    "A round: rows, and milliseconds of its parts:": {
        "rows": "{rows_per_round:.1f}",
        **{term: f"{{round_ms[{term}]:.1f}}" for term in TERMS},
    },
}


def describe(pair: Pair, config: PairConfig) -> Report:
    """What is measured on what."""
    return {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "pair": {
            "target": pair.target.name,
            "drafter": pair.drafter_name,
            "drafters": list(pair.drafter_names),
            **{name: getattr(config, name) for name in _CHANGES},
            "notes": list(pair.notes),
        },
    }


def settings(
    asked: Sequence[BenchmarkPrompt],
    methods: Mapping[str, DecodeConfig],
    sampling: SamplingConfig,
) -> Report:
    """With what it is measured. prompts_hash: of all tokens, so that other prompts are noticed."""
    tokens = json.dumps([question.tokens for question in asked])
    return {
        "prompts": len(asked),
        "prompts_hash": hashlib.sha256(tokens.encode()).hexdigest()[:16],
        "prompt_tokens": describe_lengths(asked),
        "sampling": asdict(sampling),
        "methods": {name: _flat(method) for name, method in methods.items()},
    }


def _flat(config: DecodeConfig) -> Report:
    settings = asdict(config)
    own = settings.pop("options") or {}
    return settings | own


def save(file: Path, report: Report, runs: Sequence[Run] | None = None) -> None:
    """Write a report at once; DFlashError where that cannot be done.

    runs: of the prompts that are finished, where others are not; a later run reads them.
    """
    raw = {} if runs is None else {RUNS: [_packed(run) for run in runs]}
    whole, indent = {**report, FINISHED: runs is None, **raw}, None if raw else 1
    write_report(file, json.dumps(whole, indent=indent, default=asdict) + "\n")


def read_report(file: Path) -> Report:
    """A report to continue; DFlashError for anything else."""
    found: Report = read_json_file(file, _ANEW)
    told = found.get("settings") if isinstance(found, dict) and FINISHED in found else None
    if not isinstance(told, dict) or not isinstance(told.get("sampling"), dict):
        raise DFlashError(f"{file} is not the report of a benchmark that can be resumed", _ANEW)
    return found


def finished_runs(
    before: Report, report: Report, asked: Sequence[BenchmarkPrompt], file: Path
) -> list[Run]:
    """The runs of `before`; DFlashError where it was measured with other settings than `report`."""
    now = json.loads(json.dumps(report))
    for key in now:
        if changed := next(_changes(before.get(key), now[key], key), None):
            name, was, is_now = changed
            what = f"{file} was measured with {name} {was}, and now it is {is_now}"
            raise DFlashError(what, _ANEW)
    try:
        each = len(report["settings"]["methods"])  # runs of a prompt, one after the other
        runs = [_unpacked(raw, asked[i // each]) for i, raw in enumerate(before.get(RUNS, ()))]
        plain = {id(run.question): run.statistics for run in runs if run.method == PLAIN}
        return [replace(run, plain=plain[id(run.question)]) for run in runs]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise DFlashError(f"{file} is damaged ({error!r})", _ANEW) from None


def _changes(was: Any, now: Any, name: str) -> Iterator[tuple[str, str, str]]:
    """Where two values differ: the last key above it, and both."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*was, *now]):
            yield from _changes(was.get(key), now.get(key), key)
    elif was != now:
        yield name, repr(was)[:80], repr(now)[:80]


def _packed(run: Run) -> Report:
    """As JSON; the prompt goes by the place in the list, and the plain answer by its own run."""
    counts = {name: sorted(getattr(run.statistics, name).items()) for name in _COUNTERS}
    return {
        "method": run.method,
        "seconds": dict(run.seconds),
        "difference": run.difference,
        "statistics": vars(run.statistics) | counts,
        "rounds": run.rounds,
    }


def _unpacked(raw: Report, question: BenchmarkPrompt) -> Run:
    """The run, with its own statistics in place of the plain answer's."""
    told, apart = dict(raw["statistics"]), raw["difference"]
    told |= {name: Counter(dict(told[name])) for name in _COUNTERS}
    told["near_ties"] = told["near_ties"] and NearTies(**told["near_ties"])
    rounds, statistics = tuple(RoundSize(*each) for each in raw["rounds"]), Statistics(**told)
    difference = apart and Difference(**apart)
    return Run(question, raw["method"], statistics, raw["seconds"], rounds, statistics, difference)


def format_report(report: Report) -> str:
    """All methods by category, what the figures hold for, and rounds by tokens committed."""
    sections = ["\n".join(_notes(report))]
    for title, columns in _TABLES.items():
        rows = [
            [category, name, *(cell.format(**_readable(figures)) for cell in columns.values())]
            for category, methods in groups(report).items()
            for name, figures in methods.items()
        ]
        sections += [title, markdown(["category", "method", *columns], rows)]
    counts = {name: figures["committed"] for name, figures in report["methods"].items()}
    tokens = max(map(list, counts.values()), key=len)
    by_tokens = [[name, *(str(found.get(n, 0)) for n in tokens)] for name, found in counts.items()]
    sections += ["Rounds by tokens committed:", markdown(["method", *tokens], by_tokens)]
    return "\n\n".join(section for section in sections if section)


def _readable(figures: MethodStats) -> MethodStats:
    """With intervals and the slowest prompt as text, "" where there is none."""
    found: dict[str, list[float]] = figures.get("intervals", {})
    words = {name: f"[{ends[0]:.2f}, {ends[1]:.2f}]" for name, ends in found.items() if ends}
    slow = figures.get("slowest")  # which older reports lack
    slowest = f"{slow['speedup']:.2f}" if slow else ""
    return {**figures, "slowest": slowest, "intervals": defaultdict(str, words)}


def _notes(report: Report) -> Iterator[str]:
    settings, pair = report.get("settings", {}), report.get("pair", {})
    sampling = settings.get("sampling", {})
    if changed := [f"{name} {pair[name]}" for name in (*_CHANGES, "ranks") if pair.get(name)]:
        yield f"With {', '.join(changed)}."
    if sampling.get("temperature", 0) > 0:
        yield (
            f"Sampled at temperature {sampling['temperature']:g} with seed {sampling['seed']}; "
            "parity is with plain decoding by the same seed."
        )
    if (lengths := settings.get("prompt_tokens", {})).get("asked"):
        yield (
            f"Prompts padded with the text of other prompts: {lengths['shortest']} to "
            f"{lengths['longest']} tokens, {lengths['longer_than_asked']} longer than asked."
        )
