"""Calls of single modules of a model, routed through a test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.nn as nn

from dflash_mlx.verifier.hooks import once, through


def override(module: nn.Module, call: Callable[..., Any]) -> None:
    """Route calls of this one module through `call(module, original, *args, **kwargs)`, once."""
    once(module, call, partial(through, call))
