"""D-PACE's weights by loops."""

from __future__ import annotations

import numpy as np


def dpace_by_loops(confidences: np.ndarray, supervised: np.ndarray, alpha: float) -> list[float]:
    """w_j = sum over m >= j of the product over i <= m of (1 - alpha) q_i + alpha, one block."""
    weights = []
    for j in range(len(confidences)):
        total = 0.0
        for m in range(j, len(confidences)):
            product = 1.0
            for i in range(m + 1):
                if supervised[i]:
                    product *= (1 - alpha) * confidences[i] + alpha
            total += product if supervised[m] else 0.0
        weights.append(total if supervised[j] else 0.0)
    return weights
