"""Which drafters a pair is loaded with, and which of them it can do without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.network import NetworkConfig
from dflash_mlx.drafters.methods import needs_drafter, settle
from dflash_mlx.engine.pair import Means
from dflash_mlx.models.compatibility import DrafterFacts, LocalFolder, TargetFacts, check_drafter
from dflash_mlx.models.compatibility import check_pair as check_compatible
from dflash_mlx.models.resolve import Names, local_folder, shipped_folder
from dflash_mlx.models.sources import fetched, find_source


@dataclass(frozen=True)
class Wanted:
    """A drafter before its weights are read.

    option: the command-line option that names it. is_asked: by its name or by a method, so that
    going without it is an error. facts: None until it was checked.
    """

    name: str
    option: str
    is_asked: bool
    facts: DrafterFacts | None = None

    @property
    def config(self) -> NetworkConfig:
        """Of the network, once it was checked."""
        assert self.facts is not None and self.facts.config is not None
        return self.facts.config

    @property
    def folder(self) -> Path:
        """Where it is, once it was downloaded."""
        assert self.facts is not None and isinstance(self.facts.source, LocalFolder)
        return self.facts.source.folder


@dataclass(frozen=True)
class Choice:
    """The drafters of a pair, the first and perhaps the second.

    missing: why there is none. notes: which was left out, a sentence each.
    """

    drafters: tuple[Wanted, ...] = ()
    missing: str = ""
    notes: tuple[str, ...] = ()

    @property
    def configs(self) -> list[NetworkConfig]:
        """Of the networks, once they were checked."""
        return [drafter.config for drafter in self.drafters]

    def each(self, read: Callable[[Wanted], Wanted]) -> Choice:
        """What `read` makes of the drafters, without those that it refuses and nobody asked for.

        Without a first drafter there is no second one either. Raises what `read` raises for a
        drafter that was asked for.
        """
        kept: list[Wanted] = []
        for drafter in self.drafters:
            try:
                kept.append(read(drafter))
            except DFlashError as error:
                if drafter.is_asked:
                    raise
                reason = f"the {drafter.option.replace('-', ' ')} {drafter.name} cannot be used"
                return self._up_to(kept, f"{reason} ({error.what})")
        return replace(self, drafters=tuple(kept))

    def _up_to(self, kept: list[Wanted], reason: str) -> Choice:
        if not kept:
            return Choice(missing=reason)
        return Choice(tuple(kept), notes=(*self.notes, f"{reason}, so the first one drafts alone"))


def choose(names: Names, uses: Sequence[DecodeConfig]) -> Choice:
    """The drafters that `uses` need, all that are known where there is no use; none is read yet.

    Raises DFlashError for the name of a folder that is not there, needed or not.
    """
    for name, option in ((names.drafter, "drafter"), (names.second_drafter, "second-drafter")):
        if name is not None and shipped_folder(name) is None:
            local_folder(name, option)
    methods = {settle(use, Means(2, advice=names.advice)).method for use in uses}
    if uses and not any(map(needs_drafter, methods)):
        return Choice(missing="no drafter was loaded, since no method that was asked for needs one")
    if names.drafter is None:
        return Choice(missing=f"no drafter is known for {names.shown}")
    return Choice(tuple(_wanted(names, uses, "d2sd" in methods or not uses)))


def _wanted(names: Names, uses: Sequence[DecodeConfig], needs_second: bool) -> Iterator[Wanted]:
    asked_methods = {use.method for use in uses}
    second, second_asked = names.second_drafter, names.asks_second or "d2sd" in asked_methods
    has_second = second is not None and needs_second
    first_asked = names.asks_first or any(map(needs_drafter, asked_methods))
    assert names.drafter is not None
    yield Wanted(names.drafter, "drafter", first_asked or (has_second and second_asked))
    if second is not None and has_second:
        yield Wanted(second, "second-drafter", second_asked)


def checked(drafter: Wanted) -> Wanted:
    """With its facts; DFlashError where there is no such drafter or no usable configuration."""
    facts = check_drafter(find_source(drafter.name, drafter.option), drafter.name)
    if facts.config is None:
        facts.raise_first()
    return replace(drafter, facts=facts)


def fitting(target: TargetFacts) -> Callable[[Wanted], Wanted]:
    """A check that a drafter has no error and fits the target."""

    def check(drafter: Wanted) -> Wanted:
        assert drafter.facts is not None
        check_compatible(target, drafter.facts).raise_first()
        return drafter

    return check


def downloaded(drafter: Wanted) -> Wanted:
    """With its weights on this machine, whose heads are checked again if they were not."""
    assert drafter.facts is not None
    if isinstance(drafter.facts.source, LocalFolder):
        return drafter
    folder = fetched(drafter.facts.source, drafter.option)
    facts = check_drafter(folder, drafter.name)
    facts.raise_first()
    return replace(drafter, facts=facts)


def already_packed(choice: Choice, bits: int | None) -> Iterator[str]:
    """A sentence for each drafter that `--drafter-bits` leaves as it is."""
    for drafter in choice.drafters:
        packed = drafter.config.quantization
        if packed is not None and bits is not None and bits != packed.bits:
            yield (
                f"the drafter {drafter.name} is packed in {packed.bits} bits already "
                f"and stays so, whatever --drafter-bits says"
            )
