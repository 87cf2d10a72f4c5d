"""From names to a pair: which target and drafters there are, found, checked, told or loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from dflash_mlx.core.config import AUTO, DecodeConfig, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.formats import aux_layers_of
from dflash_mlx.drafters.methods import (
    check_uses,
    family_of,
    family_wanted,
    find_method,
    needs_drafter,
    settle,
    wants_two,
)
from dflash_mlx.engine.pair import Capabilities, DraftModel, Pair, Preset
from dflash_mlx.models.check import (
    ModelFacts,
    check_drafter,
    check_pair,
    fetched,
)
from dflash_mlx.models.lineage import inherited
from dflash_mlx.models.names import (
    Names,
    find_names,
    find_source,
    target_names,
)
from dflash_mlx.models.numeric_range import fit_drafter, fit_target
from dflash_mlx.models.pair_folder import DRAFTER, SECOND_DRAFTER
from dflash_mlx.models.targets import WHOLE, TargetReader, read_target, target_facts
from dflash_mlx.models.tokens import draft_size, likely_tokens, unread_arguments
from dflash_mlx.models.weight_files import Weights
from dflash_mlx.verifier.model import Target
from kernels_metal.dispatch import Mode


def load(model: str | None = None, drafter: str | None = None) -> Pair:
    """Load a target and its drafter.

    model: a Hugging Face id, a local folder, the folder of a converted pair, or a GGUF file; the
    embedded target by default. drafter: an id or a folder; by default the one that models.toml
    knows for the target. Where it knows none, or that one cannot be had, `Pair.undrafted` says so
    and the pair drafts by n-gram lookup. Raises DFlashError for what cannot be found or read, and
    for a drafter that was asked for and does not fit.
    """
    return load_pair(PairConfig(model, drafter))


def load_pair(config: PairConfig, *uses: DecodeConfig, reader: TargetReader = WHOLE) -> Pair:
    """`load` from settings; whether all fits is checked before weights are read.

    On the hub it is checked before they are downloaded, by configurations and the heads of weight
    files, unless the hub does not answer such questions.
    uses: settings that the pair will be used with; DFlashError where it cannot serve them. reader:
    of the target.
    """
    names = names_for(config, uses)
    facts, choice = find(names, uses)
    facts.raise_first()
    reader.check(facts)
    drafters = list(choice.drafters.values())
    families = tuple(family_of(d.format) if d.format else None for d in drafters)
    capabilities = Capabilities(families, preset=names.preset)
    check_uses(uses, [d.config.block_size for d in drafters], capabilities, choice.missing)
    sizes = [_draft_size(config, drafter) for drafter in drafters]
    chosen = set(choice.drafters)
    choice = choice.each(lambda _, drafter: fetched(drafter))  # the smaller ones first
    drafters = list(choice.drafters.values())
    facts = fetched(facts)
    target, tokenizer = reader.read(facts, config)
    target.kv_bits = config.kv_bits
    notes = choice.notes + _on_packing(drafters, config)
    notes += (names.lineage,) * bool(names.lineage and drafters)
    layers = target.num_layers
    notes += fit_target(target, [tap for d in drafters for tap in aux_layers_of(d.config, layers)])
    models = [_read_drafter(drafter, target, config) for drafter in drafters]
    notes += tuple(note for model in models for note in fit_drafter(model, target))
    for model, drafter, size in zip(models, drafters, sizes, strict=False):
        _limit(model, drafter, target, tokenizer, size, config)
    first_two = {DRAFTER: names.drafter, SECOND_DRAFTER: names.second_drafter}
    left = [(f, n) for f, n in names.others if f not in chosen]
    left += [("", n) for o, n in first_two.items() if n and o not in chosen]
    known = [] if choice.missing else left
    further = partial(_load_further, known, facts, config)
    target.use_kernels(cast(Mode, config.kernels))
    asked = config.template_arguments
    notes += tuple(_on_template(tokenizer, target.name, asked, names.preset))
    first = drafters[0].name if drafters else None
    pair = Pair(target, tokenizer, tuple(models), first, choice.missing, names.preset, notes)
    template = dict(names.preset.template) | asked
    all_names = tuple([drafter.name for drafter in drafters] + [name for _, name in known])
    pair = replace(pair, template=template, drafter_names=all_names)
    return replace(pair, further=lambda family: further(family, target, tokenizer))


def _on_packing(drafters: Sequence[ModelFacts], config: PairConfig) -> tuple[str, ...]:
    """Which drafters stay as they are, whatever bits were asked for."""
    return tuple(
        f"the drafter {drafter.name} is packed in {packed.bits} bits already and stays so, "
        "whatever --drafter-bits says"
        for drafter in drafters
        if (packed := drafter.config.quantization) is not None
        and config.drafter_bits not in (None, packed.bits)
    )


def _read_drafter(facts: ModelFacts, target: Target, config: PairConfig) -> DraftModel:
    assert facts.format is not None and facts.source is not None
    return facts.format.load(facts.source.here, facts.config, target, config)


def _load_further(
    known: Sequence[tuple[str, str]],
    target_facts: ModelFacts,
    config: PairConfig,
    family: str,
    target: Target,
    tokenizer: Any,
) -> list[DraftModel]:
    """The known drafters of a family that is not loaded yet; DFlashError as of `load`.

    known: those that are not loaded, by family, "" where that is not known. All is checked before
    weights are fetched.
    """
    models = []
    of_family = [name for its, name in known if its == family]
    for name in of_family or [name for its, name in known if not its]:
        facts = check_drafter(find_source(name, DRAFTER), name)
        if facts.format is None or family_of(facts.format) != family:
            continue
        check_pair(target_facts, facts).raise_first()
        size, facts = _draft_size(config, facts), fetched(facts)
        if changed := fit_target(target, aux_layers_of(facts.config, target.num_layers)):
            raise DFlashError(changed[0], f"start again with --drafter {name}")
        models.append(_read_drafter(facts, target, config))
        fit_drafter(models[-1], target)
        _limit(models[-1], facts, target, tokenizer, size, config)
    return models


def _limit(
    model: DraftModel,
    facts: ModelFacts,
    target: Target,
    tokenizer: Any,
    size: int,
    config: PairConfig,
) -> None:
    """Let it draft only so many tokens; where the target has no such head, only if asked to."""
    assert facts.source is not None
    tokens = likely_tokens(facts.source.here, tokenizer, facts.config.vocab_size)
    try:
        model.limit_vocabulary(target, tokens, size)
    except DFlashError:
        if config.draft_vocabulary is not None:
            raise


def _draft_size(config: PairConfig, drafter: ModelFacts) -> int:
    """How many tokens it may draft; DFlashError for that and a window that do not fit it."""
    window, block = config.draft_window, drafter.config.block_size
    if window is not None and window < block:
        problem = f"draft_window is {window}, below the drafter's block of {block}"
        raise DFlashError(problem, f"choose {block} or more", "draft_window")
    return draft_size(config.draft_vocabulary, drafter.config.vocab_size)


def _on_template(
    tokenizer: Any, name: str, asked: Mapping[str, Any], preset: Preset
) -> Iterator[str]:
    """What to know about arguments of a target's chat template, a sentence each."""
    for key in unread_arguments(tokenizer, asked):
        yield f"the chat template of {name} does not read {key}, so --template changes nothing"
    for key, value in preset.template:
        if key not in asked:
            said = f"the drafter was trained with {key}={json.dumps(value)}"
            yield f"{said}, so answers begin that way; --template {key}=... changes it"


def load_target(name: str | None = None) -> Pair:
    """A target alone, the default one without a name; raises as `load` does.

    Its kernels are off: they have no gradients, and batch work has more rows than they take.
    """
    facts = target_facts(target_names(name))
    facts.raise_first()
    return Pair(*read_target(fetched(facts)))


@dataclass(frozen=True)
class ChosenDrafters:
    """The drafters of a pair by the command-line options that name them, the first one first.

    Those of further families are there by their family. asked: the options of those that were
    asked for, by name or by method, so that going without is an error. missing: why there is none.
    notes: which was left out, a sentence each.
    """

    drafters: Mapping[str, ModelFacts] = field(default_factory=dict)
    asked: Collection[str] = ()
    missing: str = ""
    notes: tuple[str, ...] = ()

    def each(self, read: Callable[[str, ModelFacts], ModelFacts]) -> ChosenDrafters:
        """With what `read` tells, without drafters that it refuses and nobody asked for.

        Without a first drafter there is no second one either. Raises what `read` raises for a
        drafter that was asked for.
        """
        kept: dict[str, ModelFacts] = {}
        missing, notes = self.missing, self.notes
        for option, drafter in self.drafters.items():
            if option == SECOND_DRAFTER and DRAFTER not in kept:
                continue
            try:
                kept[option] = read(option, drafter)
            except DFlashError as error:
                if option in self.asked:
                    raise
                words = option.replace("-", " ")
                reason = f"the {words} {drafter.name} cannot be used ({error.what})"
                if option == DRAFTER:
                    missing = reason
                else:
                    notes = (f"{reason}, so the first one drafts alone",)
        return replace(self, drafters=kept, missing=missing, notes=notes)


def _choose(names: Names, uses: Sequence[DecodeConfig]) -> ChosenDrafters:
    """The drafters that `uses` need, all that are known where there is no use; none is read yet."""
    unknown = Capabilities((None, None), preset=names.preset)
    methods = {settle(use, unknown).method for use in uses}
    if uses and not any(map(needs_drafter, methods)):
        return ChosenDrafters(
            missing="no drafter was loaded, since no method that was asked for needs one"
        )
    families = {family_wanted(use.method) for use in uses}
    chosen = {
        family: ModelFacts((), name, None, Weights({}), None)
        for family, name in names.others
        if family in families
    }
    wanted = set(chosen)
    if uses and not any(needs_drafter(n) and find_method(n).family not in wanted for n in methods):
        return ChosenDrafters(chosen, wanted)
    if names.drafter is None:
        known = "is to be used" if names.asks_first else f"is known for {names.shown}"
        return ChosenDrafters(missing=f"no drafter {known}")
    asked_methods = {m for use in uses if family_wanted(m := use.method) not in wanted}
    asked = set(wanted)
    chosen = {DRAFTER: ModelFacts((), names.drafter, None, Weights({}), None), **chosen}
    if names.asks_first or any(map(needs_drafter, asked_methods)):
        asked.add(DRAFTER)
    if names.second_drafter is not None and (not uses or any(map(wants_two, methods))):
        chosen[SECOND_DRAFTER] = replace(chosen[DRAFTER], name=names.second_drafter)
        if names.asks_second or any(map(wants_two, asked_methods)):
            asked |= {DRAFTER, SECOND_DRAFTER}
    return ChosenDrafters(chosen, asked)


def find(
    names: Names, uses: Sequence[DecodeConfig] = (), update: bool = True
) -> tuple[ModelFacts, ChosenDrafters]:
    """The target and the drafters that `uses` need, found and checked; no weight is fetched yet.

    Without `update`, as of `find_source`, a drafter that was asked for stays, whatever is wrong
    with it. Raises DFlashError for what cannot be found, and for a drafter that cannot be used but
    was asked for.
    """

    def found(option: str, drafter: ModelFacts) -> ModelFacts:
        place = option if option == SECOND_DRAFTER else DRAFTER
        return check_drafter(find_source(drafter.name, place, update), drafter.name)

    def fitting(option: str, drafter: ModelFacts) -> ModelFacts:
        for finding in check_pair(target, drafter).errors:
            if finding not in target.findings and (update or option not in choice.asked):
                raise DFlashError(finding.what, finding.next_step)
        return drafter

    choice = _choose(names, uses).each(found)
    target = target_facts(names, update)
    return target, choice.each(fitting)


def names_for(config: PairConfig, uses: Sequence[DecodeConfig] = ()) -> Names:
    """The parts of the pair, with drafters of the target's parent where these uses want any."""
    wanted = not uses or any(use.method == AUTO or needs_drafter(use.method) for use in uses)
    names = find_names(config)
    return inherited(names) if wanted else names
