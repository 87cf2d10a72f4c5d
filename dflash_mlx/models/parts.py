"""A pair's target and drafters from names to facts: which there are, found, checked and fetched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import in_one_line
from dflash_mlx.drafters.dflash.checkpoint import read_config
from dflash_mlx.drafters.methods import check_uses, family_of, needs_drafter, settle, wants_two
from dflash_mlx.engine.pair import Means
from dflash_mlx.models.check import (
    CHOOSE_TARGET,
    DrafterFacts,
    TargetFacts,
    check_drafter,
    check_pair,
    check_target,
    describe_target,
    fetched,
)
from dflash_mlx.models.names import SHIPPED, Names, find_source
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.target.model import Target

EMBEDDED_DRAFTER = "smollm2-135m-dflash"  # its config says what the embedded target is


@dataclass(frozen=True)
class TargetPart:
    """A target on its way from a name to a model. known: its facts, once it was checked."""

    names: Names
    known: TargetFacts | None = None

    @property
    def facts(self) -> TargetFacts:
        """What it is, once it was checked."""
        assert self.known is not None
        return self.known

    def checked(self, update: bool = True) -> TargetPart:
        """With its facts, as far as they can be had without its weights.

        Of the embedded one these are a few numbers. update: as of `find_source`. Raises DFlashError
        where there is no such target.
        """
        name, shown = self.names.model, self.names.shown
        if name is not None:
            return replace(self, known=check_target(find_source(name, update=update), shown))
        drafter = read_config(SHIPPED / EMBEDDED_DRAFTER)
        config = {
            "hidden_size": drafter.hidden_size,
            "vocab_size": drafter.vocab_size,
            "num_hidden_layers": drafter.num_target_layers,
        }
        return replace(self, known=describe_target(config, shown))

    def fetched(self) -> TargetPart:
        """With its weights on this machine."""
        return replace(self, known=fetched(self.facts, check_target))

    def load(self) -> tuple[Target, Any]:
        """The target and its tokenizer; on a CPU its weights become float32, the fast path there.

        DFlashError for what mlx-lm cannot load.
        """
        name, source = self.facts.name, self.facts.source
        if source is not None:
            model, tokenizer = _load_folder(source.here, name)
            return Target(model, self.facts.context_length, name), tokenizer
        from dflash_mlx.models.default_model import fetch
        from dflash_mlx.models.formats.gguf_target import load_gguf

        model, tokenizer, config = load_gguf(fetch(), dequantize=on_cpu())
        return Target(model, config["max_position_embeddings"], name), tokenizer


def _load_folder(folder: Path, name: str) -> tuple[Any, Any]:
    from mlx_lm.utils import dequantize_model, load_model, load_tokenizer  # takes seconds

    try:
        model, loaded = load_model(folder)
        ends = loaded.get("eos_token_id")
        tokenizer = load_tokenizer(folder, {"trust_remote_code": False}, eos_token_ids=ends)
        mx.eval(model(mx.array([[0]])))  # here, where it can be said, and not in the first answer
    except Exception as error:  # of three libraries, one of which raises plain ones
        raise DFlashError(
            f"{name} cannot be loaded ({in_one_line(error)})", CHOOSE_TARGET
        ) from None
    if on_cpu():
        model.set_dtype(mx.float32)  # before, so that no product of scales is rounded
        model = dequantize_model(model)
        model.set_dtype(mx.float32)  # of formats whose scales are no floats
        mx.eval(model.parameters())
    return model, tokenizer


@dataclass(frozen=True)
class DrafterPart:
    """A drafter on its way from a name to a network.

    option: the command-line option that names it. is_asked: by its name or by a method, so that
    going without it is an error. known: its facts, once it was checked.
    """

    name: str
    option: str
    is_asked: bool
    known: DrafterFacts | None = None

    @property
    def facts(self) -> DrafterFacts:
        """What it is, once it was checked."""
        assert self.known is not None
        return self.known

    def checked(self, update: bool = True) -> DrafterPart:
        """With its facts; DFlashError where there is no such drafter. update: of `find_source`."""
        source = find_source(self.name, self.option, update)
        return replace(self, known=check_drafter(source, self.name))

    def readable(self) -> DrafterPart:
        """Checked; DFlashError where there is no such drafter, or no usable config.json."""
        part = self.checked()
        if part.facts.config is None:
            part.facts.raise_first()
        return part

    def fetched(self) -> DrafterPart:
        """With its weights on this machine."""
        return replace(self, known=fetched(self.facts, check_drafter))


@dataclass(frozen=True)
class ChosenDrafters:
    """The drafters of a pair, the first and perhaps the second.

    missing: why there is none. notes: which was left out, a sentence each.
    """

    parts: tuple[DrafterPart, ...] = ()
    missing: str = ""
    notes: tuple[str, ...] = ()

    def each(self, read: Callable[[DrafterPart], DrafterPart]) -> ChosenDrafters:
        """What `read` makes of the drafters, without those that it refuses and nobody asked for.

        Without a first drafter there is no second one either. Raises what `read` raises for a
        drafter that was asked for.
        """
        kept: list[DrafterPart] = []
        for drafter in self.parts:
            try:
                kept.append(read(drafter))
            except DFlashError as error:
                if drafter.is_asked:
                    raise
                words = drafter.option.replace("-", " ")
                reason = f"the {words} {drafter.name} cannot be used ({error.what})"
                if not kept:
                    return ChosenDrafters(missing=reason)
                return ChosenDrafters(
                    tuple(kept), notes=(f"{reason}, so the first one drafts alone",)
                )
        return replace(self, parts=tuple(kept))


def find_parts(names: Names, uses: Sequence[DecodeConfig]) -> tuple[TargetPart, ChosenDrafters]:
    """The target and the drafters that `uses` need, found, checked and fetched.

    All is checked before any weight is fetched. Raises DFlashError for what cannot be had or used,
    unless it can be done without.
    """
    choice = choose(names, uses).each(DrafterPart.readable)
    family = family_of(choice.parts[0].facts.format) if choice.parts else None
    means = Means(len(choice.parts), advice=names.advice, family=family)
    blocks = [part.facts.config.block_size for part in choice.parts]
    check_uses(uses, blocks, means, choice.missing)
    target = TargetPart(names).checked()
    facts = target.facts
    if not facts.config:
        facts.raise_first()

    def fitting(drafter: DrafterPart) -> DrafterPart:
        check_pair(facts, drafter.facts).raise_first()
        return drafter

    choice = choice.each(fitting)
    facts.raise_first()
    choice = choice.each(DrafterPart.fetched)  # the smaller ones first
    return target.fetched(), choice


def choose(names: Names, uses: Sequence[DecodeConfig]) -> ChosenDrafters:
    """The drafters that `uses` need, all that are known where there is no use; none is read yet."""
    methods = {settle(use, Means(2, advice=names.advice)).method for use in uses}
    if uses and not any(map(needs_drafter, methods)):
        return ChosenDrafters(
            missing="no drafter was loaded, since no method that was asked for needs one"
        )
    if names.drafter is None:
        return ChosenDrafters(missing=f"no drafter is known for {names.shown}")
    asked_methods = {use.method for use in uses}
    second = names.second_drafter if any(map(wants_two, methods)) or not uses else None
    second_asked = second is not None and (names.asks_second or any(map(wants_two, asked_methods)))
    first_asked = names.asks_first or any(map(needs_drafter, asked_methods)) or second_asked
    first = DrafterPart(names.drafter, "drafter", first_asked)
    if second is None:
        return ChosenDrafters((first,))
    return ChosenDrafters((first, DrafterPart(second, "second-drafter", second_asked)))
