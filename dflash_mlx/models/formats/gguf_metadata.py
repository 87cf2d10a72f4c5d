"""A GGUF file's metadata, every key checked for its kind and range; ValueError names the key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from gguf import Keys

ARCHITECTURE = "llama"
MAX_WHOLE = 2**31 - 1  # MLX keeps a dimension in 32 bits with a sign

Metadata = dict[str, Any]


def whole(metadata: Metadata, key: str, default: int | None = None) -> int:
    """A whole number from 1 on (from 0 on where that is the default), which must fit 31 bits."""
    name, value = _get(metadata, key, default)
    lowest = 0 if default == 0 else 1
    if type(value) is not int or not lowest <= value <= MAX_WHOLE:
        wanted = f"one whole number from {lowest} to {MAX_WHOLE}"
        raise ValueError(f"{name} is {_shown(value)}, not {wanted}")
    return value


def real(metadata: Metadata, key: str, default: float | None = None) -> float:
    """A finite number above 0."""
    name, value = _get(metadata, key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {_shown(value)}, not one finite number above 0")
    return float(value)


def text(metadata: Metadata, key: str, default: str | None = None) -> str:
    """A string."""
    name, value = _get(metadata, key, default)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_shown(value)}, not a text")
    return value


def flag(metadata: Metadata, key: str) -> bool:
    """True or false, false where it is absent."""
    name, value = _get(metadata, key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {_shown(value)}, not true or false")
    return value


def vocabulary(metadata: Metadata) -> Sequence[str]:
    """The tokens; of a file of which only the head is read, a range of as many numbers."""
    return cast(Sequence[str], _list(metadata, Keys.Tokenizer.LIST, str))


def merges(metadata: Metadata) -> Sequence[str]:
    """The merges of a byte-pair encoding, as `vocabulary`."""
    return cast(Sequence[str], _list(metadata, Keys.Tokenizer.MERGES, str))


def token_types(metadata: Metadata) -> Sequence[int]:
    """A kind for every token, as `vocabulary`; none at all in some files."""
    if Keys.Tokenizer.TOKEN_TYPE not in metadata:
        return range(0)
    return cast(Sequence[int], _list(metadata, Keys.Tokenizer.TOKEN_TYPE, int))


def token_ids(metadata: Metadata, *keys: str) -> dict[str, int]:
    """Those of these keys that are there, each a token of the vocabulary."""
    count = len(vocabulary(metadata))
    found = {key: metadata[key] for key in keys if key in metadata}
    for key, value in found.items():
        if type(value) is not int:
            raise ValueError(f"{key} is {_shown(value)}, not one token")
        if not 0 <= value < count:
            raise ValueError(f"its special token {value} is outside its {count} tokens ({key})")
    return found


def _list(metadata: Metadata, key: str, kind: type) -> Any:
    name, value = _get(metadata, key, None)
    if not isinstance(value, range | list):
        raise ValueError(f"{name} is {_shown(value)}, not a list")
    if isinstance(value, list) and (wrong := [v for v in value if type(v) is not kind]):
        raise ValueError(f"{name} has {_shown(wrong[0])}, which is no {kind.__name__}")
    return value


def _get(metadata: Metadata, key: str, default: Any) -> tuple[str, Any]:
    """The key with the architecture in it, and its value; without a default it must be there."""
    name = key.format(arch=ARCHITECTURE)
    if default is None and name not in metadata:
        raise ValueError(f"the metadata {name} is missing")
    return name, metadata.get(name, default)


def _shown(value: Any) -> str:
    return repr(value)[:80]
