"""Which settings are compared: methods by name, and sweeps over one of their settings."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import METHODS, find_method, settle, takers
from dflash_mlx.engine.pair import Means

PLAIN = "none"
AUTO = "auto"  # the budget that pays on this machine; the method that a pair is best used with

_SWITCHES = tuple(
    f.name for f in fields(DecodeConfig) if isinstance(f.default, bool) and f.name != "recalibrate"
)
_FIELDS = {
    "block": "block_size",
    "block_size": "block_size",
    "budget": "budget",
    "branches": "branches",
    "growth": "growth",
    **{name: name for name in _SWITCHES},
}
_DEFAULTS = {
    "block": ("2", "3", "4", "6", "8", "12", "16"),
    "branches": ("1", "2", "4", "6", "8"),
    "budget": (AUTO, "4", "8", "16", "32", "48"),
}


def read_methods(names: str, config: DecodeConfig) -> dict[str, DecodeConfig]:
    """Settings by method name; `none` first, since the others are compared with it."""
    methods = {PLAIN: replace(config, method=PLAIN, block_size=None)}
    for name in (part.strip() for part in names.split(",")):
        if name != PLAIN:
            methods[name] = _read_method(name, config)
    return methods


def settle_all(methods: dict[str, DecodeConfig], means: Means) -> dict[str, DecodeConfig]:
    """`methods` as they are with a pair: what `auto` is there goes by its own name."""
    settled = {}
    for name, config in methods.items():
        config = settle(config, means)
        settled[":".join([config.method, *name.split(":")[1:]])] = config
    return settled


def name_blocks(methods: dict[str, DecodeConfig], asked: DecodeConfig) -> dict[str, DecodeConfig]:
    """`methods` with the block that is advised for the pair in their names, where one is."""
    named = {}
    for name, config in methods.items():
        is_advised = config.block_size != asked.block_size and "block_size" not in _own(name)
        shown = config.block_size if is_advised else None
        named[name if shown is None else f"{name}:{shown}"] = config
    return named


def _own(name: str) -> set[str]:
    """The settings that a method has by its name."""
    keys = [detail.partition("=")[0] for detail in name.split(":")[1:]]
    return {_FIELDS.get(key, "block_size") for key in keys}


def _read_method(name: str, config: DecodeConfig) -> DecodeConfig:
    """A method, a block size or key=value behind each colon."""
    method, *details = name.split(":")
    if method != AUTO:
        find_method(method)
    given: dict[str, Any] = {}
    for detail in details:
        key, equals, value = detail.partition("=")
        if not equals:
            key, value = "block", detail
        if key not in _FIELDS:
            raise DFlashError(f"{name!r} sets {key!r}", f"choose from {', '.join(_FIELDS)}")
        owners = takers(_FIELDS[key])
        if method in METHODS and owners and method not in owners:
            raise DFlashError(
                f"{name!r} sets {key!r}, which {method} does not have", "leave it out"
            )
        given[_FIELDS[key]] = _read_value(name, key, value)
    if given.get("growth") == "paper" and given.get("budget") is not None:
        raise DFlashError(f"{name!r} cuts the published tree", "leave the budget or the growth out")
    return replace(config, method=method, **given)


def _read_value(source: str, key: str, value: str) -> Any:
    if key == "growth":
        return value
    if key in _SWITCHES:
        if value not in ("on", "off"):
            raise DFlashError(f"{key} in {source!r} is {value!r}", "choose on or off")
        return value == "on"
    if key == "budget" and value == AUTO:
        return None
    if not value.isdecimal():
        what = "the block size" if key in ("block", "block_size") else key
        raise DFlashError(f"{what} in {source!r} is {value!r}", "give a whole number")
    return int(value)


@dataclass(frozen=True)
class Sweep:
    """One setting of the methods that have it, over several values.

    given: whether the values were asked for; default blocks larger than the drafter's are left out.
    """

    setting: str
    values: tuple[str, ...]
    given: bool

    @classmethod
    def read(cls, text: str) -> Sweep:
        """From `setting` or `setting=value,value`; DFlashError for any other text."""
        setting, equals, values = text.partition("=")
        if setting not in _DEFAULTS:
            raise DFlashError(f"the sweep is over {setting!r}", f"choose {', '.join(_DEFAULTS)}")
        given = tuple(dict.fromkeys(value.strip() for value in values.split(",")))
        for value in given if equals else ():
            _read_value(text, setting, value)
        return cls(setting, given if equals else _DEFAULTS[setting], bool(equals))

    def expand(
        self, methods: dict[str, DecodeConfig], largest_block: int
    ) -> tuple[dict[str, DecodeConfig], dict[str, dict[str, str]]]:
        """The methods to run; and, by method swept, the name of each value's run.

        Methods without the setting, or with a value of their own for it, run once. `auto` may have
        any setting as long as it is not settled. Raises DFlashError where no method is left to
        sweep.
        """
        expanded: dict[str, DecodeConfig] = {}
        lines: dict[str, dict[str, str]] = {}
        for name, config in methods.items():
            if not self._applies(name, config):
                expanded[name] = config
                continue
            lines[name] = {
                value: f"{name}:{self.setting}={value}" for value in self._values(largest_block)
            }
            for value, run in lines[name].items():
                setting = {_FIELDS[self.setting]: _read_value(run, self.setting, value)}
                expanded[run] = replace(config, **setting)
        if not lines:
            raise DFlashError(
                f"no method has a {self.setting} to sweep over",
                f"add one of {', '.join(takers(_FIELDS[self.setting]))} to --methods",
            )
        return expanded, lines

    def _applies(self, name: str, config: DecodeConfig) -> bool:
        published = self.setting == "budget" and config.growth == "paper"
        takes = config.method in (AUTO, *takers(_FIELDS[self.setting])) and not published
        return takes and _FIELDS[self.setting] not in _own(name)

    def _values(self, largest_block: int) -> tuple[str, ...]:
        if self.setting != "block" or self.given:
            return self.values
        return tuple(value for value in self.values if int(value) <= largest_block)
