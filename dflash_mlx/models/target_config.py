"""What a config.json asks for, against what its weight files can hold and mlx-lm can build."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import Finding, in_one_line
from dflash_mlx.drafters.methods import format_of
from dflash_mlx.models.source import CONFIG, Source
from dflash_mlx.models.weight_files import Weights
from dflash_mlx.target.model import ONE_OFFSET, Target
from dflash_mlx.target.sequence import may_be_recurrent

CONTEXT_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
BUILD_ERRORS = (
    ValueError, LookupError, TypeError, OSError, RuntimeError, AttributeError, ImportError,
    ArithmeticError, AssertionError,
)  # fmt: skip

_CHOOSE = "choose a model of a family that mlx-lm supports itself"
_POSITIVE = (
    "hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "head_dim", *CONTEXT_LENGTHS,
)  # fmt: skip
_BY_LAYER = "intermediate_size"  # gemma3n has a list of them, one for each layer
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
# Sizes of something that is stored, so that the files have at least one bit for each unit.
_STORED = re.compile(
    r"(?!.*(window|chunk|block|group|batch))(.*_(size|dim|dims|layers|heads|rank|experts)|n_\w+|d_\w+|dim)"
)


def language_model(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the language model's part, where it has one, on top."""
    part = raw.get("text_config")
    return {**raw, **part} if isinstance(part, dict) else dict(raw)


def is_drafter(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a drafter of any family."""
    return format_of(raw) is not None


def context_length(config: Mapping[str, Any]) -> int:
    """The most tokens a sequence may have; 0 where the configuration does not say."""
    lengths = (config.get(key) for key in CONTEXT_LENGTHS)
    return next((length for length in lengths if type(length) is int and length > 0), 0)


def quantisation(raw: Mapping[str, Any]) -> tuple[str, int]:
    """How weights are quantised, in words, "" for not at all; and the size of a group."""
    found = raw.get("quantization") or raw.get("quantization_config")
    if not isinstance(found, dict):
        return "", 64
    bits, group = found.get("bits"), found.get("group_size")
    if type(bits) is not int or type(group) is not int:
        return str(found.get("quant_method", found.get("mode", "in a way of its own")))[:40], 64
    mode = "" if found.get("mode", "affine") == "affine" else f", {str(found['mode'])[:20]}"
    return f"{bits} bits in groups of {group}{mode}", group


def check_code(source: Source, raw: Mapping[str, Any]) -> Iterator[Finding]:
    """Configurations that ask to run Python of their own, which never happens here.

    Published models of built-in families often keep an `auto_map` that names the very class in
    `architectures`; that is a note, since the built-in class of this name is what runs.
    """
    place, file, auto_map = source.place(CONFIG), raw.get("model_file"), raw.get("auto_map")
    if file is not None:
        asked = f"its own Python file {repr(file)[:80]} (model_file in {place})"
        yield Finding("error", f"{source.name} asks to run {asked}", _CHOOSE)
    if auto_map is None:
        return
    names = raw.get("architectures")
    known = {str(name) for name in names} if isinstance(names, list) else set()
    values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    where = f"auto_map in {place} is {repr(auto_map)[:120]}"
    if known & {str(value).rpartition(".")[2] for value in values}:
        what = f"{where}; no Python of it runs, the built-in class does"
        yield Finding("note", what, "nothing needs to be done")
    else:
        what = f"{source.name} asks to run its own Python classes ({where})"
        yield Finding("error", what, _CHOOSE)


def check_numbers(source: Source, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Sizes that are no whole numbers from 1 on, a missing context length, head counts."""
    for field in _POSITIVE:
        value = config.get(field)
        values = value if field == _BY_LAYER and isinstance(value, list) and value else [value]
        if value is not None and any(type(v) is not int or v < 1 for v in values):
            yield _number(source, field, value, "a whole number from 1 on")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(kv_heads) is int and type(heads) is int and (kv_heads < 1 or heads % kv_heads):
        wanted = f"a divisor of its {heads} attention heads"
        yield _number(source, "num_key_value_heads", kv_heads, wanted)
    if not context_length(config):
        step = f"add {CONTEXT_LENGTHS[0]} to it, or choose another model"
        yield Finding("error", f"{source.place(CONFIG)} has no {CONTEXT_LENGTHS[0]}", step)


def _number(source: Source, field: str, value: Any, wanted: str) -> Finding:
    what = f"{field} in {source.place(CONFIG)} is {repr(value)[:80]}, not {wanted}"
    return Finding("error", what, "choose another model")


def check_sizes(source: Source, raw: Mapping[str, Any], weights: Weights) -> Iterator[Finding]:
    """Sizes that the weight files cannot hold, so that building the model would not end well."""
    bits, tensors = 8 * weights.stored_bytes, len(weights.tensors)
    for field, value in _stored_sizes(raw):
        limit, unit = (tensors, "tensors") if field in _LAYERS else (bits, "bits")
        if value > limit:
            yield _number(source, field, value, f"possible with {limit} {unit} of weights")


def _stored_sizes(raw: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for field, value in raw.items():
        if isinstance(value, dict):
            yield from _stored_sizes(value)
        elif field == _BY_LAYER and isinstance(value, list):
            yield from ((field, v) for v in value if isinstance(v, int | float))
        elif isinstance(value, int | float) and _STORED.fullmatch(field):
            yield field, value


def check_family(source: Source, raw: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether mlx-lm has the family and can read the configuration, and verifies trees with it."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or not kind.replace("-", "_").isidentifier():
        what = f"{source.name} cannot be loaded: model_type in {source.place(CONFIG)} is {kind!r}"
        yield Finding("error", what, _CHOOSE)
        return
    from mlx_lm.utils import _get_classes  # not before a model is looked at: it takes seconds

    try:
        _, arguments = _get_classes(dict(raw))
        arguments.from_dict(dict(raw))
    except BUILD_ERRORS as error:
        yield Finding("error", f"{source.name} cannot be loaded ({in_one_line(error)})", _CHOOSE)
        return
    why = ""
    if may_be_recurrent(kind):
        why = f"{kind} may keep recurrent state in some layers, so it verifies chains, no trees"
    elif kind in ONE_OFFSET:
        why = f"{kind} computes with one position for a whole pass, so it verifies no trees"
    if why:
        step = "use --method dflash or --method ngram, which draft chains"
        yield Finding("note", why, step)


def check_built(folder: Path) -> Iterator[Finding]:
    """What mlx-lm says when it builds the model, and we when its caches have to take drafts back.

    Takes the time to build it; only of a folder without errors. No weight is read.
    """
    from mlx_lm.utils import load_model

    try:
        Target(load_model(folder, lazy=True)[0], 1, str(folder))
    except DFlashError as error:
        yield Finding("error", error.what, error.next_step)
    except BUILD_ERRORS as error:
        yield Finding("error", f"{folder} cannot be loaded ({in_one_line(error)})", _CHOOSE)
