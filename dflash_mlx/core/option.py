"""Fields of settings that carry their help texts, and what their values may be."""

from __future__ import annotations

import argparse
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from dflash_mlx.core.errors import DFlashError

LARGEST = 2**31 - 1  # whole number; what arrays can be indexed with


def option(default: Any, help: str, **argparse_keywords: Any) -> Any:
    """A dataclass field that carries its own help text and argparse keywords."""
    return field(default=default, metadata={"help": help, "argparse": argparse_keywords})


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
        return Path(name).read_text(encoding="utf-8").removeprefix("\ufeff")
    except OSError as error:
        reason = error.strerror or str(error)
        raise argparse.ArgumentTypeError(f"{name} cannot be read ({reason})") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{name} is no text in UTF-8 ({error})") from None


def require(condition: bool, name: str, value: Any, allowed: str) -> None:
    """Raise DFlashError that the setting `name` is `value`, unless the condition holds."""
    if not condition:
        raise DFlashError(f"{name} is {value!r}", f"choose {allowed}", name)


def require_least(settings: Any, least: int, *names: str) -> None:
    """`require` that settings, where they are given, are at least so much."""
    for name in names:
        value = getattr(settings, name)
        require(value is None or value >= least, name, value, f"{least} or more")


def require_positive(settings: Any, *names: str) -> None:
    """`require` that settings are finite and above 0."""
    for name in names:
        value = getattr(settings, name)
        require(0 < value < float("inf"), name, value, "a finite number above 0")


def require_possible(settings: Any) -> None:
    """`require` that no whole number is too large to compute with; seeds have their own range."""
    for name in (f.name for f in fields(settings) if f.name != "seed"):
        value = getattr(settings, name)
        fits = not isinstance(value, int) or value <= LARGEST
        require(fits, name, value, f"at most {LARGEST}")
