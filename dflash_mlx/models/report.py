"""What a pair is, what it needs and what is wrong with it, without reading or fetching a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import Finding
from dflash_mlx.models.check import DrafterFacts, Report, TargetFacts, check_pair
from dflash_mlx.models.names import Names, find_names
from dflash_mlx.models.parts import Choice, DrafterPart, TargetPart, choose
from dflash_mlx.models.target_config import check_built
from dflash_mlx.models.weight_files import Weights
from dflash_mlx.system.cpu_math import applies as on_cpu


def check_named(config: PairConfig) -> Report:
    """The pair that `load` would load; of what is not on this machine, the hub is asked.

    No weight is read or downloaded. Raises DFlashError for names that cannot be of a model.
    """
    names = find_names(config)
    target = TargetPart(names).checked(update=False).facts
    choice = choose(names, ()).each(_checked_against(target))
    report = check_pair(target, *(drafter.facts for drafter in choice.parts))
    findings = [*report.findings, *_left_out(choice, names)]
    if not report.errors and target.source is not None and target.source.folder is not None:
        findings += check_built(target.source.folder)
    return replace(report, findings=tuple(findings))


def _checked_against(target: TargetFacts) -> Callable[[DrafterPart], DrafterPart]:
    """What finds the facts of a drafter; it refuses an unusable one that nobody asked for."""

    def check(drafter: DrafterPart) -> DrafterPart:
        drafter = drafter.checked(update=False)
        if not drafter.is_asked:
            for finding in check_pair(target, drafter.facts).errors:
                if finding not in target.findings:
                    raise DFlashError(finding.what, finding.next_step)
        return drafter

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
        how = " as float32 on this processor" if on_cpu() else ""
        yield f"  memory   about {report.memory(on_cpu()) / 2**30:.2f} GiB{how}"
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
        taps = ", ".join(map(str, facts.config.taps))
        parts += [f"blocks of {facts.config.block_size}", f"reads layers {taps}" if taps else ""]
    return ", ".join(part for part in parts if part)


def _weights(weights: Weights) -> list[str]:
    return [f"{weights.parameters:,} parameters in {weights.dtype}"] if weights.tensors else []
