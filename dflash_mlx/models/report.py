"""A pair told without loading it: what it is, what is known of its drafters, and all findings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dflash_mlx.core.amounts import amount
from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.findings import Collector, Finding
from dflash_mlx.models.check import ModelFacts, Report, check_built, check_pair
from dflash_mlx.models.load import find, names_for
from dflash_mlx.models.names import Names
from dflash_mlx.models.registry import registered
from dflash_mlx.system.cpu_math import applies as on_cpu

_LEFT_OUT = "name another one with --drafter, or use the pair as it is"
_IF_NOT = "drafts are checked, so answers are right; if few are accepted, name another --drafter"


def check_named(config: PairConfig) -> Report:
    """The pair that `load` would load; of what is not on this machine, the hub is asked.

    No weight is read or downloaded. Raises DFlashError for names that cannot be of a model.
    """
    names = names_for(config)
    target, choice = find(names, update=False)
    report, found = check_pair(target, *choice.drafters.values()), Collector()
    found.add(report.findings)
    left_out = list(choice.notes)
    if choice.missing and names.drafter is not None:
        left_out.append(f"{choice.missing}, so drafts are n-gram lookups")
    found.add(Finding("warning", what, _LEFT_OUT) for what in left_out)
    found.add(_on_drafters(names, bool(choice.drafters)))
    if not report.errors and target.source is not None and target.source.folder is not None:
        found.attempt(check_built, target.source.folder)
    return replace(report, findings=found.result())


def _on_drafters(names: Names, has_some: bool) -> Iterator[Finding]:
    """What to know of the registry's drafters for a target."""
    if names.lineage and has_some:
        yield Finding("note", names.lineage, "name another one with --drafter")
    entry = registered(names.made_from or names.shown)
    if entry is None or names.drafter is None:
        return
    if names.drafter == entry.drafter and not entry.verified:
        what = f"{entry.drafter} is not verified: it was published for {entry.name}, but this "
        yield Finding("note", f"{what}program was never tried with its files", _IF_NOT)
    if entry.more:
        what = f"other drafters are known for {entry.name}: {entry.more}"
        yield Finding(
            "note", what, "name one with --drafter, or the family in brackets as --method"
        )


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
        yield f"  memory   about {amount(report.memory(on_cpu()))}{how}"
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
        aux_layers = ", ".join(map(str, facts.config.aux_layers or ()))
        last = f"blocks of {facts.config.block_size}" + f", reads layers {aux_layers}" * bool(
            aux_layers
        )
    if weights.tensors:
        words.append(f"{weights.parameters:,} parameters in {weights.dtype}")
    return ", ".join(word for word in (*words, weights.quantisation, last) if word)
