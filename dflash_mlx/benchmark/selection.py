"""Which settings are compared: methods by name, and sweeps over one of their settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, fields, replace
from types import MappingProxyType
from typing import Any

from dflash_mlx.core.config import AUTO, PLAIN, DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import Given, Options, values_given
from dflash_mlx.drafters.methods import (
    METHODS,
    as_usual,
    check_given,
    find_method,
    options_of,
    settle,
    takers,
)
from dflash_mlx.drafters.ngram import DEFAULT_SIZE
from dflash_mlx.engine.pair import Capabilities, Pair

_BLOCK = "block"  # as `block_size` is called in names
_SHARED = {  # settings of every method that names may set
    _BLOCK if field.name == "block_size" else field.name: field
    for field in fields(DecodeConfig)
    if field.metadata.get("usual") or field.name in ("lookup", "exact")
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


def _details(name: str) -> list[tuple[str, str]]:
    parts = (part.partition("=") for part in name.split(":")[1:])
    return [(key, value) if equals else (_BLOCK, key) for key, equals, value in parts]


def _read_method(name: str, config: DecodeConfig, knobs: Knobs) -> DecodeConfig:
    config = replace(config, method=name.partition(":")[0])
    try:
        method = None if config.method == AUTO else find_method(config.method)
    except DFlashError as error:
        raise DFlashError(f"{error.what} in --methods", error.next_step) from None
    kind = knobs.get(config.method, method.options if method else Options)
    given = _given(name, config.method, {f.name: f for f in fields(kind)}, knobs)
    try:
        if method is not None:
            config = replace(config, options=options_of(config, method, kind))
        for setting, value in given.items():
            config = _changed(config, setting, value)
        if isinstance(options := config.options, Options):
            if not options.cuts and "budget" not in given:
                config = replace(config, budget=None)  # one for all methods is the others'
            options.check(config)
        return config
    except DFlashError as error:  # of a setting that is written here, not as an option
        raise DFlashError(f"{error.what} in {name!r}", error.next_step) from None


def _given(name: str, method: str, own: Mapping[str, Field[Any]], knobs: Knobs) -> dict[str, Any]:
    """What a name sets, by setting; DFlashError for what the method does not have."""
    known, given = {**_all_own(knobs), **_SHARED, **own}, dict[str, Any]()
    for key, value in _details(name):
        if (setting := known.get(key)) is None:
            raise DFlashError(f"{name!r} sets {key!r}", f"choose from {', '.join(known)}")
        owners = takers(setting.name)
        if key not in own and (key not in _SHARED or (owners and method not in owners)):
            raise DFlashError(
                f"{name!r} sets {key!r}, which {method} does not have", "leave it out"
            )
        if setting.name in given:
            raise DFlashError(f"{name!r} sets the {key} twice", "give it once")
        given[setting.name] = _read_value(name, key, setting, value)
    return given


def _all_own(knobs: Knobs) -> dict[str, Field[Any]]:
    kinds = [*(method.options for method in METHODS.values()), *knobs.values()]
    return {field.name: field for kind in kinds for field in fields(kind)}


def _read_value(source: str, key: str, setting: Field[Any], value: str) -> Any:
    if "choices" in setting.metadata["argparse"]:
        return value
    allowed = "give a whole number"
    if isinstance(setting.default, bool):
        if value in ("on", "off"):
            return value == "on"
        allowed = "choose on or off"
    elif AUTO in setting.metadata["usual"] and value == AUTO:
        return None
    elif value.isdecimal():
        return int(value)
    raise DFlashError(f"{key} in {source!r} is {value!r}", allowed)


def _changed(config: DecodeConfig, name: str, value: Any) -> DecodeConfig:
    if hasattr(config, name):
        return replace(config, **{name: value})
    if isinstance(config.options, Options):
        return replace(config, options=replace(config.options, **{name: value}))
    return replace(config, options=Given.of(**{**values_given(config.options), name: value}))


def largest_block(pair: Pair, method: str) -> int:
    """What the draft model that a method runs, or runs first, was trained for."""
    family = find_method(method).family
    return pair.of(family)[0].block_size if family else DEFAULT_SIZE


def expand(
    sweep: str, methods: dict[str, DecodeConfig], largest: Callable[[str], int]
) -> tuple[dict[str, DecodeConfig], dict[str, Any]]:
    """The methods to run; and the setting with, by method swept, the name of each value's run.

    sweep: `setting=value,value`, or `setting` for its usual values, of blocks those up to the
    `largest` of a method. Methods without the setting, or with their own value for it, run once.
    Raises DFlashError for any other text, and where no method is left to sweep.
    """
    key, equals, listed = sweep.partition("=")
    swept = {k: f for k, f in {**_SHARED, **_all_own({})}.items() if f.metadata["usual"]}
    if key not in swept:
        raise DFlashError(f"the sweep is over {key!r}", f"choose {', '.join(sorted(swept))}")
    setting = swept[key]
    values = [value.strip() for value in listed.split(",")] if equals else setting.metadata["usual"]
    given = {value: _read_value(sweep, key, setting, value) for value in values}
    takes = (AUTO, *takers(setting.name))
    expanded: dict[str, DecodeConfig] = {}
    lines: dict[str, dict[str, str]] = {}
    for name, config in methods.items():
        options = config.options if isinstance(config.options, Options) else Options()
        has_it = setting.name in (f.name for f in fields(options)) or config.method in takes
        if not has_it or key in dict(_details(name)) or (key == "budget" and not options.cuts):
            expanded[name] = config
            continue
        most = largest(config.method) if key == _BLOCK and not equals else None
        fitting = [value for value in given if most is None or int(value) <= most]
        lines[name] = {value: f"{name}:{key}={value}" for value in fitting}
        for value, run in lines[name].items():
            expanded[run] = _changed(config, setting.name, given[value])
    if not lines:
        what = f"no method has a {key} to sweep over"
        raise DFlashError(what, f"add one of {', '.join(takes[1:])} to --methods")
    return expanded, {"setting": key, "lines": lines}


def keep_speeds(
    pair: Pair, methods: Mapping[str, DecodeConfig], figures: Mapping[str, Mapping[str, Any]]
) -> str:
    """Keep which drafter is fastest, and say so; "" where not each ran as `auto` would run it.

    figures: of the methods, as `summarise` makes them.
    """
    speeds, families, times = pair.speeds, dict[str, str](), dict[str, float]()
    for family, name in () if speeds is None else speeds.drafters:
        families[name] = family = family or pair.drafters[0].family
        count = max(1, pair.capabilities.count(family))
        alone = Capabilities((family,) * count, pair.target.takes_trees, pair.preset)
        method = settle(DecodeConfig(), alone).method
        if method not in figures or not as_usual(methods[method]):
            return ""
        times[name] = figures[method]["speedup"]
    return "" if speeds is None else speeds.keep(families, times)
