"""From checked facts to a target in memory; whether numbers fit their type; likely tokens.

Models that were trained in bfloat16 and converted to float16 can exceed its largest number, 65,504.
Then the target answers nonsense, or its drafter is never right, so it is cast to a wider type.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from jinja2 import Environment, TemplateError, meta
from mlx.utils import tree_flatten

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import DraftModel
from dflash_mlx.models.check import ModelFacts, check_target, describe_target
from dflash_mlx.models.default_model import DEFAULT_CONFIG, fetch
from dflash_mlx.models.names import Names, find_source, gguf_file
from dflash_mlx.models.source import CONFIG
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.reading import loading, prepared, read_model
from dflash_mlx.vision.opening import open_target, opens
from dflash_mlx.vision.towers import tower_bytes

LIKELY_TOKENS = "likely_tokens.npy"  # beside a drafter's weights: ids, the most frequent first
MARGIN = 2.0  # other tokens may have larger states than the few that are tried
_TOKENS = 8  # that are tried
_LEAST = 8192  # tokens to draft from, where nobody asks for fewer
_SHARE = 4  # of the vocabulary one part in so many is drafted from, unless asked otherwise


def target_facts(names: Names, update: bool = True) -> ModelFacts:
    """What a target is, as far as that can be had without its weights; update as `find_source`."""
    if names.model is not None and (file := gguf_file(names.model)) is not None:
        from dflash_mlx.models.gguf_target import read_config as read_gguf  # takes seconds

        return describe_target(read_gguf(file), names.shown, file)
    if names.model is not None:
        return check_target(find_source(names.model, update=update), names.shown)
    return describe_target(DEFAULT_CONFIG, names.shown)


def advised_generation(facts: ModelFacts) -> dict[str, Any]:
    """The generation_config.json that a model's makers wrote, nothing where it cannot be read."""
    with suppress(DFlashError):
        return {} if facts.source is None else facts.source.read_json("generation_config.json")
    return {}


class TargetReader:
    """How a target is read: here whole, elsewhere a part of it."""

    parts = 1  # processes that share it

    def check(self, facts: ModelFacts) -> None:
        """DFlashError for a target that cannot be read so; no weight is read."""

    def read(self, facts: ModelFacts, config: PairConfig) -> tuple[Target, Any]:
        return read_target(facts)


WHOLE = TargetReader()


def read_target(
    facts: ModelFacts,
    share: Callable[[nn.Module], None] | None = None,
    make: Callable[[Any, int, str], Target] = Target,
) -> tuple[Target, Any]:
    """The target and its tokenizer; on a CPU its weights become float32, the fast path there.

    share: leaves of a model the part that this process computes, before weights are read. make:
    the target, of model, context length and name. DFlashError for what mlx-lm cannot load.
    """
    if facts.source is None:
        from dflash_mlx.models.gguf_target import load_gguf

        file, dtype = facts.file or fetch(), mx.float32 if on_cpu() else None
        model, tokenizer, config = load_gguf(file, dtype, partial(prepared, change=share))
        return make(model, config["max_position_embeddings"], facts.name), tokenizer
    from mlx_lm.utils import load_tokenizer

    folder, no_code = facts.source.here, {"trust_remote_code": False}
    with loading(facts.name):
        raw, tensors = facts.source.read_json(CONFIG), facts.weights.tensors
        if share is None and make is Target and opens(raw, tensors):
            target = open_target(folder, facts.context_length, facts.name)
            target.sees &= tower_bytes(tensors) > 0
            ends = {**facts.config, **raw}.get("eos_token_id")
            return target, load_tokenizer(folder, no_code, eos_token_ids=ends)
        model, config = read_model(folder, share)
        tokenizer = load_tokenizer(folder, no_code, eos_token_ids=config.get("eos_token_id"))
    return make(model, facts.context_length, facts.name), tokenizer


# Whether numbers fit


def fit_target(target: Target, aux_layers: Collection[int]) -> tuple[str, ...]:
    """Widen a target where its numbers, or those of its auxiliary layers, do not fit; says so.

    Raises DFlashError where no type can hold them, and for caches that cannot be quantised so.
    """
    fits = partial(fits_target, target, aux_layers)
    step = "download it again, or choose another conversion of it"
    return _widened(target.model, target.name, fits, target.widen, step)


def fits_target(target: Target, aux_layers: Collection[int]) -> bool:
    """Whether the numbers of a target, and those of its auxiliary layers, fit as they are."""
    read = tuple(sorted(set(aux_layers)))
    target.tap(read)
    return _fit(_pass(target, read))


def fit_drafter(model: DraftModel, target: Target) -> tuple[str, ...]:
    """As `fit_target`, for a draft model of a target that fits."""
    _, *features = _pass(target, model.aux_layers)
    at_margin = MARGIN * features[0] if features else None

    def fits() -> bool:
        context = model.new_context()
        context.append(mx.zeros(_TOKENS, mx.int32), at_margin)
        return _fit([model.try_out(context)])

    def widen(dtype: mx.Dtype) -> None:
        model.module.set_dtype(dtype, lambda kind: kind == mx.float16)
        mx.eval(model.module.parameters())

    step = "choose another one with --drafter, or use --method ngram"
    return _widened(model.module, f"the drafter for {target.name}", fits, widen, step)


def _widened(
    module: nn.Module,
    name: str,
    fits: Callable[[], bool],
    widen: Callable[[mx.Dtype], None],
    next_step: str,
) -> tuple[str, ...]:
    """What was done so that numbers fit: float16 is cast to what the weights were trained in."""
    if fits():
        return ()
    if (dtype := _trained_in(module)) is not None:
        widen(dtype)
    if dtype is None or not fits():
        raise DFlashError(f"{name} computes infinite numbers or NaN", next_step)
    words = str(dtype).removeprefix("mlx.core.")
    return (f"the numbers of {name} exceed float16, so it computes in {words}",)


def _pass(target: Target, aux_layers: tuple[int, ...]) -> list[mx.array]:
    """Logits and features of tokens from all over the vocabulary."""
    vocabulary = target.forward(mx.zeros(1, mx.int32), target.new_cache(), Block(1))[0].shape[1]
    tokens = mx.arange(_TOKENS) * vocabulary // _TOKENS
    logits, features = target.forward(tokens, target.new_cache(), Block(_TOKENS), aux_layers)
    # some families give certain tokens -inf whatever the input is
    logits = mx.where((logits == -mx.inf).all(axis=0), 0, logits)
    return [logits] if features is None else [logits, features]


def _fit(arrays: Sequence[mx.array]) -> bool:
    largest = [mx.abs(a).max() <= mx.finfo(a.dtype).max / MARGIN for a in arrays]
    return all(fits.item() for fits in largest)


def _trained_in(module: nn.Module) -> mx.Dtype | None:
    """Bfloat16, where float16 weights look like they were that before; else float32, or None."""
    weights: list[tuple[str, mx.array]] = tree_flatten(module.parameters())  # type: ignore[assignment]
    floats = [array for _, array in weights if array.dtype == mx.float16]
    if not floats:
        return None
    exact = (mx.array_equal(a.astype(mx.bfloat16).astype(a.dtype), a) for a in floats)
    return mx.bfloat16 if all(same.item() for same in exact) else mx.float32  # up to the first


# Tokens and templates


def likely_tokens(folder: Path, tokenizer: Any, vocabulary: int) -> npt.NDArray[np.int64]:
    """All tokens [V], the likeliest first.

    By the frequencies beside the drafter. Then, or without such a file, what ends an answer, and
    the others by their ids: a tokenizer makes frequent tokens first. DFlashError for another file.
    """
    file = folder / LIKELY_TOKENS
    try:
        counted = np.load(file).astype(np.int64)
    except FileNotFoundError:
        counted = np.zeros(0, np.int64)
    except (OSError, ValueError, EOFError, AttributeError, TypeError) as error:
        raise DFlashError(f"{file} cannot be read ({error})", "delete it") from None
    if counted.ndim != 1 or np.any((counted < 0) | (counted >= vocabulary)):
        raise DFlashError(f"{file} has ids that are not tokens", "delete it")
    ends = sorted(token for token in tokenizer.eos_token_ids if token < vocabulary)
    order = np.concatenate([ends, counted, np.arange(vocabulary)]).astype(np.int64)
    _, first = np.unique(order, return_index=True)
    return order[np.sort(first)]


def draft_size(asked: int | None, vocabulary: int) -> int:
    """How many of them drafts are made of; DFlashError for more than there are."""
    if asked is not None and asked > vocabulary:
        what = f"draft_vocabulary is {asked}, but the model has {vocabulary} tokens"
        raise DFlashError(what, f"choose 1 to {vocabulary}", "draft_vocabulary")
    return asked or max(min(_LEAST, vocabulary), vocabulary // _SHARE)


def unread_arguments(tokenizer: Any, names: Iterable[str]) -> list[str]:
    """Those of `names` that the model's chat template does not read; all without a template."""
    jinja = Environment(extensions=["jinja2.ext.loopcontrols"])  # as transformers reads them
    if callable(getattr(tokenizer, "_chat_template", None)):
        return []  # a template in Python, of mlx-lm's own
    renamed = {"enable_thinking": getattr(tokenizer, "_thinking_kwarg", None)}  # by mlx-lm
    source = getattr(tokenizer, "chat_template", None)
    sources = source.values() if isinstance(source, dict) else [source or ""]
    read: set[str] = set()
    for text in sources:
        try:
            read |= meta.find_undeclared_variables(jinja.parse(text))
        except TemplateError:
            read |= set(names)  # what cannot be looked into may read anything
    return [name for name in names if (renamed.get(name) or name) not in read]
