"""Which settings are compared: methods by name, and sweeps over one of their settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from dflash_mlx.core.config import AUTO, PLAIN, DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import check_given, find_method, settle, takers
from dflash_mlx.drafters.ngram import DEFAULT_SIZE
from dflash_mlx.engine.pair import Capabilities, Pair

_SWITCHES = [
    f.name for f in fields(DecodeConfig) if isinstance(f.default, bool) and f.name != "recalibrate"
]
_WORDS = ("growth", "schedule")
_SETTINGS = {"block": "block_size"} | {
    name: name
    for name in (
        "block_size",
        "second_block_size",
        "budget",
        "branches",
        "levels",
        "steps",
        *_WORDS,
        *_SWITCHES,
    )
}
_SWEPT = {
    "block": ("2", "3", "4", "6", "8", "12", "16"),
    "branches": ("1", "2", "4", "6", "8"),
    "budget": (AUTO, "4", "8", "16", "32", "48"),
    "steps": ("1", "2", "4"),
}


def read_methods(names: str, config: DecodeConfig) -> dict[str, DecodeConfig]:
    """Settings by method name; `none` first, since the others are compared with it.

    Raises DFlashError for a method that comes twice, and for a setting that none of them takes.
    """
    methods = {PLAIN: replace(config, method=PLAIN, block_size=None)}
    parts = [part.strip() for part in names.split(",")]
    if twice := [name for name in parts if parts.count(name) > 1]:
        raise DFlashError(f"{twice[0]!r} comes twice in {names!r}", "name every method once")
    methods |= {name: _read_method(name, config) for name in parts if name != PLAIN}
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


def _details(name: str) -> list[tuple[str, str]]:
    """The settings behind a method's colons: a block size, or key=value."""
    parts = (part.partition("=") for part in name.split(":")[1:])
    return [(key, value) if equals else ("block", key) for key, equals, value in parts]


def _own(name: str) -> set[str]:
    return {_SETTINGS[key] for key, _ in _details(name)}


def _read_method(name: str, config: DecodeConfig) -> DecodeConfig:
    config = replace(config, method=name.partition(":")[0])
    try:
        if config.method != AUTO:
            find_method(config.method)
    except DFlashError as error:
        raise DFlashError(f"{error.what} in --methods", error.next_step) from None
    given = {}
    for key, value in _details(name):
        if key not in _SETTINGS:
            raise DFlashError(f"{name!r} sets {key!r}", f"choose from {', '.join(_SETTINGS)}")
        owners = takers(_SETTINGS[key])
        if owners and config.method not in owners:
            what = f"{name!r} sets {key!r}, which {config.method} does not have"
            raise DFlashError(what, "leave it out")
        if _SETTINGS[key] in given:
            raise DFlashError(f"{name!r} sets the {key} twice", "give it once")
        given[_SETTINGS[key]] = _read_value(name, key, value)
    try:
        return replace(config, **{**given, **_uncut(config, given)})
    except DFlashError as error:  # of a setting that is written here, not as an option
        raise DFlashError(f"{error.what} in {name!r}", error.next_step) from None


def _uncut(config: DecodeConfig, given: dict[str, Any]) -> dict[str, Any]:
    """No budget for trees that are never cut: one for all methods is the others'."""
    growth = given.get("growth", config.growth)
    if config.method != "d2sd" or growth == "joint":
        return {}
    if (budget := given.get("budget")) is not None:
        what = f"growth={growth} never cuts its tree, but the budget is {budget}"
        raise DFlashError(what, "leave the budget or the growth out")
    return {"budget": None}


def _read_value(source: str, key: str, value: str) -> Any:
    if key in _WORDS:
        return value
    what, allowed = key.replace("block_size", "block"), "give a whole number"
    if key in _SWITCHES:
        if value in ("on", "off"):
            return value == "on"
        allowed = "choose on or off"
    elif key == "budget" and value == AUTO:
        return None
    elif value.isdecimal():
        return int(value)
    raise DFlashError(f"{what} in {source!r} is {value!r}", allowed)


def largest_block(pair: Pair, method: str) -> int:
    """What the draft model that a method runs, or runs first, was trained for."""
    family = find_method(method).family
    return pair.of(family)[0].block_size if family else DEFAULT_SIZE


def expand(
    sweep: str, methods: dict[str, DecodeConfig], largest: Callable[[str], int]
) -> tuple[dict[str, DecodeConfig], dict[str, Any]]:
    """The methods to run; and the setting with, by method swept, the name of each value's run.

    sweep: `setting=value,value`, or `setting` for its usual values, without blocks above the
    `largest` of a method. Methods without the setting, or with a value of their own for it, run
    once. `auto` may have any setting as long as it is not settled. Raises DFlashError for any other
    text, and where no method is left to sweep.
    """
    key, equals, listed = sweep.partition("=")
    if key not in _SWEPT:
        raise DFlashError(f"the sweep is over {key!r}", f"choose {', '.join(_SWEPT)}")
    values = [value.strip() for value in listed.split(",")] if equals else _SWEPT[key]
    given = {value: {_SETTINGS[key]: _read_value(sweep, key, value)} for value in values}
    takes = (AUTO, *takers(_SETTINGS[key]))
    expanded: dict[str, DecodeConfig] = {}
    lines: dict[str, dict[str, str]] = {}
    for name, config in methods.items():
        uncut = key == "budget" and config.method == "d2sd" and config.growth != "joint"
        if uncut or config.method not in takes or _SETTINGS[key] in _own(name):
            expanded[name] = config
        else:
            most = largest(config.method) if key == "block" and not equals else None
            fitting = [value for value in given if most is None or int(value) <= most]
            lines[name] = {value: f"{name}:{key}={value}" for value in fitting}
            expanded |= {run: replace(config, **given[v]) for v, run in lines[name].items()}
    if not lines:
        what = f"no method has a {key} to sweep over"
        raise DFlashError(what, f"add one of {', '.join(takes[1:])} to --methods")
    return expanded, {"setting": key, "lines": lines}
