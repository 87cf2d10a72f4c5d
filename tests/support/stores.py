"""Stores of what was said before, and what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_mlx.drafters.continuations.store import Store
from dflash_mlx.drafters.continuations.suffixes import CODE, Text


def text_of(tokens: Sequence[int], said: float) -> Text:
    """A text of these tokens."""
    return Text(np.array(tokens, CODE), said)


def plain(texts: Any) -> list[tuple[list[int], float]]:
    """Texts that compare."""
    return [(text.tokens.tolist(), text.said) for text in texts]


def filled(*texts: Sequence[int], **settings: Any) -> Store:
    """A store that took these in, the first at second 1."""
    store = Store(**settings)
    for i, text in enumerate(texts):
        store.add(text, 1.0 + i)
    assert store.wait(60)
    return store


def stored(store: Store) -> list[list[int]]:
    """The texts in a store, the oldest first."""
    return [text.tokens.tolist() for array in store._arrays for text in array.texts()]


def held(store: Store) -> int:
    """Tokens in a store."""
    return sum(map(len, stored(store)))
