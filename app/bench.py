"""A short benchmark in the chat: what it is asked for, how it goes, and its table with bars."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_chat.figures import wide_bar
from dflash_chat.naming import method_name
from dflash_mlx.client import (
    NO_DRAFTS,
    BenchStep,
    Capabilities,
    DFlashError,
    Pair,
    PairConfig,
    SamplingConfig,
    bench,
    save_bench,
    what_pays,
)

_LABEL = 26
_FIGURES = "{tokens_per_second:7.1f} {mean_accepted:13.2f} {parity:7.0%} {speedup:8.2f} "
_HEAD = f"{'':<{_LABEL}}  tok/s  tokens/round    same  x plain"


@dataclass(frozen=True)
class BenchRequest:
    """pair: as it was loaded. methods: () for all that it serves. folder: for the reports."""

    pair: PairConfig
    sampling: SamplingConfig
    methods: tuple[str, ...]
    folder: Path


@dataclass(frozen=True)
class BenchResult:
    """What pays on this machine, a sentence; and where the report lies."""

    text: str
    saved: str


def run_bench(pair: Pair, asked: BenchRequest) -> Iterator[BenchStep | BenchResult]:
    """Every step, then the result. What is finished is also saved where nobody waits for more."""
    step = BenchStep(0, 1)
    try:
        for step in bench(pair, asked.pair, asked.sampling, asked.methods):
            yield step
    except GeneratorExit:
        if step.prompts:
            _save(step, asked.folder)
        raise
    yield BenchResult(what_pays(step.report, pair.capabilities), _save(step, asked.folder))


def _save(step: BenchStep, folder: Path) -> str:
    try:
        return f"Saved as {save_bench(step.report, folder, step.prompts)}."
    except DFlashError as error:
        return f"Not saved: {error}."


def table(report: dict[str, Any], capabilities: Capabilities, width: int) -> list[str]:
    """A line for each method with a bar for its speed, then the fastest one's by kind of prompt.

    All bars have one scale. width: of a line; without room for bars there are none.
    capabilities: of the pair, for names.
    """
    methods = report["methods"]
    best = max(methods, key=lambda name: methods[name]["speedup"])
    kinds = {kind: found[best] for kind, found in report["categories"].items()}
    most = max(figures["speedup"] for figures in (*methods.values(), *kinds.values())) or 1.0

    def line(label: str, figures: dict[str, Any]) -> str:
        told = f"{label[:_LABEL]:<{_LABEL}}{_FIGURES.format(**figures)}"
        return told + wide_bar(figures["speedup"] / most, width - len(told))

    lines = [_HEAD, *(line(_label(name, capabilities), methods[name]) for name in methods)]
    if best != NO_DRAFTS:
        lines += ["", f"{_label(best, capabilities)} by kind of prompt"]
        lines += [line(f"  {kind}", kinds[kind]) for kind in kinds]
    return lines


def _label(name: str, capabilities: Capabilities) -> str:
    method, colon, own = name.partition(":")
    return f"{method_name(method, capabilities)}{colon and ', '}{own}"
