"""How the learning rate goes over a run."""

from __future__ import annotations

import math

_FLOOR = 0.02  # of the peak, where the cosine ends


def share_of_peak(step: int, warmup: int, progress: float) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak.

    step: from 0 on. warmup: steps until the peak. progress: of the whole run, from 0 to 1.
    """
    rising = min(1.0, (step + 1) / (warmup + 1))
    return rising * (_FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * progress)) / 2)
