"""The tokens that a target finds likeliest, with their probabilities, as they are kept on disk."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

CHOICES = 8  # next tokens that are kept
CHOICE = np.dtype([("token", "<u4"), ("probability", "<f4")])

_ROWS = 64  # of logits that are sorted at once


def likeliest(logits: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """[T, CHOICES] of CHOICE for logits [T, V], likeliest first, the first the greedy choice.

    Of equal ones the lowest token comes first; which of them stay at the far end is open. Of a
    vocabulary smaller than CHOICES, the last ones are token 0 with probability 0.
    """
    parts = [_likeliest(logits[start : start + _ROWS]) for start in range(0, len(logits), _ROWS)]
    return np.concatenate(parts) if parts else np.zeros((0, CHOICES), CHOICE)


def _likeliest(logits: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    count, rows = min(CHOICES, logits.shape[-1]), np.arange(len(logits))[:, None]
    best = logits.argmax(axis=-1)
    chosen = np.argpartition(logits, -count, axis=-1)[:, -count:]
    missing = (chosen != best[:, None]).all(axis=-1)  # where all that are kept equal it
    chosen[missing, 0] = best[missing]
    chosen = chosen[rows, np.lexsort((chosen, -logits[rows, chosen]))]
    powers = np.exp(logits - logits[rows, best[:, None]])
    result = np.zeros((len(logits), CHOICES), CHOICE)
    result["token"][:, :count] = chosen
    total = powers.sum(axis=-1, keepdims=True)
    result["probability"][:, :count] = powers[rows, chosen] / total
    return result
