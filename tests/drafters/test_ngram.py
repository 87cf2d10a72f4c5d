"""Lookup drafts what followed the same words before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_mlx.drafters.ngram import LONGEST, PER_TOKEN, SHORTEST, lookup

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def brute_force(text: list[int], most: int) -> list[int]:
    """The definition: the longest suffix that ends earlier, the latest of equals."""
    best, end = SHORTEST - 1, None
    for stop in range(len(text) - 1, 0, -1):
        length = max(
            (n for n in range(1, LONGEST + 1) if n <= stop and text[stop - n : stop] == text[-n:]),
            default=0,
        )
        if length > best:
            best, end = length, stop
    return [] if end is None else text[end : end + min(most, PER_TOKEN * best)]


@given(tokens, st.integers(0, 12))
def test_lookup_is_its_definition(text, most):
    assert lookup(text, most)[0] == brute_force(text, most)[:most]


def test_nothing_is_drafted_where_nothing_repeats():
    assert lookup([1, 2, 3, 4], 8)[0] == []
    assert lookup([5], 8)[0] == []


def test_a_longer_match_drafts_more_and_is_trusted_more():
    short = lookup([1, 2, 9, 8, 7, 6, 5, 1, 2], 20)
    long = lookup([1, 2, 3, 9, 8, 7, 6, 5, 4, 0, 1, 2, 3], 20)
    assert (short[0], long[0]) == ([9, 8, 7, 6], [9, 8, 7, 6, 5, 4])
    assert long[1] > short[1]
