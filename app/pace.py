"""How often to redraw: as often as the screen may cost, whatever the decoding speed."""

from __future__ import annotations

import math


class Pace:
    """Spaces redraws so that the screen's own thread stays within a share of the time.

    share: processor time of the screen's thread per wall time. least, most: seconds between two
    redraws; `most` keeps a slow screen alive.
    """

    def __init__(self, share: float = 0.03, least: float = 0.08, most: float = 1.0) -> None:
        self._share, self._least, self._most = share, least, most
        self._wall, self._cpu = -math.inf, 0.0

    def due(self, wall: float, cpu: float) -> bool:
        """Whether to redraw now, and if so, begin counting anew.

        wall: seconds on any clock. cpu: seconds that the screen's thread has computed so far.
        """
        elapsed, used = wall - self._wall, cpu - self._cpu
        affordable = elapsed >= self._least and used <= self._share * elapsed
        if not affordable and elapsed < self._most:
            return False
        self._wall, self._cpu = wall, cpu
        return True
