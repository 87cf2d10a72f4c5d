"""Fields of settings that carry their help texts, and what their values may be."""

from __future__ import annotations

import argparse
from dataclasses import Field, dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.text import read_text

LARGEST = 2**31 - 1  # whole number; what arrays can be indexed with
ABOVE_0 = 5e-324  # the least number above 0, as the least of a range


def option(
    default: Any,
    help: str,
    *,
    label: str = "",  # for people; its name in words where there is none
    least: float | None = None,
    most: float | None = None,
    **argparse_keywords: Any,
) -> Any:
    """A dataclass field that carries what command lines, checks and screens say of it.

    How its value is read goes by its default, where that tells.
    """
    kind: dict[str, Any] = {"type": type(default)} if isinstance(default, int | float) else {}
    if isinstance(default, bool | tuple):
        kind = {"action": "append" if default == () else "store_true"}
    said: dict[str, Any] = {"help": help, "label": label, "range": (least, most)}
    return field(default=default, metadata={**said, "argparse": {**kind, **argparse_keywords}})


def label_in_words(option: Field[Any]) -> str:
    """What a setting is called on screen; one without a label is called as in files."""
    in_words = option.name.replace("_", " ").capitalize()
    return str(option.metadata.get("label") or in_words)


@dataclass(frozen=True)
class Options:
    """The options of one method, beside the settings that hold for every method."""

    cuts: ClassVar[bool] = True  # whether a budget cuts what is drafted

    def __post_init__(self) -> None:
        check_values(self)

    def check(self, config: Any) -> None:
        """Raise DFlashError for a `DecodeConfig` whose other settings do not go with these."""

    @property
    def later_blocks(self) -> dict[str, int | None]:
        """The block sizes of further draft models, by the name of their option."""
        return {}


@dataclass(frozen=True)
class Given:
    """Options of methods by name, where it is not known yet which method will have them."""

    values: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, **values: Any) -> Given:
        return cls(tuple(values.items()))


def values_given(settings: Any) -> dict[str, Any]:
    """The settings that were given: of `Given` all, of a settings object those not at default."""
    if isinstance(settings, Given):
        return dict(settings.values)
    known = () if settings is None else fields(settings)
    given = {f.name: (getattr(settings, f.name), f.default) for f in known}
    return {name: value for name, (value, default) in given.items() if value != default}


def check_values(settings: Any) -> None:
    """`require` that every value is among its option's choices, or in its range.

    None is right where it stands for a value that was not given.
    """
    for each in fields(settings):
        value, said = getattr(settings, each.name), each.metadata
        bounds = said.get("range", (None, None))
        if value is None and each.default is None:
            continue
        if (choices := said.get("argparse", {}).get("choices")) is not None:
            known = ", ".join(map(str, choices))
            require(value in choices, each.name, value, f"one of {known}")
        elif _is_number(each.default) or bounds != (None, None):
            require(_is_number(value), each.name, value, "a number")
            _check_range(each.name, value, *bounds)
        elif each.type in ("str", "str | None"):
            require(isinstance(value, str), each.name, value, "a text")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_range(name: str, value: float, least: float | None, most: float | None) -> None:
    """`require` that a number is in this range, and small enough to compute with."""
    fits = (least is None or value >= least) and (most is None or value <= most)
    words = f"{least} or more" if most is None else f"{least} to {most}"
    if least == ABOVE_0:
        words = "a number above 0" + ("" if most is None else f" and up to {most}")
    require(fits, name, value, words)
    require(most is not None or value <= LARGEST, name, value, f"at most {LARGEST}")


def number_or_auto(text: str) -> int | None:
    """A whole number, None for "auto"."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a whole number") from None


def file_text(name: str) -> str:
    """What a file holds, without a byte order mark."""
    try:
        return read_text(Path(name), "")
    except DFlashError as error:
        raise argparse.ArgumentTypeError(error.what) from None


def require(condition: bool, name: str, value: Any, allowed: str) -> None:
    """Raise DFlashError that the setting `name` is `value`, unless the condition holds."""
    if not condition:
        raise DFlashError(f"{name} is {value!r}", f"choose {allowed}", name)
