"""The table of methods: what `--method`, `auto`, benchmarks and the chat know of drafters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, field, fields, make_dataclass, replace
from typing import Any

from dflash_mlx.core.config import AUTO, PLAIN, DecodeConfig, PairConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import Options, values_given
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters import block_diffusion, dual_diffusion, ngram, none
from dflash_mlx.drafters.assistant import checkpoint as assistant
from dflash_mlx.drafters.autoregressive import step_by_step
from dflash_mlx.drafters.budget import within_budget
from dflash_mlx.drafters.eagle3 import checkpoint as eagle3
from dflash_mlx.drafters.formats import FileFormat
from dflash_mlx.drafters.lm import checkpoint as lm
from dflash_mlx.drafters.method import GRAMMAR, Method, Plan, TokenSource, check_block_size
from dflash_mlx.drafters.mtp import checkpoint as mtp
from dflash_mlx.drafters.specdiff import drafter as specdiff
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.pair import Capabilities, Pair

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        none.METHOD,
        block_diffusion.DFLASH,
        block_diffusion.DDTREE,
        dual_diffusion.METHOD,
        specdiff.METHOD,
        step_by_step("EAGLE-3", eagle3.FILES),
        step_by_step("Gemma assistant", assistant.FILES),
        step_by_step("multi-token prediction", mtp.FILES),
        # Language models are the last with files, since any model is read so; prompt lookup stands
        # behind all of these, since it is as good only where no draft model is
        step_by_step("small language model", lm.FILES),
        ngram.METHOD,
    )
}


def choices() -> tuple[str, ...]:
    """What `--method` takes."""
    return (AUTO, *(method.name for method in METHODS.values() if not method.is_control))


def find_method(name: str) -> Method:
    """The method of this name; DFlashError where there is none."""
    if name not in METHODS:
        known = ", ".join((AUTO, *METHODS))
        raise DFlashError(f"method is {name!r}", f"choose one of {known}", "method")
    return METHODS[name]


def sources() -> tuple[TokenSource, ...]:
    """Of all methods, each once, in the order of the method that has the most; then grammars."""
    most_first = sorted(METHODS.values(), key=lambda method: -len(method.sources))
    return tuple(dict.fromkeys((*(s for m in most_first for s in m.sources), GRAMMAR)))


def source_of(tree: Tree, node: int, method: str) -> str:
    """The name of the source of a drafted token; a tree that does not say has one of its method."""
    usual = find_method(method).sources
    return tree.sources[node] if tree.sources else usual[0].name if usual else ""


def formats() -> tuple[FileFormat, ...]:
    """The files of all families of draft models, each once."""
    known = (method.files for method in METHODS.values())
    return tuple(dict.fromkeys(each for each in known if each is not None))


def format_of(raw: Mapping[str, Any]) -> FileFormat | None:
    """The family that a config.json is of; None for a target's."""
    known = formats()
    found = [each for each in known if each.recognises(raw)]
    found += [each for each in known if any(mark in raw for mark in each.marks)]
    return next(iter(found), None)


def format_as_drafter(raw: Mapping[str, Any], names: Collection[str] = ()) -> FileFormat | None:
    """The family that a config.json given as a drafter's is of; None where nothing drafts so.

    names: of the tensors beside it, which show whether a target's folder has what a family reads.
    """
    if (own := format_of(raw)) is not None:
        return own
    readers = [each for each in formats() if each.reads_target(raw)]
    having = (each for each in readers if each.own_tensors(dict(raw), names))
    return next(having, next(iter(readers), None))


def own_options() -> type:
    """The options of single methods in one settings class, each name once, its help by method."""
    owners: dict[str, dict[str, Field[Any]]] = {}
    for method in METHODS.values():
        for name, option in () if method.is_control else method.own.items():
            owners.setdefault(name, {})[method.name] = option
    merged = []
    for name, found in owners.items():
        first, *_ = found.values()
        help = "; ".join(f"{method}: {option.metadata['help']}" for method, option in found.items())
        metadata = {**first.metadata, "help": help}
        merged.append((name, first.type, field(default=first.default, metadata=metadata)))
    return make_dataclass("OwnOptions", merged, frozen=True)


def takers(setting: str) -> tuple[str, ...]:
    """The methods that a setting belongs to, () where it holds for every method."""
    return tuple(name for name, method in METHODS.items() if method.takes(setting))


def given(settings: DecodeConfig | PairConfig) -> dict[str, Any]:
    """The settings of single methods that were given, with their values."""
    shared = {name for method in METHODS.values() for name in method.shared}
    own = values_given(settings.options) if isinstance(settings, DecodeConfig) else {}
    return {**{n: value for n, value in values_given(settings).items() if n in shared}, **own}


def as_usual(config: DecodeConfig) -> bool:
    """Whether no setting of single methods was given, switches excepted."""
    return all(isinstance(value, bool) for value in given(config).values())


def check_given(settings: DecodeConfig | PairConfig, *names: str) -> None:
    """Raise DFlashError for a setting that was given and that no method in use can follow.

    names: of these methods, by default the one in `settings`. `auto` may become any. Switches may
    be off, drafts be matched, and a draft model be none, with any method.
    """
    if isinstance(settings, DecodeConfig):
        for method in METHODS.values():
            options_of(settings, method)  # refuses values that it cannot have
    used = names or (getattr(settings, "method", AUTO),)
    if AUTO in used:
        return
    methods = [find_method(name) for name in used]
    for setting, value in given(settings).items():
        free = isinstance(value, bool) or value in ("match", PLAIN)
        if not free and not any(method.takes(setting) for method in methods):
            not_used = f"{', '.join(used)} {'does' if len(used) == 1 else 'do'} not use it"
            raise DFlashError(
                f"{setting} is {value}, but {not_used}",
                f"leave it out, or choose a method that does: {', '.join(_offered(setting))}",
                setting,
            )


def options_of(config: DecodeConfig, method: Method, kind: type[Options] | None = None) -> Options:
    """The options of a method in `config`; kind: of which class, by default the method's own."""
    if isinstance(config.options, kind or method.options):
        return config.options
    kind = kind or method.options
    own = {option.name for option in fields(kind)}
    return kind(**{name: v for name, v in values_given(config.options).items() if name in own})


def _offered(setting: str) -> list[str]:
    return [name for name in takers(setting) if not METHODS[name].is_control]


def settle(config: DecodeConfig, capabilities: Capabilities) -> DecodeConfig:
    """`config` with a method in place of `auto`."""
    method = _auto(config, capabilities) if config.method == AUTO else find_method(config.method)
    return replace(config, method=method.name, options=options_of(config, method))


def _auto(config: DecodeConfig, capabilities: Capabilities) -> Method:
    """What the pair serves; of these, the one that a given setting belongs to; then the advice.

    Settings of several methods of a family choose none, and of several families that which `auto`
    prefers. One whose method cannot be had changes nothing.
    """
    found = [METHODS[name] for name in serving(capabilities)]
    if config.acceptance == "reject" and config.sampling.temperature > 0:
        found = [method for method in found if method.draws] or found
    for setting in given(config):
        owners = [method for method in found if method.name in _offered(setting)]
        first = max(owners, key=lambda method: method.preference, default=None)
        owners = [method for method in owners if first and method.family == first.family]
        if len(owners) == 1 and setting != "acceptance":
            found = owners
    found.sort(key=lambda method: -method.preference)
    advised = [method for method in found if method.name == capabilities.preset.method]
    full = [method for method in found if method.best_with <= capabilities.count(method.family)]
    return (advised or full or found)[0]


def serving(capabilities: Capabilities) -> tuple[str, ...]:
    """The methods that draft and that such a pair serves, controls excepted."""
    return tuple(
        name
        for name, method in METHODS.items()
        if method.preference > 0
        and (not method.family or capabilities.count(method.family) > 0)
        and (capabilities.trees or not method.needs_trees)
    )


def why_auto(config: DecodeConfig, capabilities: Capabilities) -> str:
    """Which options chose what `auto` is, "" where they did not."""
    if config.method != AUTO or not (named := given(config)):
        return ""
    plain = DecodeConfig(sampling=config.sampling)
    chosen, usual = _auto(config, capabilities).name, _auto(plain, capabilities).name
    asked = ", ".join("--" + name.replace("_", "-") for name in named)
    return "" if chosen == usual else f"auto is {chosen} here, for {asked}"


def family_wanted(name: str) -> str:
    """The family of draft models that a method runs, "" for none and for `auto`."""
    return "" if name == AUTO else find_method(name).family


def wants_two(name: str) -> bool:
    """Whether a method, `auto` excepted, is best with a second draft model."""
    return name != AUTO and find_method(name).best_with > 1


def draws_drafts(config: DecodeConfig) -> bool:
    """Whether drafts are drawn, with a method in place of `auto`."""
    return find_method(config.method).draws and config.draws_drafts


def drafting_of(config: DecodeConfig) -> tuple[DecodeConfig, SamplingConfig | None]:
    """What a drafter is made for: `config` without what may change between two of its answers."""
    may_change = (
        *("max_tokens", "stop", "prefill_step", "logprobs", "thought_tokens", "sampling"),
        *("structure", "prompt_logprobs", "reads_only"),
    )
    lasting = replace(config, **{name: getattr(DecodeConfig(), name) for name in may_change})
    by = config.sampling  # of which penalties, bias and ends are the target's alone
    drawn = SamplingConfig(by.temperature, by.top_p, by.top_k, by.min_p, seed=by.seed)
    return lasting, drawn if draws_drafts(config) else None


def check_uses(
    uses: Sequence[DecodeConfig],
    block_sizes: Sequence[int],
    capabilities: Capabilities,
    missing: str,
) -> None:
    """Raise DFlashError for uses that need a draft model, or other blocks than there are.

    block_sizes: of the draft models in `capabilities`. missing: why there is none.
    """
    for use in uses:
        method = find_method(settle(use, capabilities).method)
        if family_wanted(use.method) and not capabilities.count(method.family):
            known = ", ".join(dict.fromkeys(f for f in capabilities.families if f))
            problem = f"{method.name} needs a drafter of its own family, and {known} is loaded"
            step = "name one with --drafter, or use --method auto"
            raise DFlashError(problem if known else missing, step)
        sizes = zip(capabilities.families, block_sizes, strict=True)
        fitting = [most for family, most in sizes if family == method.family]
        sizes_asked = {"block_size": use.block_size, **options_of(use, method).later_blocks}
        for (option, size), most in zip(sizes_asked.items(), fitting, strict=False):
            if method.family:
                check_block_size(size, most, option)


def plan(method: Method, pair: Pair, config: DecodeConfig) -> Plan:
    """Drawn, chain or tree, and whether its size is fixed: decided here alone.

    Raises DFlashError where a tree is asked for that cannot be verified, and where the pair has no
    draft model of the family.
    """
    size, rejects = config.block_size, config.acceptance == "reject" and config.draws_drafts
    given = {"budget": config.budget, **values_given(config.options)}
    tree_options = ("budget", "branches") if method.has_budget else ()
    asked = {name: given[name] for name in tree_options if given.get(name) is not None}
    for name, value in asked.items():
        if method.draws and rejects:
            what = f"{name} is {value}, but acceptance is reject, which keeps chains alone"
            raise DFlashError(what, "leave one of them out", name)
    if asked or method.needs_trees:
        pair.target.check_trees()
    trees = pair.target.takes_trees and method.has_budget
    chain = not method.needs_trees and (not trees or (size is not None and not asked))
    drawn = method.draws and config.draws_drafts and (chain or rejects)
    sized = size is not None and not method.needs_trees
    chooses = method.chooses and options_of(config, method).cuts
    fixed = sized or "budget" in asked or not chooses
    models = pair.of(method.family, method.name) if method.family else ()
    return Plan(models, config, drawn, chain, fixed)


def make_drafter(pair: Pair, config: DecodeConfig) -> Drafter:
    """The drafter of `config.method`; DFlashError when the pair has none that fits."""
    config = settle(config, pair.capabilities)
    method = find_method(config.method)
    how = plan(method, pair, config)
    drafter = method.make(how)
    if how.fixed:
        return drafter
    takes_trees = method.has_budget or method.needs_trees or not method.family
    lasting, _ = drafting_of(config)
    return within_budget(drafter, method, pair, lasting, how.drawn or not takes_trees)
