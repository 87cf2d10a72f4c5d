"""Loops are cut, and nothing else."""

from __future__ import annotations

import random

import pytest

from dflash_mlx.train.corpus.loops import loop_end


@pytest.mark.parametrize("period", [1, 8, 9, 32])
def test_a_loop_is_cut_after_its_first_repetition(period):
    cycle = list(range(100, 100 + period))
    before = [1, 2, 3, 4, 5]
    enough = max(3 * period, 24)
    answer = before + (cycle * 40)[:enough]
    assert loop_end(answer[:-1]) is None
    assert answer[: loop_end(answer)] == before + cycle * 2


def test_no_loop_is_seen_where_there_is_none():
    numbers = random.Random(0)
    assert loop_end([]) is None
    assert loop_end([numbers.randrange(3) for _ in range(300)]) is None
    assert loop_end(list(range(33)) * 5) is None, "too long a cycle"
    assert loop_end([5] * 40 + [6]) is None, "it has ended"
