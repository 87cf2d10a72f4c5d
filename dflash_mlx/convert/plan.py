"""What a conversion would do: its sources, found and checked, and their weights, not yet read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_mlx.convert import hub
from dflash_mlx.convert.conversion import DRAFTER, TARGET, Conversion
from dflash_mlx.convert.drafter import plan_drafter
from dflash_mlx.convert.settings import ConvertConfig
from dflash_mlx.convert.source import Source, open_source
from dflash_mlx.convert.staging import check_space, resolve_destination
from dflash_mlx.convert.target import plan_target
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import check_fit, read_config
from dflash_mlx.models import pair_folder
from dflash_mlx.models.check import check_drafter, check_pair, check_target
from dflash_mlx.models.target_config import language_model

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
    def parts(self) -> dict[str, str]:
        """The names of the models, by their folders in the destination."""
        if self.drafter is None:
            return {ALONE: self.source}
        parts = {pair_folder.TARGET: self.source, pair_folder.DRAFTER: self.drafter}
        if self.second_drafter is not None:
            parts[pair_folder.SECOND_DRAFTER] = self.second_drafter
        return parts


@dataclass(frozen=True)
class Plan:
    """Sources and conversions, by their folders in the destination."""

    destination: Path
    sources: Mapping[str, Source]
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
        return sum(source.download for source in self.sources.values())


def make_plan(request: Request, settings: ConvertConfig, scratch: Path) -> Plan:
    """All but fetching, reading and writing weights; DFlashError for what cannot be done.

    scratch: an empty folder to work in, for as long as the plan is used.
    """
    destination = resolve_destination(request.destination)
    if request.drafter is None and settings.drafter_bits is not None:
        raise DFlashError(
            "--drafter-bits is for the drafter of a pair", "use --bits, or add --pair"
        )
    sources = {}
    for part, name in request.parts.items():
        heads = scratch / (part or "alone")
        heads.mkdir()
        sources[part] = open_source(name, heads)
    return plan_sources(destination, sources, settings)


def plan_sources(destination: Path, sources: Mapping[str, Source], settings: ConvertConfig) -> Plan:
    """The conversions of what was found; DFlashError where it is damaged or does not suit."""
    for part, source in sources.items():
        _check_kind(part, source)
    _check_files(sources)
    conversions = {}
    for part, source in sources.items():
        if source.kind == TARGET:
            conversions[part] = plan_target(source, settings)
        else:
            conversions[part] = plan_drafter(source, settings.of_drafter(paired=part != ALONE))
    if (target := conversions.get(pair_folder.TARGET)) is not None:
        for source in sources.values():
            if source.kind == DRAFTER:  # once more, for a target without a config.json
                check_fit(read_config(source.path), language_model(target.config), target.name)
    return Plan(destination, sources, conversions)


def check_spaces(plan: Plan) -> None:
    """Raise DFlashError where the download, the result, or both on one disk, do not fit."""
    cache, parent = hub.cache_folder(), plan.destination.parent
    needed, what = plan.size, str(plan.destination)
    if plan.download:
        check_space(cache, plan.download, "the download")
        if os.stat(cache).st_dev == os.stat(parent).st_dev:
            needed, what = needed + plan.download, f"{what} with the download"
    check_space(parent, needed, what)


def _check_kind(part: str, source: Source) -> None:
    wanted = TARGET if part == pair_folder.TARGET else DRAFTER
    if part != ALONE and source.kind != wanted:
        raise DFlashError(
            f"{source.name} is a {source.kind}, not a {wanted}",
            "give the target as SRC and the drafter with --pair",
        )


def _check_files(sources: Mapping[str, Source]) -> None:
    """By configurations and heads of weight files; a GGUF file is checked where it is read."""
    drafters = [check_drafter(s.files) for s in sources.values() if s.kind == DRAFTER]
    targets = [s for s in sources.values() if s.kind == TARGET and not s.is_gguf]
    for drafter in drafters:
        drafter.raise_first()
    for source in targets:
        check_pair(check_target(source.files), *drafters).raise_first()
