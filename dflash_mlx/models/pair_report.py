"""A pair's facts and what is wrong with it, in lines, from configurations and headers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import mlx.core as mx

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.findings import Finding, Refused
from dflash_mlx.models.compatibility import (
    DrafterFacts,
    LocalFolder,
    Report,
    TargetFacts,
    check_drafter,
    check_pair,
    check_target,
)
from dflash_mlx.models.compatibility.target_config import check_built
from dflash_mlx.models.compatibility.weight_files import Weights
from dflash_mlx.models.drafter_choice import Choice, Wanted, choose
from dflash_mlx.models.resolve import Names, find_names
from dflash_mlx.models.sources import source_as_it_is
from dflash_mlx.models.target_loading import find_target


def check_named(config: PairConfig) -> Report:
    """The pair that `load` would load; of what is not on this machine, the hub is asked.

    No weight is read or downloaded. Raises DFlashError for names that cannot be of a model.
    """
    names = find_names(config)
    if names.model is None:
        target = find_target(names).facts
    else:
        target = check_target(source_as_it_is(names.model, "model"), names.shown)
    choice = choose(names, ()).each(_checked_against(target))
    drafters = [drafter.facts for drafter in choice.drafters if drafter.facts is not None]
    report = check_pair(target, *drafters)
    findings = [*report.findings, *_left_out(choice, names)]
    if not report.errors and isinstance(target.source, LocalFolder) and target.source.files:
        findings += check_built(target.source)
    return replace(report, findings=tuple(findings))


def _checked_against(target: TargetFacts) -> Callable[[Wanted], Wanted]:
    """What finds the facts of a drafter; it refuses an unusable one that nobody asked for."""

    def check(drafter: Wanted) -> Wanted:
        facts = check_drafter(source_as_it_is(drafter.name, drafter.option), drafter.name)
        if not drafter.is_asked:
            for finding in check_pair(target, facts).errors:
                if finding not in target.findings:
                    raise Refused(finding)
        return replace(drafter, facts=facts)

    return check


def _left_out(choice: Choice, names: Names) -> Iterator[Finding]:
    """The drafters that are known but cannot be used, and what loading does instead."""
    step = "name another one with --drafter, or use the pair as it is"
    if choice.missing and names.drafter is not None:
        yield Finding("warning", f"{choice.missing}, so drafts are n-gram lookups", step)
    for note in choice.notes:
        yield Finding("warning", note, step)


def lines(report: Report) -> Iterator[str]:
    """The parts of a pair, the memory that it needs, every finding and its next step."""
    yield "pair"
    yield f"  target   {_target(report.target)}"
    for drafter in report.drafters:
        yield f"  drafter  {_drafter(drafter)}"
    if not report.drafters:
        yield "  drafter  none, so drafts are looked up in the text"
    if report.target.weights.tensors:
        on_cpu = bool(mx.default_device() == mx.Device(mx.cpu))
        how = " as float32 on this processor" if on_cpu else ""
        yield f"  memory   about {report.memory(on_cpu) / 2**30:.2f} GiB{how}"
    for finding in report.findings:
        yield f"  {finding.severity:<7}  {finding.what}"
        yield f"           {finding.next_step}"
    yield "  cannot be used" if report.errors else "  can be used"


def _target(facts: TargetFacts) -> str:
    parts = [facts.name, str(facts.config.get("model_type", "")), *_weights(facts.weights)]
    parts += [facts.quantisation, f"context {facts.context_length}" if facts.context_length else ""]
    return ", ".join(part for part in parts if part)


def _drafter(facts: DrafterFacts) -> str:
    parts = [facts.name, *_weights(facts.weights), facts.quantisation]
    if facts.config is not None:
        taps = ", ".join(map(str, facts.config.target_layer_ids))
        parts += [f"blocks of {facts.config.block_size}", f"reads layers {taps}"]
    return ", ".join(part for part in parts if part)


def _weights(weights: Weights) -> list[str]:
    return [f"{weights.parameters:,} parameters in {weights.dtype}"] if weights.tensors else []
