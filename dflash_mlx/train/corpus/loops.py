"""Answers that have begun to repeat themselves."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD = 32  # tokens
REPEATS = 3
LEAST_TOKENS = 24


def loop_end(tokens: Sequence[int]) -> int | None:
    """How many of `tokens` to keep where their tail repeats a short cycle, None where it does not.

    A tail is a loop when a cycle of at most LONGEST_PERIOD tokens fills it REPEATS times or more
    and it has at least LEAST_TOKENS tokens. What is kept ends with the first repetition.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        repeated = max((REPEATS - 1) * period, LEAST_TOKENS - period)
        if len(tokens) < repeated + period:
            continue
        if all(tokens[-i] == tokens[-i - period] for i in range(1, repeated + 1)):
            return _start(tokens, period) + 2 * period
    return None


def _start(tokens: Sequence[int], period: int) -> int:
    """Where the cycle that ends `tokens` begins."""
    start = len(tokens) - period
    while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
        start -= 1
    return start
