"""From names to a pair: which target and drafters there are, found, checked, told or loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from dflash_mlx.core.config import AS_STORED, AUTO, DecodeConfig, PairConfig
from dflash_mlx.core.errors import Collector, DFlashError, Finding
from dflash_mlx.core.text import amount
from dflash_mlx.drafters.methods import check_uses, family_wanted, settle, wants_two
from dflash_mlx.drafters.networks.adapter import add_to, file_of
from dflash_mlx.engine.pair import Capabilities, DraftModel, Pair, Preset
from dflash_mlx.models.check import (
    TOKENIZER,
    ModelFacts,
    Report,
    check_built,
    check_for,
    check_pair,
    check_two,
    check_vocabulary,
    fetched,
    larger,
)
from dflash_mlx.models.choice import Choice, fastest_first, with_own_head
from dflash_mlx.models.names import (
    Names,
    find_names,
    find_source,
    inherited,
    is_here,
    registered,
    target_names,
)
from dflash_mlx.models.read import (
    WHOLE,
    TargetReader,
    advised_generation,
    draft_size,
    fit_drafter,
    fit_target,
    fits_target,
    likely_tokens,
    read_target,
    target_facts,
    unread_arguments,
)
from dflash_mlx.models.source import CONFIG, DRAFTER, SECOND_DRAFTER
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.routing import begin_trials
from dflash_mlx.vision.towers import described
from kernels_metal.dispatch import Mode

_LEFT_OUT = "name another one with --drafter, or use the pair as it is"
_IF_NOT = "drafts are checked, so answers are right; if few are accepted, name another --drafter"


def load(model: str | Path | PairConfig | None = None, drafter: str | Path | None = None) -> Pair:
    """Load a target and its drafter.

    model: a Hugging Face id, a local folder or a GGUF file; the default model without one; or a
    `PairConfig` with further settings. drafter: an id or a folder; by default the one that
    models.toml knows for the target. Where it knows none, or that one is not available,
    `Pair.undrafted` says so and the pair drafts by prompt lookup. Raises DFlashError for what
    cannot be found or read, and for a drafter that was asked for and does not fit.
    """
    drafter = str(drafter) if isinstance(drafter, Path) else drafter
    if not isinstance(model, PairConfig):
        model = PairConfig(str(model) if isinstance(model, Path) else model)
    return load_pair(model if drafter is None else replace(model, drafter=drafter))


def load_pair(config: PairConfig, *uses: DecodeConfig, reader: TargetReader = WHOLE) -> Pair:
    """`load` from settings; whether all fits is checked before weights are downloaded or read.

    uses: settings that the pair will be used with; DFlashError where it cannot serve them.
    """
    facts, choice, names = make_ready(config, *uses, reader=reader)
    trials = begin_trials(config.kernels)
    target, tokenizer = reader.read(facts, config)
    target.kernels.trials = trials
    target.kv_bits = config.kv_bits
    drafters = list(choice.drafters.values())
    bench = _Bench(facts, target, tokenizer, config)
    read = [layer for d in drafters for layer in d.config.layers_read(target.num_layers)]
    changed = fit_target(target, read)
    models, widened = bench.read(drafters)
    target.use_kernels(cast(Mode, config.kernels))
    left = choice.left(names)
    notes = [*choice.notes, *_on_packing(drafters, config)]
    notes += [note.what for drafter in drafters for note in larger(facts, drafter)]
    notes += [names.lineage] * bool(names.lineage and drafters)
    speeds = names.speeds if drafters and drafters[0].name == names.drafter else None
    if speeds is not None:
        notes += filter(None, [speeds.told()])
        named = ((family or models[0].family, name) for family, name in speeds.drafters)
        speeds = replace(speeds, drafters=tuple(named))
    notes += [*changed, *widened, *_on_template(tokenizer, target.name, config, names.preset)]
    return Pair(
        target,
        tokenizer,
        tuple(models),
        drafters[0].name if drafters else None,
        choice.missing,
        names.preset,
        tuple(notes),
        dict(names.preset.template) | config.template_arguments,
        partial(bench.read_family, left),
        (*(d.name for d in drafters), *(name for _, name in left)),
        speeds,
        advised=advised_generation(facts),
    )


def make_ready(
    config: PairConfig, *uses: DecodeConfig, reader: TargetReader = WHOLE
) -> tuple[ModelFacts, Choice, Names]:
    """What `load_pair` would read, checked and on this machine; raises as it does."""
    names = names_for(config, uses)
    facts, choice, names = find(names, config if reader.parts == 1 else None, uses)
    facts.raise_first()
    reader.check(facts)
    _check_settings(choice, names, config, uses)
    choice.each(lambda option: fetched(choice.drafters[option]))  # the smaller ones first
    return fetched(facts), choice, names


def load_target(name: str | None = None) -> Pair:
    """A target alone, the default one without a name; raises as `load` does."""
    facts = target_facts(target_names(name))
    facts.raise_first()
    # kernels stay off: they have no gradients, and batch work has more rows than they take
    return Pair(*read_target(fetched(facts)))


@dataclass(frozen=True)
class _Bench:
    """A loaded target, and what reads drafters for it: the first ones now, others when wanted."""

    facts: ModelFacts  # the target's
    target: Target
    tokenizer: Any
    config: PairConfig

    def read(self, drafters: Sequence[ModelFacts]) -> tuple[list[DraftModel], list[str]]:
        """Draft models that fit the target, and which were widened, a sentence each."""
        models: list[DraftModel] = []
        notes: list[str] = []
        for drafter in drafters:
            assert drafter.format is not None and drafter.source is not None
            folder = drafter.source.here
            if drafter.format.whole_models:
                self._check_tokens(drafter)
            model = drafter.format.load(folder, drafter.config, self.target, self.config)
            if self.config.adapted and (file := file_of(folder, self.target.name)).exists():
                notes.append(add_to(model.module, file))
            notes += fit_drafter(model, self.target)
            tokens = likely_tokens(folder, self.tokenizer, drafter.config.vocab_size)
            try:
                model.limit_vocabulary(self.target, tokens, _draft_size(self.config, drafter))
            except DFlashError:  # the target has no such head, which matters only if asked for
                if self.config.draft_vocabulary is not None:
                    raise
            models.append(model)
        return models, notes

    def _check_tokens(self, drafter: ModelFacts) -> None:
        """DFlashError for other tokens than a target's that brings no tokenizer.json."""
        if self.facts.source is None or TOKENIZER not in self.facts.source.files:
            tokens, place = self.tokenizer.get_vocab(), self.facts.name
            for finding in check_vocabulary(drafter, tokens, place):
                raise DFlashError(finding.what, finding.next_step)

    def read_family(self, known: Sequence[tuple[str, str]], family: str) -> list[DraftModel]:
        """Load what is of `family` among the known drafters, listed by family, "" if not known."""
        models = []
        of_family = [name for its, name in known if its == family]
        for name in of_family or [name for its, name in known if not its]:
            drafter = check_for(self.facts, find_source(name, DRAFTER), name)
            if drafter.format is None or drafter.format.family != family:
                continue
            check_pair(self.facts, drafter).raise_first()
            _draft_size(self.config, drafter)
            drafter = fetched(drafter)
            if not fits_target(self.target, drafter.config.layers_read(self.target.num_layers)):
                what = f"{self.facts.name} has to be widened for {name}, which loading alone does"
                raise DFlashError(what, f"start again with --drafter {name}")
            models += self.read([drafter])[0]
        return models


def _check_settings(
    choice: Choice, names: Names, config: PairConfig, uses: Sequence[DecodeConfig]
) -> None:
    drafters = list(choice.drafters.values())
    families = tuple(d.format.family if d.format else None for d in drafters)
    capabilities = Capabilities(families, preset=names.preset)
    check_uses(uses, [d.config.block_size for d in drafters], capabilities, choice.missing)
    for drafter in drafters:
        _draft_size(config, drafter)


def _on_packing(drafters: Sequence[ModelFacts], config: PairConfig) -> tuple[str, ...]:
    return tuple(
        f"the drafter {drafter.name} is packed in {packed.bits} bits already and stays so, not in "
        f"the {config.drafter_bits} that were asked for"
        for drafter in drafters
        if (packed := drafter.config.quantization) is not None
        and config.drafter_bits not in (None, AS_STORED, packed.bits)
    )


def _draft_size(config: PairConfig, drafter: ModelFacts) -> int:
    """How many tokens it may draft; DFlashError for that and a window that do not fit it."""
    if drafter.format is not None:
        drafter.format.check_settings(drafter.config, config, drafter.name)
    window, block = config.draft_window, drafter.config.block_size
    if window is not None and window < block:
        problem = f"draft_window is {window}, below the drafter's block of {block}"
        raise DFlashError(problem, f"choose {block} or more", "draft_window")
    return draft_size(config.draft_vocabulary, drafter.config.vocab_size)


def _on_template(tokenizer: Any, name: str, config: PairConfig, preset: Preset) -> Iterator[str]:
    asked = config.template_arguments
    for key in unread_arguments(tokenizer, asked):
        yield f"the chat template of {name} does not read {key}, so giving it changes nothing"
    for key, value in preset.template:
        if key not in asked:
            said = f"the drafter was trained with the template's {key}={json.dumps(value)}"
            yield f"{said}, so answers begin that way; template {key}=... changes it"


# Which drafters


def _choose(names: Names, uses: Sequence[DecodeConfig]) -> Choice:
    """The drafters that `uses` need, or without any use all that are known."""
    unknown = Capabilities((None, None), preset=names.preset)
    methods = {settle(use, unknown).method for use in uses}
    if uses and not any(map(family_wanted, methods)):
        return Choice(missing="no drafter was loaded, since the method needs none")
    families = {family_wanted(use.method) for use in uses}
    further = {family: name for family, name in names.others if family in families}
    wanted = set(further)
    if uses and not any(family_wanted(n) not in ("", *wanted) for n in methods):
        return Choice(further, wanted)
    if names.drafter is None:
        known = "is to be used" if names.asks_first else f"is known for {names.shown}"
        return Choice(missing=names.headless or f"no drafter {known}")
    asked_methods = {m for use in uses if family_wanted(m := use.method) not in wanted}
    choice = Choice({DRAFTER: names.drafter, **further}, wanted)
    if names.asks_first or any(map(family_wanted, asked_methods)):
        choice.asked.add(DRAFTER)
    if names.second_drafter is not None and (not uses or any(map(wants_two, methods))):
        choice.names[SECOND_DRAFTER] = names.second_drafter
        if names.asks_second or any(map(wants_two, asked_methods)):
            choice.asked |= {DRAFTER, SECOND_DRAFTER}
    return choice


def find(
    names: Names, config: PairConfig | None, uses: Sequence[DecodeConfig] = (), update: bool = True
) -> tuple[ModelFacts, Choice, Names]:
    """The target and the drafters that `uses` need, found and checked; no weight is fetched yet.

    Last come the names with the head that was found in the target's folder, if any, and the fastest
    drafter first. config: None where it counts for nothing what this machine measured. update: as
    of `find_source`; without it a drafter stays that was asked for and cannot be used.
    """
    target = target_facts(names, update)
    if target.source is not None and _want_drafters(uses):
        names = with_own_head(names, target.source)
    if config is not None and _want_drafters(uses):
        names = fastest_first(names, target, config, uses)
    choice = _choose(names, uses)

    def checked(option: str) -> ModelFacts:
        name, place = choice.names[option], option if option == SECOND_DRAFTER else DRAFTER
        drafter = check_for(target, find_source(name, place, update), name)
        two = [choice.drafters[DRAFTER], drafter] if option == SECOND_DRAFTER else []
        for finding in (*check_pair(target, drafter).errors, *check_two(two)):
            if finding not in target.findings and (update or option not in choice.asked):
                raise DFlashError(finding.what, finding.next_step)
        return drafter

    wanted = DRAFTER in choice.names
    choice.each(checked)
    if wanted and not choice.drafters:
        choice.stand_in((name for _, name in names.others if is_here(name, DRAFTER)), checked)
    return target, choice, names


def names_for(config: PairConfig, uses: Sequence[DecodeConfig] = ()) -> Names:
    """The parts of the pair, with drafters of the target's parent where these uses want any."""
    names = find_names(config)
    return inherited(names) if _want_drafters(uses) else names


def _want_drafters(uses: Sequence[DecodeConfig]) -> bool:
    return not uses or any(use.method == AUTO or family_wanted(use.method) for use in uses)


# A pair told without loading it


def check_named(config: PairConfig) -> Report:
    """What `load` would load; no weight is read. Raises DFlashError for names of no model."""
    names = names_for(config)
    target, choice, names = find(names, config, update=False)
    report, found = check_pair(target, *choice.drafters.values()), Collector()
    found.add(report.findings)
    left_out = [] if target.errors else list(choice.notes)
    if choice.missing and names.drafter is not None and not target.errors:
        left_out.append(f"{choice.missing}, so drafts come from prompt lookup")
    found.add(Finding("warning", what, _LEFT_OUT) for what in left_out)
    found.add(_on_drafters(names, [drafter.name for drafter in report.drafters]))
    if not report.errors:
        found.attempt(check_built, target)
    return replace(report, findings=found.result())


def _on_drafters(names: Names, used: Sequence[str]) -> Iterator[Finding]:
    for said in (names.lineage, names.speeds.told() if names.speeds else ""):
        if said and used:
            yield Finding("note", said, "name another one with --drafter")
    if names.headless and not used:
        yield Finding("note", names.headless, "give that folder with --drafter")
    entry = registered(names.shown)
    if entry is None or names.drafter is None:
        return
    if entry.drafter in used and not entry.verified:
        what = f"{entry.drafter} is not verified: it was published for {entry.name}, but this "
        yield Finding("note", f"{what}program was never tried with its files", _IF_NOT)
    if entry.more:
        what = f"other drafters are known for {entry.name}: {entry.more}"
        step = "name one with --drafter, or the family in brackets as --method"
        yield Finding("note", what, step)


def lines(report: Report) -> Iterator[str]:
    """The parts of a pair, the memory that it needs, every finding and its next step."""
    yield "pair"
    yield f"  target   {_in_words(report.target)}"
    for drafter in report.drafters:
        yield f"  drafter  {_in_words(drafter)}"
    if not report.drafters:
        yield "  drafter  none, so drafts come from prompt lookup"
    source, tensors = report.target.source, report.target.weights.tensors
    if tensors and source is not None and (eyes := described(source.read_json(CONFIG), tensors)):
        yield f"  sees     {eyes}"
    if report.target.weights.tensors:
        how = " as float32 on this processor" if on_cpu() else ""
        yield f"  memory   about {amount(report.memory(on_cpu()))}{how}"
    for finding in report.findings:
        yield f"  {finding.severity:<7}  {finding.what}"
        yield f"           {finding.next_step}"
    yield "  cannot be used" if report.errors else "  can be used"


def _in_words(facts: ModelFacts) -> str:
    words, weights, last = [facts.name], facts.weights, ""
    if facts.format is None:
        words.append(str(facts.config.get("model_type", "")))
        last = f"context {facts.context_length}" if facts.context_length else ""
    elif facts.config is not None:
        read = ", ".join(map(str, facts.config.aux_layers or ()))
        last = f"blocks of {facts.config.block_size}" + f", reads layers {read}" * bool(read)
    if weights.tensors:
        words.append(f"{weights.parameters:,} parameters in {weights.dtype}")
    return ", ".join(word for word in (*words, weights.quantisation, last) if word)
