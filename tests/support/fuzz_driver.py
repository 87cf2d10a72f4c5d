"""Runs `fuzzing.py` in processes of their own and goes on behind a case that ends one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GOOD = ("refused", "loaded")
START, EACH = 120, 25  # seconds: imports, and a case, whose own alarm rings earlier
PROGRAM = ["-m", "support.fuzzing"]
_TESTS = Path(__file__).parents[1]


def outcomes(seed: int, first: int, last: int) -> Iterator[dict[str, Any]]:
    """What became of each case, in order; "crash" where its process ended without a word."""
    while first < last:
        lines = _run(seed, first, last)
        ended = [line for line in lines if "outcome" in line]
        yield from ended
        first += len(ended)
        if first < last:
            if not lines:
                raise RuntimeError("the fuzzing process did not begin; run it by hand")
            why = f"the process ended in case {first}"
            yield {"case": first, "subject": "", "outcome": "crash", "why": why}
            first += 1


def _run(seed: int, first: int, last: int) -> list[dict[str, Any]]:
    command = [sys.executable, *PROGRAM, str(seed), str(first), str(last)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(_TESTS)}
    limit = START + EACH * (last - first)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
        output = done.stdout
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode()
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]
