"""What is compared: methods by name with settings behind it, on prompts that may be padded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from dflash_mlx.cli.prompts import Row
from dflash_mlx.core.config import AUTO, PLAIN, DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import Given, Options, number_or_auto, require, values_given
from dflash_mlx.drafters.methods import (
    METHODS,
    check_given,
    find_method,
    options_of,
    settle,
    takers,
)
from dflash_mlx.engine.pair import Capabilities
from dflash_mlx.session.templates import prompt_tokens


@dataclass(frozen=True)
class BenchmarkPrompt:
    """A prompt as the model gets it."""

    id: str
    category: str  # by which figures are grouped
    tokens: list[int]
    context: int | None = None  # tokens that it was to have


def read_contexts(text: str | None) -> list[int]:
    """Lengths in tokens from comma-separated text; DFlashError for anything else."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    for part in parts:
        counts = part.isdecimal() and int(part) > 0
        require(counts, "context", part, "whole numbers of tokens, 1 or more")
    return [int(part) for part in parts]


def questions(
    tokenizer: Any,
    rows: Sequence[Row],
    contexts: Sequence[int],
    source: Sequence[Row],
    template: Mapping[str, Any] | None = None,
) -> list[BenchmarkPrompt]:
    """Every row once, or once for every length in `contexts`.

    With several lengths they are the categories, so that each has figures of its own. source: rows
    whose text pads the others. template: arguments of the chat template.
    """
    result = []
    for row in rows:
        for length in contexts or (None,):
            category = f"{length} tokens" if len(contexts) > 1 else row["category"]
            tokens = pad(tokenizer, row, length or 0, source, template)
            result.append(BenchmarkPrompt(str(row.get("id", "")), category, tokens, length))
    return result


def pad(
    tokenizer: Any,
    row: Row,
    length: int,
    source: Sequence[Row],
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """The row's prompt as `length` tokens, template included, or a few less.

    The user turns of the rows after it in `source`, and then of those before it, are put in front
    of its own last turn, in one message. Raises DFlashError where there is no other text.
    """

    def behind(text: str) -> list[int]:
        *before, last = row["messages"]
        text = text.strip("\ufffd").strip()  # a character that was cut in half
        content = f"{text}\n\n{last['content']}" if text else last["content"]
        messages = [*before, {**last, "content": content}]
        return prompt_tokens(tokenizer, messages, template=template)

    tokens = behind("")
    if len(tokens) >= length:
        return tokens
    filler = _filler(tokenizer, row, source, length)

    def padded(size: int) -> list[int]:
        return behind(tokenizer.decode(filler[:size]))

    # texts can have no encoding of exactly this length
    return padded(bisect_right(range(len(filler)), length, key=lambda size: len(padded(size))) - 1)


def _filler(tokenizer: Any, row: Row, source: Sequence[Row], length: int) -> list[int]:
    at = source.index(row) if row in source else 0
    texts = [_text(other) for other in (*source[at:], *source[:at])]
    others = [text for text in texts if text not in ("", _text(row))]
    if not others:
        raise DFlashError("there is no other prompt to pad with", "leave --context out")
    around = tokenizer.encode("\n\n".join([*others, ""]), add_special_tokens=False)
    # Twice as much, for where two texts meet, tokens of both can become one.
    return around * (1 + 2 * length // len(around))  # type: ignore[no-any-return]


def _text(row: Row) -> str:
    return "\n\n".join(m["content"] for m in row["messages"] if m["role"] == "user").strip()


def describe_lengths(asked: Sequence[BenchmarkPrompt]) -> dict[str, Any]:
    """How long the prompts are in fact, in tokens, for the report."""
    lengths = [len(question.tokens) for question in asked]
    return {
        "asked": sorted({q.context for q in asked if q.context is not None}),
        "longer_than_asked": sum(len(q.tokens) > q.context for q in asked if q.context is not None),
        "shortest": min(lengths),
        "longest": max(lengths),
    }


_BLOCK = "block"  # as `block_size` is called in names
_SHARED = {  # settings of every method that names may set
    _BLOCK if field.name == "block_size" else field.name: field
    for field in fields(DecodeConfig)
    if field.name in ("block_size", "budget", "lookup", "exact")
}
Knobs = Mapping[str, type[Options]]  # options of methods in place of their usual ones


def read_methods(
    names: str, config: DecodeConfig, knobs: Knobs = MappingProxyType({})
) -> dict[str, DecodeConfig]:
    """Settings by method name, `none` first; DFlashError for names and settings without sense."""
    methods = {PLAIN: replace(config, method=PLAIN, block_size=None, options=Options())}
    parts = [part.strip() for part in names.split(",")]
    if twice := [name for name in parts if parts.count(name) > 1]:
        raise DFlashError(f"{twice[0]!r} comes twice in {names!r}", "name every method once")
    methods |= {name: _read_method(name, config, knobs) for name in parts if name != PLAIN}
    check_given(config, *(method.method for method in methods.values()))
    return methods


def settle_all(
    methods: dict[str, DecodeConfig], capabilities: Capabilities
) -> dict[str, DecodeConfig]:
    """`methods` as they are with a pair: what `auto` is there goes by its own name."""
    settled = {name: settle(config, capabilities) for name, config in methods.items()}
    return {
        ":".join([config.method, *name.split(":")[1:]]): config for name, config in settled.items()
    }


def _read_method(name: str, config: DecodeConfig, knobs: Knobs) -> DecodeConfig:
    config = replace(config, method=name.partition(":")[0])
    try:
        method = None if config.method == AUTO else find_method(config.method)
    except DFlashError as error:
        raise DFlashError(f"{error.what} in --methods", error.next_step) from None
    kind = knobs.get(config.method, method.options if method else Options)
    given = _given(name, config.method, {f.name: f for f in fields(kind)}, knobs)
    shared = {name: given[name] for name in given if hasattr(config, name)}
    own = {name: value for name, value in given.items() if name not in shared}
    try:
        if method is None:
            own = {**values_given(config.options), **own}
            return replace(config, options=Given.of(**own), **shared)
        options = replace(options_of(config, method, kind), **own)
        if not options.cuts:
            shared = {"budget": None, **shared}  # one for all methods is the others'
        config = replace(config, options=options, **shared)
        options.check(config)
        return config
    except DFlashError as error:  # of a setting that is written here, not as an option
        raise DFlashError(f"{error.what} in {name!r}", error.next_step) from None


def _given(name: str, method: str, own: Mapping[str, Field[Any]], knobs: Knobs) -> dict[str, Any]:
    """What a name sets, by setting; DFlashError for what the method does not have."""
    kinds = [*(method.options for method in METHODS.values()), *knobs.values()]
    known = {field.name: field for kind in kinds for field in fields(kind)} | _SHARED | {**own}
    given: dict[str, Any] = {}
    for part in name.split(":")[1:]:
        key, equals, value = part.partition("=")
        key, value = (key, value) if equals else (_BLOCK, key)
        if (setting := known.get(key)) is None:
            raise DFlashError(f"{name!r} sets {key!r}", f"choose from {', '.join(known)}")
        owners = (AUTO, *takers(setting.name))
        if key not in own and method not in owners and (key not in _SHARED or owners[1:]):
            what = f"{name!r} sets {key!r}, which {method} does not have"
            raise DFlashError(what, "leave it out")
        if setting.name in given:
            raise DFlashError(f"{name!r} sets the {key} twice", "give it once")
        given[setting.name] = _read_value(name, key, setting, value)
    return given


def _read_value(source: str, key: str, setting: Field[Any], value: str) -> Any:
    if "choices" in setting.metadata["argparse"]:
        return value
    allowed = "give a whole number"
    if isinstance(setting.default, bool):
        if value in ("on", "off"):
            return value == "on"
        allowed = "choose on or off"
    elif setting.metadata["argparse"].get("type") is number_or_auto and value == AUTO:
        return None
    elif value.isdecimal():
        return int(value)
    raise DFlashError(f"{key} in {source!r} is {value!r}", allowed)
