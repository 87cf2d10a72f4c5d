"""What a target's config.json asks for, and whether mlx-lm can build it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import Finding, in_one_line
from dflash_mlx.drafters.methods import format_of
from dflash_mlx.models.source import CONFIG, Source
from dflash_mlx.models.weight_files import BY_LAYER, wrong_number
from dflash_mlx.target.layouts import may_be_recurrent
from dflash_mlx.target.model import ONE_OFFSET, Target

CONTEXT_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
CHOOSE_TARGET = "choose a complete model folder of a family that mlx-lm supports"
_CHOOSE = "choose a model of a family that mlx-lm supports itself"
_POSITIVE = (
    "hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "head_dim", *CONTEXT_LENGTHS,
)  # fmt: skip


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
        values = value if field == BY_LAYER and isinstance(value, list) and value else [value]
        if value is not None and any(type(v) is not int or v < 1 for v in values):
            yield wrong_number(source, field, value, "a whole number from 1 on")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(kv_heads) is int and type(heads) is int and (kv_heads < 1 or heads % kv_heads):
        wanted = f"a divisor of its {heads} attention heads"
        yield wrong_number(source, "num_key_value_heads", kv_heads, wanted)
    if not context_length(config):
        step = f"add {CONTEXT_LENGTHS[0]} to it, or choose another model"
        yield Finding("error", f"{source.place(CONFIG)} has no {CONTEXT_LENGTHS[0]}", step)


def check_family(source: Source, raw: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether mlx-lm has the family, and verifies trees with it.

    Raises DFlashError where it cannot read the configuration.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or not kind.replace("-", "_").isidentifier():
        what = f"{source.name} cannot be loaded: model_type in {source.place(CONFIG)} is {kind!r}"
        yield Finding("error", what, _CHOOSE)
        return
    from mlx_lm.utils import _get_classes  # not before a model is looked at: it takes seconds

    with loading(source.name):
        _, arguments = _get_classes(dict(raw))
        arguments.from_dict(dict(raw))
    why = ""
    if may_be_recurrent(kind):
        why = f"{kind} may keep recurrent state in some layers, so it verifies chains, no trees"
    elif kind in ONE_OFFSET:
        why = f"{kind} computes with one position for a whole pass, so it verifies no trees"
    if why:
        step = "use --method dflash or --method ngram, which draft chains"
        yield Finding("note", why, step)


def check_built(folder: Path) -> None:
    """DFlashError for what mlx-lm cannot build, or for caches that do not take drafts back.

    Takes the time to build it; only of a folder without errors. No weight is read.
    """
    from mlx_lm.utils import load_model

    with loading(str(folder)):
        Target(load_model(folder, lazy=True)[0], 1, str(folder))


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Says of the model `name` what libraries cannot do with it, as a DFlashError."""
    try:
        yield
    except DFlashError:
        raise
    except Exception as error:  # of three libraries, one of which raises plain ones
        raise DFlashError(
            f"{name} cannot be loaded ({in_one_line(error)})", CHOOSE_TARGET
        ) from None
