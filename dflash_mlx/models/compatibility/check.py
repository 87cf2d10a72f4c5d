"""Targets, drafters and pairs: what they are, and what keeps them from being used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mlx.core.findings import Checked, Collector, Finding, errors
from dflash_mlx.drafters.dflash.tensors import DOWNLOAD_AGAIN
from dflash_mlx.drafters.formats import FORMATS, FileFormat, format_of
from dflash_mlx.models.compatibility.model_source import (
    LocalFolder,
    ModelSource,
    Nowhere,
    read_json,
)
from dflash_mlx.models.compatibility.target_config import (
    check_code,
    check_numbers,
    check_sizes,
    context_length,
    family_findings,
    is_drafter,
    language_model,
    quantisation,
)
from dflash_mlx.models.compatibility.vocabularies import check_tokenizers
from dflash_mlx.models.compatibility.weight_files import Weights, check_weights

CHOOSE_TARGET = "choose a complete model folder of a family that mlx-lm supports"


@dataclass(frozen=True)
class ModelFacts(Checked):
    """What a folder says of its model. quantisation: in words, "" for none."""

    name: str
    source: ModelSource
    weights: Weights
    quantisation: str


@dataclass(frozen=True)
class TargetFacts(ModelFacts):
    """What a target is; empty or 0 where its folder does not tell.

    config: config.json with the language model's part on top. chains_only: why it verifies chains
    but no trees, "" where it can.
    """

    config: Mapping[str, Any]
    context_length: int
    chains_only: str


@dataclass(frozen=True)
class DrafterFacts(ModelFacts):
    """What a drafter is. format: who reads it. config: None where it cannot be read."""

    format: FileFormat
    config: Any


@dataclass(frozen=True)
class Report(Checked):
    """A target with its drafters: all findings, those of the configurations first."""

    target: TargetFacts
    drafters: tuple[DrafterFacts, ...]

    def memory(self, on_cpu: bool) -> int:
        """Bytes that the pair needs when loaded, about. on_cpu: as float32."""
        parts: tuple[ModelFacts, ...] = (self.target, *self.drafters)
        return sum(part.weights.memory(on_cpu) for part in parts)


def check_target(folder: Path | ModelSource, name: str = "") -> TargetFacts:
    """A target alone. folder: a folder here, or a source such as a `HubRepository`.

    name: what to call it, if not by its place. Never raises for what is in the folder.
    """
    source = LocalFolder(folder) if isinstance(folder, Path) else folder
    found = Collector()
    raw = found.attempt(read_json, source, "config.json") or {}
    config = language_model(raw)
    if raw:
        found.add(_wrong_way(source, is_drafter(raw), False))
        found.add(check_code(source, raw))
        found.add(check_numbers(source, config))
    weights = check_weights(source, "model*.safetensors", found, CHOOSE_TARGET)
    words, group_size = quantisation(raw)
    weights = Weights(weights.tensors, group_size)
    if weights.tensors:
        found.add(check_sizes(source, raw, weights))
    chains_only = ""
    if raw and not found.errors:  # mlx-lm makes lists of as many layers as it is told
        chains_only, findings = family_findings(source, raw)
        found.add(findings)
    length = context_length(config)
    return TargetFacts(
        found.result(), name or source.name, source, weights, words, config, length, chains_only
    )


def describe_target(config: Mapping[str, Any], name: str) -> TargetFacts:
    """A target of which only some numbers are known; `config` names them as config.json does."""
    length = context_length(config)
    return TargetFacts((), name, Nowhere(name), Weights({}), "", config, length, "")


def check_drafter(folder: Path | ModelSource, name: str = "") -> DrafterFacts:
    """A drafter alone; arguments as of `check_target`."""
    source = LocalFolder(folder) if isinstance(folder, Path) else folder
    found, config = Collector(), None
    raw = found.attempt(read_json, source, "config.json") or {}
    if raw:
        found.add(_wrong_way(source, is_drafter(raw), True))
        found.add(check_code(source, raw))
    readable, files = not found.errors, format_of(raw) or FORMATS[0]
    weights = check_weights(source, "*.safetensors", found, DOWNLOAD_AGAIN)
    words, group_size = quantisation(raw)
    weights = Weights(weights.tensors, group_size)
    too_large = errors(check_sizes(source, raw, weights)) if weights.tensors else ()
    found.add(too_large)
    if readable and not too_large:
        config = found.attempt(files.parse_config, raw, source.name, weights.tensors)
    if config is not None:
        step = "if nothing is accepted, compare it with how the drafter was trained"
        place = source.place("config.json")
        found.add(Finding("note", note, step, place) for note in config.notes)
        if weights.tensors or not found.errors:
            check = files.check_tensors(weights.tensors, config, source.name)
            found.add(found.attempt(lambda: [*check]) or ())
    return DrafterFacts(found.result(), name or source.name, source, weights, words, files, config)


def check_pair(target: TargetFacts, *drafters: DrafterFacts) -> Report:
    """A target with drafters: everything found in each, and whether they fit."""
    found = Collector()
    for drafter in drafters:
        found.add(check_fit(target, drafter))
    for part in (target, *drafters):
        found.add(part.findings)
    for drafter in drafters:
        if not found.errors:
            found.add(check_tokenizers(target.source, drafter.source))
    return Report(found.result(), target, drafters)


def check_fit(target: TargetFacts, drafter: DrafterFacts) -> Iterator[Finding]:
    """Each number of the two configurations that differs; nothing where one cannot be read."""
    if drafter.config is not None and target.config:
        place = drafter.source.place("config.json")
        names = target.name, drafter.name
        yield from drafter.format.misfits(drafter.config, target.config, *names, place)


def _wrong_way(source: ModelSource, is_one: bool, wanted: bool) -> Iterator[Finding]:
    """The error of a drafter given as target, or of a target given as drafter."""
    if is_one == wanted:
        return
    is_what, not_what = ("a target", "a drafter") if wanted else ("a drafter", "a target")
    option, other = ("--model", "--drafter") if wanted else ("--drafter", "--model")
    what = f"{source.name} is {is_what}, not {not_what}"
    step = f"give it with {option}, and choose {not_what} with {other}"
    yield Finding("error", what, step, source.place("config.json"), "", is_what, not_what)
