"""What a pair is, what it needs and what is wrong with it, without reading or fetching a weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.findings import Collector, Finding
from dflash_mlx.models.check import ModelFacts, Report, check_built, check_pair
from dflash_mlx.models.load import find
from dflash_mlx.models.names import find_names
from dflash_mlx.system.cpu_math import applies as on_cpu

_LEFT_OUT = "name another one with --drafter, or use the pair as it is"


def check_named(config: PairConfig) -> Report:
    """The pair that `load` would load; of what is not on this machine, the hub is asked.

    No weight is read or downloaded. Raises DFlashError for names that cannot be of a model.
    """
    names = find_names(config)
    target, choice = find(names, update=False)
    report, found = check_pair(target, *choice.drafters), Collector()
    found.add(report.findings)
    left_out = list(choice.notes)
    if choice.missing and names.drafter is not None:
        left_out.append(f"{choice.missing}, so drafts are n-gram lookups")
    found.add(Finding("warning", what, _LEFT_OUT) for what in left_out)
    if not report.errors and target.source is not None and target.source.folder is not None:
        found.attempt(check_built, target.source.folder)
    return replace(report, findings=found.result())


def lines(report: Report) -> Iterator[str]:
    """The parts of a pair, the memory that it needs, every finding and its next step."""
    yield "pair"
    yield f"  target   {_in_words(report.target)}"
    for drafter in report.drafters:
        yield f"  drafter  {_in_words(drafter)}"
    if not report.drafters:
        yield "  drafter  none, so drafts are looked up in the text"
    if report.target.weights.tensors:
        how = " as float32 on this processor" if on_cpu() else ""
        yield f"  memory   about {report.memory(on_cpu()) / 2**30:.2f} GiB{how}"
    for finding in report.findings:
        yield f"  {finding.severity:<7}  {finding.what}"
        yield f"           {finding.next_step}"
    yield "  cannot be used" if report.errors else "  can be used"


def _in_words(facts: ModelFacts) -> str:
    words, weights, last = [facts.name], facts.weights, ""
    if facts.format is None:
        words.append(str(facts.config.get("model_type", "")))
        last = f"context {facts.context_length}" if facts.context_length else ""
    elif facts.config is not None:
        taps = ", ".join(map(str, facts.config.taps))
        last = f"blocks of {facts.config.block_size}" + f", reads layers {taps}" * bool(taps)
    if weights.tensors:
        words.append(f"{weights.parameters:,} parameters in {weights.dtype}")
    return ", ".join(word for word in (*words, weights.quantisation, last) if word)
