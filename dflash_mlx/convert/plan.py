"""What a conversion would do: its sources, found and checked, and their weights, not yet read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from dflash_mlx.convert.conversion import Conversion
from dflash_mlx.convert.drafter import plan_drafter
from dflash_mlx.convert.settings import ConvertConfig
from dflash_mlx.convert.source import Part, fetch, open_part
from dflash_mlx.convert.staging import check_space, resolve_destination
from dflash_mlx.convert.target import plan_target
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.check import DrafterFacts, TargetFacts, check_pair, describe_target
from dflash_mlx.models.pair_folder import DRAFTER, SECOND_DRAFTER, TARGET
from dflash_mlx.models.target_config import language_model

_KINDS = {TARGET: TARGET, DRAFTER: DRAFTER, SECOND_DRAFTER: DRAFTER}
ALONE = ""  # the part of a conversion that makes no pair: DST itself is its folder


@dataclass(frozen=True)
class Request:
    """What to convert. drafter, second_drafter: make a pair with the target `source`."""

    source: str
    destination: str
    drafter: str | None = None
    second_drafter: str | None = None

    def __post_init__(self) -> None:
        if self.second_drafter is not None and self.drafter is None:
            raise DFlashError("a second drafter needs a first one", "name one with --pair")

    @property
    def names(self) -> dict[str, str]:
        """The names of the models, by their folders in the destination."""
        if self.drafter is None:
            return {ALONE: self.source}
        names = {TARGET: self.source, DRAFTER: self.drafter}
        return (
            names if self.second_drafter is None else {**names, SECOND_DRAFTER: self.second_drafter}
        )


@dataclass(frozen=True)
class Plan:
    """Models and their conversions, by their folders in the destination."""

    destination: Path
    parts: Mapping[str, Part]
    conversions: Mapping[str, Conversion]

    @property
    def size(self) -> int:
        """Bytes of the destination, about."""
        return sum(conversion.size for conversion in self.conversions.values())

    @property
    def memory(self) -> int:
        """Bytes that converting takes at most, about."""
        return max(conversion.memory for conversion in self.conversions.values())

    @property
    def download(self) -> int:
        """Bytes still to be fetched."""
        return sum(part.download for part in self.parts.values())


def make_plan(request: Request, settings: ConvertConfig, scratch: Path) -> Plan:
    """All but fetching, reading and writing weights; DFlashError for what cannot be done.

    scratch: an empty folder to work in, for as long as the plan is used.
    """
    destination = resolve_destination(request.destination)
    if request.drafter is None and settings.drafter_bits is not None:
        raise DFlashError(
            "--drafter-bits is for the drafter of a pair", "use --bits, or add --pair"
        )
    parts = {}
    for place, name in request.names.items():
        heads = scratch / (place or "alone")
        heads.mkdir()
        parts[place] = part = open_part(name, heads)
        if part.kind != _KINDS.get(place, part.kind):
            raise DFlashError(
                f"{name} is a {part.kind}, not a {_KINDS[place]}",
                "give the target as SRC and the drafter with --pair",
            )
    return _plan(destination, parts, settings)


def fetched(plan: Plan, settings: ConvertConfig) -> Plan:
    """The same with all weights on this machine."""
    if all(part.has_weights for part in plan.parts.values()):
        return plan
    parts = {place: fetch(part) for place, part in plan.parts.items()}
    return _plan(plan.destination, parts, settings)


def _plan(destination: Path, parts: Mapping[str, Part], settings: ConvertConfig) -> Plan:
    """The conversions of what was found; DFlashError where the parts do not suit each other."""
    drafters = [part.facts for part in parts.values() if isinstance(part.facts, DrafterFacts)]
    for part in parts.values():
        if isinstance(part.facts, TargetFacts):
            check_pair(part.facts, *drafters).raise_first()
    conversions = {}
    for place, part in parts.items():
        if part.kind == DRAFTER:
            conversions[place] = plan_drafter(part, settings.of_drafter(paired=place != ALONE))
            continue
        conversions[place] = plan_target(part, settings)
        if part.facts is None:  # what a GGUF file is, its conversion tells
            config = language_model(conversions[place].config)
            check_pair(describe_target(config, part.name), *drafters).raise_first()
    return Plan(destination, parts, conversions)


def cache_folder() -> Path:
    """Where downloads go, or the nearest folder above it that is there."""
    folder = Path(constants.HF_HUB_CACHE)
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


def check_spaces(plan: Plan) -> None:
    """Raise DFlashError where the download, the result, or both on one disk, do not fit."""
    cache, parent = cache_folder(), plan.destination.parent
    needed, what = plan.size, str(plan.destination)
    if plan.download:
        check_space(cache, plan.download, "the download")
        if os.stat(cache).st_dev == os.stat(parent).st_dev:
            needed, what = needed + plan.download, f"{what} with the download"
    check_space(parent, needed, what)
