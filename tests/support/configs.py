"""Settings in short: a method's own options beside those that hold for every method."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from dflash_mlx.core.config import AUTO, DecodeConfig
from dflash_mlx.core.option import Given, Options
from dflash_mlx.drafters.methods import METHODS
from dflash_mlx.drafters.paper import KNOBS, add_controls

add_controls()


def config_with(method: str = AUTO, block_size: int | None = None, **given: Any) -> DecodeConfig:
    """`DecodeConfig` with options by name; the benchmark's where only they have them."""
    shared = {f.name for f in fields(DecodeConfig)} & given.keys()
    own = {name: value for name, value in given.items() if name not in shared}
    options: Options | Given | None = Given.of(**own) if own else None
    if method in KNOBS and own.keys() - METHODS[method].own.keys():
        known = {f.name for f in fields(KNOBS[method])}
        options = KNOBS[method](**own) if own.keys() <= known else options
    return DecodeConfig(
        method, block_size, options=options, **{name: given[name] for name in shared}
    )
