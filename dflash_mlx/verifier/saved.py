"""Caches as arrays and JSON, so that they can be kept on a disk."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import mlx.core as mx

Saved = tuple[list[mx.array], Any]  # arrays, and what JSON can hold of the rest


def join(parts: Iterable[Saved]) -> Saved:
    """What several parts save, as one."""
    parts = list(parts)
    return [a for arrays, _ in parts for a in arrays], [[len(a), about] for a, about in parts]


def split(saved: Saved) -> list[Saved]:
    """The parts again. ValueError or TypeError for what `join` never made."""
    arrays, about = iter(saved[0]), saved[1]
    return [([*islice(arrays, count)], rest) for count, rest in about]
