"""Whether a target, a drafter and the two together can be used, before any weight is read.

Configurations and the heads of weight files tell it; docs/compatibility.md lists the checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from dflash_mlx.core.errors import Checked, Collector, DFlashError, Finding
from dflash_mlx.core.text import amount
from dflash_mlx.drafters.formats import CHOOSE_ANOTHER, FileFormat, other_kind
from dflash_mlx.drafters.methods import METHODS, format_of, formats
from dflash_mlx.drafters.networks.fields import OTHER_DRAFTER
from dflash_mlx.drafters.networks.files import DOWNLOAD_AGAIN
from dflash_mlx.models.names import instead_of
from dflash_mlx.models.parts import limited, read_config
from dflash_mlx.models.source import (
    BY_LAYER,
    CONFIG,
    DRAFTER,
    MODEL,
    SECOND_DRAFTER,
    Source,
    Weights,
    check_weights,
    quantisation,
    too_large,
    wrong_number,
)
from dflash_mlx.verifier.mixers import UNTRIED
from dflash_mlx.verifier.model import ONE_OFFSET, Target
from dflash_mlx.verifier.reading import (
    CHOOSE_TARGET,
    CONTEXT_LENGTHS,
    context_length,
    family_of,
    language_model,
    loading,
)
from dflash_mlx.vision.opening import opens

TOKENIZER = "tokenizer.json"
_CHOOSE = "choose a model of a family that mlx-lm supports itself"
_REPLACE = "download this folder again, or remove the file where it is the drafter's"
_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")  # by which models are told apart
_POSITIVE = (
    "hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "head_dim", *CONTEXT_LENGTHS,
)  # fmt: skip


@dataclass(frozen=True)
class ModelFacts(Checked):
    """What a folder says of its model, as far as it tells."""

    name: str
    source: Source | None  # None for the embedded target and for a GGUF file
    weights: Weights
    config: Any  # a target's config.json; of a drafter what its format reads there, or None
    format: FileFormat | None = None  # who reads a drafter, None for a target
    file: Path | None = None  # a target's GGUF file

    @property
    def context_length(self) -> int:
        return context_length(self.config)


@dataclass(frozen=True)
class Report(Checked):
    """A target with its drafters: all findings, those of the configurations first."""

    target: ModelFacts
    drafters: tuple[ModelFacts, ...]

    def memory(self, on_cpu: bool) -> int:
        """Bytes that the pair needs when loaded, about. on_cpu: as float32."""
        # a head in the target's own folder, which has its name, is among its weights
        parts = {part.name: part for part in (*self.drafters, self.target)}
        return sum(part.weights.memory(on_cpu) for part in parts.values())


def check_target(folder: Path | Source, name: str = "") -> ModelFacts:
    """A target alone, whatever is in its folder. name: what to call it, if not by its place."""
    source, raw, found, _ = _open(folder, False)
    config = language_model(raw)
    if raw and not found.errors and not (family_of(raw) or opens(raw)):
        found.attempt(found.add, check_family(source, raw))  # before what no family would mend
    elif raw:
        found.add(check_numbers(source, config))
        if not context_length(config):
            step = f"add {CONTEXT_LENGTHS[0]} to it, or choose another model"
            what = f"{source.place(CONFIG)} has no {CONTEXT_LENGTHS[0]}"
            found.add([Finding("error", what, step)])
    weights = check_weights(source, raw, found, CHOOSE_TARGET, instead_of(source.name))
    if raw and not found.errors:  # mlx-lm makes lists of as many layers as it is told
        found.attempt(found.add, check_family(source, raw))
    return ModelFacts(found.result(), name or source.name, source, weights, config)


def describe_target(config: Mapping[str, Any], name: str, file: Path | None = None) -> ModelFacts:
    """A target of which only some numbers are known; `config` names them as config.json does."""
    return ModelFacts((), name, None, Weights({}), config, file=file)


def check_drafter(folder: Path | Source, name: str = "") -> ModelFacts:
    """A drafter alone, or the head in a target's folder. name: what to call it, if not by place."""
    source, raw, found, known = _open(folder, True)
    readable, config, family = not found.errors, None, known or formats()[0]
    sizes = family.own_sizes(raw)
    weights = check_weights(source, sizes, found, DOWNLOAD_AGAIN, instead_of(source.name))
    own = family.own_tensors(raw, weights.tensors)
    weights = replace(weights, tensors={name: weights.tensors[name] for name in own})
    if readable and not any(too_large(source, sizes, weights)):  # which would take long to build
        config = found.attempt(family.parse_config, raw, source.name, weights.tensors)
    if config is not None:
        step = "if nothing is accepted, compare it with how the drafter was trained"
        found.add(Finding("note", note, step) for note in config.notes)
        if config.quantization is not None:
            words = quantisation({"quantization": asdict(config.quantization)})
            weights = replace(weights, quantisation=words[0], group_size=words[1])
        if weights.tensors or not found.errors:
            found.attempt(found.add, family.check_tensors(weights.tensors, config, source.name))
        if source.whole_model and not found.errors:
            found.add(check_numbers(source, language_model(raw)))
            found.attempt(list, check_family(source, raw))  # its notes are for targets
    return ModelFacts(found.result(), name or source.name, source, weights, config, family)


def _open(
    folder: Path | Source, as_drafter: bool
) -> tuple[Source, dict[str, Any], Collector, FileFormat | None]:
    """The source, its config.json, {} where it has none, what is wrong with that, and its family.

    Of a target's folder that is given as a drafter's, only what a family reads stays wanted.
    """
    option = DRAFTER if as_drafter else MODEL
    source = Source.of(folder, option) if isinstance(folder, Path) else folder
    found = Collector()
    raw = found.attempt(read_config, source) or {}
    family = limited(source, raw) if as_drafter else format_of(raw)
    unknown = not as_drafter and bool(other_kind(raw)) and not (family_of(raw) or opens(raw))
    if raw and (unknown or (family is not None) != as_drafter):
        found.add([_misplaced(source, raw, as_drafter)])
    source.whole_model = family is not None and family.whole_models
    found.add(check_code(source, raw))
    return source, raw, found, family


def _misplaced(source: Source, raw: Mapping[str, Any], as_drafter: bool) -> Finding:
    """Of a drafter in a target's place, or of what no family can draft with."""
    step = OTHER_DRAFTER if as_drafter else f"choose a target with --{MODEL}"
    if not as_drafter and format_of(raw) is not None:
        step = f"give it with --{DRAFTER}, and {step}"
        return Finding("error", f"{source.name} is a drafter, not a target", step)
    what = f"{source.name} is a draft model of a kind that is not supported, {other_kind(raw)!r}"
    if not other_kind(raw):
        kind = repr(raw.get("model_type"))[:80]
        what = f"{source.name} has model_type {kind}, which mlx-lm lacks, so it cannot draft"
    return Finding("error", what, step)


def fetched(facts: ModelFacts) -> ModelFacts:
    """Facts of a model whose weights are here; what was downloaded for that is checked again."""
    if facts.source is None or facts.source.folder is not None:
        return facts
    check = check_target if facts.format is None else check_drafter
    again = check(facts.source.fetch(), facts.name)
    again.raise_first()
    return again


def check_for(target: ModelFacts, source: Source, name: str) -> ModelFacts:
    """The drafter in `source`: as a whole, where a head in it is of another target than this.

    A head of this target that is damaged or cannot be read is refused for that.
    """
    drafter = check_drafter(source, name)
    if drafter.source is None or not drafter.source.part:
        return drafter
    own = language_model(drafter.source.read_json(CONFIG))
    is_other = any(own.get(name) != target.config.get(name) for name in _SIZES)
    if is_other if drafter.config is None else any(_misfits(target, drafter)):
        whole = check_drafter(replace(source, part=(), whole_model=True), name)
        if not check_pair(target, whole).errors:
            return whole
    return drafter


def check_pair(target: ModelFacts, *drafters: ModelFacts) -> Report:
    """A target with a drafter or two: everything found in each, and whether they fit."""
    found = Collector()
    for drafter in drafters:
        found.add(_misfits(target, drafter))
    for part in (target, *drafters):
        found.add(part.findings)
    found.add(check_two(drafters))
    for drafter in drafters:
        if target.source is not None and drafter.source is not None and not found.errors:
            found.attempt(found.add, _check_tokenizers(target.source, drafter))
    if not found.errors:
        found.add(note for drafter in drafters for note in larger(target, drafter))
    return Report(found.result(), target, drafters)


def check_two(drafters: Sequence[ModelFacts]) -> Iterator[Finding]:
    """What keeps a first and a second drafter from drafting together; nothing for one alone."""
    for_two = [method.files for method in METHODS.values() if method.best_with > 1]
    for drafter in drafters if len(drafters) > 1 else ():
        if drafter.format not in for_two:
            what = f"{drafter.name} is a drafter of a kind that drafts alone"
            yield Finding("error", what, f"leave out --{SECOND_DRAFTER}")


def _misfits(target: ModelFacts, drafter: ModelFacts) -> Iterator[Finding]:
    """What keeps a drafter from a target; also an error for one that would draft for itself."""
    if drafter.format is None or drafter.config is None or not target.config:
        return
    yield from drafter.format.misfits(drafter.config, target.config, target.name, drafter.name)
    own, theirs = cast(Source, drafter.source), target.source
    if own.whole_model and theirs is not None and own.name == theirs.name:
        lacks = next(filter(None, (each.lacking(target.config) for each in formats())), "")
        why = lacks or "is the target itself, so its drafts would save nothing"
        yield Finding("error", f"the drafter {drafter.name} {why}", CHOOSE_ANOTHER)


def larger(target: ModelFacts, drafter: ModelFacts) -> Iterator[Finding]:
    """A note where a pass of the drafter reads as much as one of the target."""
    own, theirs = drafter.weights.stored_bytes, target.weights.stored_bytes
    if target.file is not None:
        theirs = target.file.stat().st_size
    if 0 < theirs <= own:
        sizes = f"{amount(own)} of weights, and {target.name} {amount(theirs)}"
        what = (
            f"the drafter {drafter.name} has {sizes}, so its drafts may take longer than they save"
        )
        yield Finding("note", what, "name a smaller one with --drafter")


def _check_tokenizers(target: Source, facts: ModelFacts) -> Iterator[Finding]:
    drafter = cast(Source, facts.source)
    if drafter.whole_model:
        if TOKENIZER in target.files or TOKENIZER not in drafter.files:
            ours = _vocabulary(target) if TOKENIZER in drafter.files else {}
            yield from check_vocabulary(facts, ours, target.place(TOKENIZER))
        return
    if TOKENIZER not in target.files or TOKENIZER not in drafter.files:
        return
    theirs, ours = _vocabulary(drafter), _vocabulary(target)
    other = {token for token, index in theirs.items() if ours.get(token, index) != index}
    if other or theirs.keys().isdisjoint(ours):
        token = min(other or theirs, key=lambda token: theirs[token])
        has, wanted = str(theirs[token])[:80], str(ours.get(token, "none"))[:80]
        what = f"token {token[:40]!r} has the id {has} in {drafter.place(TOKENIZER)}"
        what += f", but {wanted} in {target.place(TOKENIZER)}"
        yield Finding("error", what, CHOOSE_ANOTHER)


def check_vocabulary(
    drafter: ModelFacts, tokens: Mapping[str, int], place: str
) -> Iterator[Finding]:
    """Whether a language model that drafts has these tokens, under the same ids.

    tokens: all of its target's, which are from `place`. Either may have more, of other ids.
    """
    source, size = cast(Source, drafter.source), drafter.config.vocab_size
    if TOKENIZER not in source.files:
        what = f"{drafter.name} has no {TOKENIZER} to compare with {place}"
        yield Finding("error", what, CHOOSE_ANOTHER)
        return
    theirs = _vocabulary(source)
    own_id = {index: token for token, index in theirs.items()}
    differ = {i for t, i in tokens.items() if own_id.get(i, t) != t or theirs.get(t, i) != i}
    if differ:
        first = min(differ)
        token = next(token for token, index in tokens.items() if index == first)
        has = f"{own_id[first][:40]!r}" if first in own_id else "none"
        what = f"token {first} is {token[:40]!r} in {place}, but {has} in "
        yield Finding("error", what + source.place(TOKENIZER), CHOOSE_ANOTHER)
    elif (last := max(tokens, key=lambda token: tokens[token])) and tokens[last] >= size > 0:
        what = f"the drafter {drafter.name} has {size} tokens, but token {tokens[last]} of "
        yield Finding("error", f"{what}{place} is {last[:40]!r}", CHOOSE_ANOTHER)


def _vocabulary(source: Source) -> dict[str, int]:
    """All tokens of a tokenizer.json with their ids, added ones included."""
    # as JSON, since the tokenizers library panics at some damaged files, which nothing can catch
    tokenizer, place = source.read_json(TOKENIZER, _REPLACE), source.place(TOKENIZER)
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens") or []
    if not isinstance(added, list):
        what = f"added_tokens in {place} is {repr(added)[:80]}, not a list"
        raise DFlashError(what, _REPLACE)
    tokens = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(tokens, list):  # of a unigram model: tokens with scores, in the order of ids
        tokens = {str(e[0]): i for i, e in enumerate(tokens) if isinstance(e, list) and e}
    pairs = list(tokens.items()) if isinstance(tokens, dict) else []
    pairs += [(entry.get("content"), entry.get("id")) for entry in added if isinstance(entry, dict)]
    if named := {str(token): index for token, index in pairs if type(index) is int}:
        return named
    raise DFlashError(f"{place} names no token", _REPLACE)


def check_code(source: Source, raw: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether a configuration asks to run Python of its own, which never happens here."""
    place, file, auto_map = source.place(CONFIG), raw.get("model_file"), raw.get("auto_map")
    if file is not None:
        asked = f"its own Python file {repr(file)[:80]} (model_file in {place})"
        yield Finding("error", f"{source.name} asks to run {asked}", _CHOOSE)
    if auto_map is None:
        return
    names = raw.get("architectures")
    known = {str(name) for name in names} if isinstance(names, list) else set()
    values = [*auto_map.values()] if isinstance(auto_map, dict) else [auto_map]
    where = f"auto_map in {place} is {repr(auto_map)[:120]}"
    is_vllm = "speculators_model_type" in raw and values and auto_map == {"": values[0]}  # its own
    if is_vllm or known & {str(value).rpartition(".")[2] for value in values}:
        what = f"{where}; no Python of it runs, the built-in class does"
        yield Finding("note", what, "you need not do anything")
    else:
        what = f"{source.name} asks to run its own Python classes ({where})"
        yield Finding("error", what, _CHOOSE)


def check_numbers(source: Source, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Sizes that are no whole numbers from 1 on, and head counts that do not divide."""
    for field in _POSITIVE:
        value = config.get(field)
        values = value if field == BY_LAYER and isinstance(value, list) and value else [value]
        if value is not None and any(type(v) is not int or v < 1 for v in values):
            yield wrong_number(source, field, value, "a whole number from 1 on")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(kv_heads) is int and type(heads) is int and (kv_heads < 1 or heads % kv_heads):
        wanted = f"a divisor of its {heads} attention heads"
        yield wrong_number(source, "num_key_value_heads", kv_heads, wanted)


def check_family(source: Source, raw: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether mlx-lm has the family, and trees are verified with it; DFlashError where not."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or not kind.replace("-", "_").isidentifier():
        what = f"{source.name} cannot be loaded: model_type in {source.place(CONFIG)} is {kind!r}"
        raise DFlashError(what, _CHOOSE)
    if opens(raw):  # which tries it
        return
    from mlx_lm.utils import _get_classes  # not before a model is looked at: it takes seconds

    with loading(source.name, _CHOOSE):
        _, arguments = _get_classes(dict(raw))
        arguments.from_dict(dict(raw))
    step = "use --method dflash or --method ngram, which draft chains"
    if family_of(raw) in UNTRIED:
        why = f"{kind} may have recurrent layers that were never tried on branches, so chains only"
        yield Finding("note", why, step)
    elif kind in ONE_OFFSET:
        why = f"{kind} computes with one position for a whole pass, so it verifies no trees"
        yield Finding("note", why, step)


def check_built(facts: ModelFacts) -> Target | None:
    """A model of mlx-lm's without weights, None for mlx-vlm's, which are tried when they are read.

    None for what is no folder, too. DFlashError where mlx-lm, or drafting, cannot do that.
    """
    source = facts.source
    if source is None or source.folder is None:
        return None
    if opens(source.read_json(CONFIG), facts.weights.tensors):
        return None
    from mlx_lm.utils import load_model

    with loading(str(source.folder), _CHOOSE):
        return Target(load_model(source.folder, lazy=True)[0], 1, str(source.folder))
