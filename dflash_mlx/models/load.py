"""From names to a pair: a target with its tokenizer, and a drafter that fits it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from jinja2 import Environment, TemplateError, meta

from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.check import DrafterFacts
from dflash_mlx.models.likely_tokens import draft_size, likely_tokens
from dflash_mlx.models.names import find_names, target_names
from dflash_mlx.models.numeric_range import fit_drafter, fit_target
from dflash_mlx.models.parts import TargetPart, find_parts
from kernels_metal.dispatch import Mode


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
    part, choice = find_parts(names, uses)
    drafters = [drafter.facts for drafter in choice.parts]
    sizes = [draft_size(config.draft_vocabulary, d.config.vocab_size) for d in drafters]
    target, tokenizer = part.load()
    target.kv_bits = config.kv_bits
    notes = (*choice.notes, *_already_packed(drafters, config.drafter_bits))
    notes += fit_target(target, [tap for drafter in drafters for tap in drafter.config.taps])
    models = tuple(d.format.load(d.source.here, d.config, target, config) for d in drafters)
    notes += tuple(note for model in models for note in fit_drafter(model, target))
    for model, drafter, size in zip(models, drafters, sizes, strict=True):
        tokens = likely_tokens(drafter.source.here, tokenizer, drafter.config.vocab_size)
        model.limit_vocabulary(target, tokens, size)
    target.use_kernels(cast(Mode, config.kernels))
    template = config.template_arguments
    notes += tuple(
        f"the chat template of {target.name} does not read {key}, so --template changes nothing"
        for key in _unread_arguments(tokenizer, template)
    )
    name = names.drafter if models else None
    pair = Pair(target, tokenizer, models, name, choice.missing, names.advice, notes)
    return replace(pair, template=template)


def load_target(name: str | None = None) -> Pair:
    """A target alone, the default one without a name; raises as `load` does.

    Its kernels are off: they have no gradients, and batch work has more rows than they take.
    """
    part = TargetPart(target_names(name)).checked()
    part.facts.raise_first()
    return Pair(*part.fetched().load())


def _already_packed(drafters: Sequence[DrafterFacts], bits: int | None) -> Iterator[str]:
    """A sentence for each drafter that `--drafter-bits` leaves as it is."""
    for drafter in drafters:
        packed = drafter.config.quantization
        if packed is not None and bits is not None and bits != packed.bits:
            yield (
                f"the drafter {drafter.name} is packed in {packed.bits} bits already "
                f"and stays so, whatever --drafter-bits says"
            )


def __unread_arguments(tokenizer: Any, names: Iterable[str]) -> list[str]:
    """Those of `names` that the model's chat template does not read; all without a template."""
    jinja = Environment(extensions=["jinja2.ext.loopcontrols"])  # as transformers reads them
    source = getattr(tokenizer, "chat_template", None)
    sources = source.values() if isinstance(source, dict) else [source or ""]
    read: set[str] = set()
    for text in sources:
        try:
            read |= meta.find_undeclared_variables(jinja.parse(text))
        except TemplateError:
            read |= set(names)  # what cannot be looked into may read anything
    return [name for name in names if name not in read]


def _unread_arguments(tokenizer: Any, names: Iterable[str]) -> list[str]:
    """Those of `names` that the model's chat template does not read; all without a template."""
    jinja = Environment(extensions=["jinja2.ext.loopcontrols"])  # as transformers reads them
    source = getattr(tokenizer, "chat_template", None)
    sources = source.values() if isinstance(source, dict) else [source or ""]
    read: set[str] = set()
    for text in sources:
        try:
            read |= meta.find_undeclared_variables(jinja.parse(text))
        except TemplateError:
            read |= set(names)  # what cannot be looked into may read anything
    return [name for name in names if name not in read]
