"""Where an answer begins to repeat itself."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD = 32  # tokens of a cycle that ends an answer
REPEATS = 3
LEAST_TOKENS = 24


def loop_end(tokens: Sequence[int]) -> int | None:
    """How many of `tokens` to keep where their tail repeats a short cycle, None where it does not.

    A tail is a loop when a cycle of at most LONGEST_PERIOD tokens fills it REPEATS times or more
    and it has at least LEAST_TOKENS tokens. What is kept ends with the first repetition.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        end = len(tokens)
        while end > period and tokens[end - 1] == tokens[end - 1 - period]:
            end -= 1
        if len(tokens) - end >= max((REPEATS - 1) * period, LEAST_TOKENS - period):
            return end + period
    return None
