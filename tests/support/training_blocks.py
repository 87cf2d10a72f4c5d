"""Texts and blocks for training."""

from __future__ import annotations

import numpy as np

from dflash_mlx.train.blocks import Blocks, TextTokens


def preferring(tokens: np.ndarray, prompt: int, choices: np.ndarray) -> TextTokens:
    """A text after whose tokens the target would choose `choices`, and next to them others."""
    likely = np.stack([choices, choices + 1000, choices + 2000], axis=-1)
    shares = np.linspace(0.4, 0.9, len(tokens))[:, None] * [1.0, 0.1, 0.01]
    return TextTokens(tokens, prompt, likely, shares)


def text_of(length: int, prompt: int, first: int = 0) -> TextTokens:
    """A greedy text that counts up from `first`."""
    tokens = np.arange(first, first + length)
    return preferring(tokens, prompt, tokens + 1)


def places(blocks: Blocks) -> list[tuple[int, int]]:
    """The text and the position of every block."""
    return [
        (int(row), int(anchor))
        for row, anchors in zip(blocks.rows, blocks.anchors, strict=True)
        for anchor in anchors
    ]


def equal(a: Blocks, b: Blocks) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in vars(a))
