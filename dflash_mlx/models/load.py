"""From names to a pair: which target and drafters there are, found, checked, fetched and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx

from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import read_config
from dflash_mlx.drafters.methods import check_uses, family_of, needs_drafter, settle, wants_two
from dflash_mlx.engine.pair import DraftModel, Means, Pair
from dflash_mlx.models.check import (
    ModelFacts,
    check_drafter,
    check_pair,
    check_target,
    describe_target,
    fetched,
    loading,
)
from dflash_mlx.models.names import SHIPPED, Names, find_names, find_source, target_names
from dflash_mlx.models.numeric_range import fit_drafter, fit_target
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.target.model import Target
from kernels_metal.dispatch import Mode

EMBEDDED_DRAFTER = "smollm2-135m-dflash"  # its config says what the embedded target is


def load(model: str | None = None, drafter: str | None = None) -> Pair:
    """Load a target and its drafter.

    model: a Hugging Face id, a local folder, or the folder of a converted pair; the embedded
    target by default. drafter: an id or a folder; by default the one that models.toml knows for
    the target. Where it knows none, or that one cannot be had, `Pair.undrafted` says so and the
    pair drafts by n-gram lookup. Raises DFlashError for what cannot be found or read, and for a
    drafter that was asked for and does not fit.
    """
    return load_pair(PairConfig(model, drafter))


def load_pair(config: PairConfig, *uses: DecodeConfig) -> Pair:
    """`load` from settings; whether all fits is checked before weights are read.

    On the hub it is checked before they are downloaded, by configurations and the heads of weight
    files, unless the hub does not answer such questions.
    uses: settings that the pair will be used with; DFlashError where it cannot serve them.
    """
    names = find_names(config)
    facts, choice = find(names, uses)
    facts.raise_first()
    _check_uses(names, uses, choice)
    choice = choice.each(lambda drafter: fetched(drafter.facts))  # the smaller ones first
    target, tokenizer = _read_target(fetched(facts))
    target.kv_bits = config.kv_bits
    notes = (*choice.notes, *_already_packed(choice.drafters, config.drafter_bits))
    notes += fit_target(target, [tap for drafter in choice.drafters for tap in drafter.config.taps])
    models = tuple(_read_drafter(drafter, target, config) for drafter in choice.drafters)
    notes += tuple(note for model in models for note in fit_drafter(model, target))
    target.use_kernels(cast(Mode, config.kernels))
    name = names.drafter if models else None
    return Pair(target, tokenizer, models, name, choice.missing, names.advice, notes)


def load_target(name: str | None = None) -> Pair:
    """A target alone, the default one without a name; raises as `load` does.

    Its kernels are off: they have no gradients, and batch work has more rows than they take.
    """
    facts = target_facts(target_names(name))
    facts.raise_first()
    return Pair(*_read_target(fetched(facts)))


def target_facts(names: Names, update: bool = True) -> ModelFacts:
    """What a target is, as far as that can be had without its weights.

    Of the embedded one these are a few numbers. update: as of `find_source`. Raises DFlashError
    where there is no such target.
    """
    if names.model is not None:
        return check_target(find_source(names.model, update=update), names.shown)
    drafter = read_config(SHIPPED / EMBEDDED_DRAFTER)
    config = {
        "hidden_size": drafter.hidden_size,
        "vocab_size": drafter.vocab_size,
        "num_hidden_layers": drafter.num_target_layers,
    }
    return describe_target(config, names.shown)


@dataclass(frozen=True)
class NamedDrafter:
    """A drafter on its way from a name to a network.

    option: the command-line option that names it. is_asked: by its name or by a method, so that
    going without it is an error. known: its facts, once it was checked.
    """

    name: str
    option: str
    is_asked: bool
    known: ModelFacts | None = None

    @property
    def facts(self) -> ModelFacts:
        """What it is, once it was checked."""
        assert self.known is not None
        return self.known


@dataclass(frozen=True)
class ChosenDrafters:
    """The drafters of a pair, the first and perhaps the second.

    missing: why there is none. notes: which was left out, a sentence each.
    """

    named: tuple[NamedDrafter, ...] = ()
    missing: str = ""
    notes: tuple[str, ...] = ()

    @property
    def drafters(self) -> list[ModelFacts]:
        """What they are, once they were checked."""
        return [drafter.facts for drafter in self.named]

    def each(self, read: Callable[[NamedDrafter], ModelFacts]) -> ChosenDrafters:
        """With what `read` tells, without drafters that it refuses and nobody asked for.

        Without a first drafter there is no second one either. Raises what `read` raises for a
        drafter that was asked for.
        """
        kept: list[NamedDrafter] = []
        for drafter in self.named:
            try:
                kept.append(replace(drafter, known=read(drafter)))
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
        return replace(self, named=tuple(kept))


def _choose(names: Names, uses: Sequence[DecodeConfig]) -> ChosenDrafters:
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
    first = NamedDrafter(names.drafter, "drafter", first_asked)
    if second is None:
        return ChosenDrafters((first,))
    return ChosenDrafters((first, NamedDrafter(second, "second-drafter", second_asked)))


def find(
    names: Names, uses: Sequence[DecodeConfig] = (), update: bool = True
) -> tuple[ModelFacts, ChosenDrafters]:
    """The target and the drafters that `uses` need, found and checked; no weight is fetched yet.

    Without `update`, as of `find_source`, a drafter that was asked for stays, whatever is wrong
    with it. Raises DFlashError for what cannot be found, and for a drafter that cannot be used but
    was asked for.
    """

    def found(drafter: NamedDrafter) -> ModelFacts:
        return check_drafter(find_source(drafter.name, drafter.option, update), drafter.name)

    def fitting(drafter: NamedDrafter) -> ModelFacts:
        for finding in check_pair(target, drafter.facts).errors:
            if finding not in target.findings and (update or not drafter.is_asked):
                raise DFlashError(finding.what, finding.next_step)
        return drafter.facts

    choice = _choose(names, uses).each(found)
    target = target_facts(names, update)
    return target, choice.each(fitting)


def _check_uses(names: Names, uses: Sequence[DecodeConfig], choice: ChosenDrafters) -> None:
    drafters = choice.drafters
    family = family_of(drafters[0].format) if drafters and drafters[0].format else None
    means = Means(len(drafters), advice=names.advice, family=family)
    check_uses(uses, [facts.config.block_size for facts in drafters], means, choice.missing)


def _read_target(facts: ModelFacts) -> tuple[Target, Any]:
    """The target and its tokenizer; on a CPU its weights become float32, the fast path there.

    DFlashError for what mlx-lm cannot load.
    """
    if facts.source is not None:
        model, tokenizer = _load_folder(facts)
        return Target(model, facts.context_length, facts.name), tokenizer
    from dflash_mlx.models.default_model import fetch
    from dflash_mlx.models.formats.gguf_target import load_gguf

    model, tokenizer, config = load_gguf(fetch(), dequantize=on_cpu())
    return Target(model, config["max_position_embeddings"], facts.name), tokenizer


def _load_folder(facts: ModelFacts) -> tuple[Any, Any]:
    from mlx_lm.utils import dequantize_model, load_model, load_tokenizer  # takes seconds

    with loading(facts.name):
        model, loaded = load_model(facts.folder)
        ends = loaded.get("eos_token_id")
        tokenizer = load_tokenizer(facts.folder, {"trust_remote_code": False}, eos_token_ids=ends)
        mx.eval(model(mx.array([[0]])))  # here, where it can be said, and not in the first answer
    if on_cpu():
        model.set_dtype(mx.float32)  # before, so that no product of scales is rounded
        model = dequantize_model(model)
        model.set_dtype(mx.float32)  # of formats whose scales are no floats
        mx.eval(model.parameters())
    return model, tokenizer


def _read_drafter(facts: ModelFacts, target: Target, config: PairConfig) -> DraftModel:
    assert facts.format is not None
    return facts.format.load(facts.folder, facts.config, target, config)


def _already_packed(drafters: Sequence[ModelFacts], bits: int | None) -> Iterator[str]:
    """A sentence for each drafter that `--drafter-bits` leaves as it is."""
    for drafter in drafters:
        packed = drafter.config.quantization
        if packed is not None and bits is not None and bits != packed.bits:
            yield (
                f"the drafter {drafter.name} is packed in {packed.bits} bits already "
                f"and stays so, whatever --drafter-bits says"
            )
