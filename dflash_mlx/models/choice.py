"""Which drafters a pair gets: those that can be used, and what stands in for one that cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import platformdirs

from dflash_mlx.core.config import AUTO, DecodeConfig, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import as_usual, family_wanted, formats
from dflash_mlx.engine.pair import Speeds
from dflash_mlx.models.check import ModelFacts
from dflash_mlx.models.names import Names, is_here
from dflash_mlx.models.parts import limited
from dflash_mlx.models.source import CONFIG, DRAFTER, SECOND_DRAFTER, Source
from dflash_mlx.system.machine import model_key


def with_own_head(names: Names, model: Source) -> Names:
    """Names with the head in the target's own folder as a drafter, in place of a known one's.

    Or with where to get one, where the folder lacks it. model: where the target is; a folder that
    cannot be read changes nothing.
    """
    if names.model is None or names.asks_first:
        return names
    with suppress(DFlashError):
        source = replace(model, option=DRAFTER)
        raw = source.read_json(CONFIG)
        made_with_one = next(filter(None, (each.lacking(raw) for each in formats())), "")
        family = limited(source, raw) if made_with_one else None
        if family is not None and source.part:
            if names.drafter is None:
                return replace(names, drafter=names.model)
            others = {**dict(names.others), family.family: names.model}
            return replace(names, others=tuple(others.items()))
        return replace(names, headless=made_with_one and f"{names.shown} {made_with_one}")
    return names


@dataclass
class Choice:
    """The drafters of a pair, the first one first."""

    names: dict[str, str] = field(default_factory=dict)  # by option, of further families by family
    asked: set[str] = field(default_factory=set)  # so that going without is an error
    missing: str = ""  # why there is none
    drafters: dict[str, ModelFacts] = field(default_factory=dict)  # as far as they are found
    notes: list[str] = field(default_factory=list)  # which was left out, a sentence each

    def each(self, read: Callable[[str], ModelFacts]) -> None:
        """Keep what `read` tells of each drafter, without those that it refuses if unasked for."""
        for option in list(self.names):
            try:
                if option in self.names:
                    self.drafters[option] = read(option)
            except DFlashError as error:
                if option in self.asked:
                    raise
                self._leave_out(option, error.what)

    def stand_in(self, others: Iterator[str], read: Callable[[str], ModelFacts]) -> None:
        """Take the first of these drafters that can be used in place of the one that cannot."""
        missing = self.missing
        for name in others:
            self.names[DRAFTER], self.missing = name, ""
            self.each(read)
            if not self.missing:
                self.notes = [f"{missing}, so {name} drafts"]
                return
        self.missing = missing

    def _leave_out(self, option: str, why: str) -> None:
        self.drafters.pop(option, None)
        name = f"the {option.replace('-', ' ')} {self.names.pop(option)}"
        reason = f"{name} cannot be used ({why})"
        if option == DRAFTER:
            for options in (self.names, self.drafters):
                options.pop(SECOND_DRAFTER, None)
            self.missing = reason
        else:
            self.notes = [f"{reason}, so the first one drafts alone"]

    def left(self, names: Names) -> list[tuple[str, str]]:
        """Known drafters that are not loaded, by family, "" where that is not known yet."""
        if self.missing:
            return []
        first_two = {DRAFTER: names.drafter, SECOND_DRAFTER: names.second_drafter}
        left = [(family, name) for family, name in names.others if family not in self.drafters]
        return left + [("", n) for o, n in first_two.items() if n and o not in self.drafters]


def fastest_first(
    names: Names, target: ModelFacts, config: PairConfig, uses: Sequence[DecodeConfig]
) -> Names:
    """Names with what was fastest here as the drafter, where several families are on the disk.

    The target's chat template stays as it was, so answers do. Nothing changes where a drafter or a
    method is named, or its sizes are set, and where the registry's method is a measured one.
    """
    known = (("", names.drafter or ""), *names.others)
    here = [(family, name) for family, name in known if name and is_here(name, DRAFTER)]
    named = any(family_wanted(use.method) or not as_usual(use) for use in uses)
    measured = names.preset.method != AUTO  # for the registry
    if named or measured or names.asks_second or len(here) < 2 or here[0] != known[0]:
        return names
    speeds = Speeds(speeds_file(target, config), names.shown, tuple(here)).stored()
    names, best = replace(names, speeds=speeds), speeds.best
    if best is None or best == (first := speeds.found[0]):
        return names
    its = [(first[0], name) for name in (names.drafter, names.second_drafter) if name]
    others = (*its, *(each for each in names.others if each[1] != best[1]))
    lineage = names.lineage.replace(first[1], best[1])
    return replace(names, drafter=best[1], second_drafter=None, others=others, lineage=lineage)


def speeds_file(target: ModelFacts, config: PairConfig) -> Path:
    """Where the speeds of drafters are kept for this target, machine and settings."""
    key = model_key(target.name, (), target.config, replace(config, model=None, template=()))
    return platformdirs.user_cache_path("dflash-chat") / "timing" / f"drafters-{key}.json"
