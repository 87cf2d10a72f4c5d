"""Widths that a budget chooses for a mixture, whose rows each read experts of their own."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mlx.verifier.pass_times import ROWS, PassTimes
from support.timed import Case, Clock, Honest, TimedTarget
from support.toys import ToyTarget

EXPERTS, USED, LAYERS = 128, 8, 8
DENSE = 0.45  # of what a plain pass reads, as in Qwen3-30B-A3B
EASY, HARD, STRETCH = 0.95, 0.5, 20  # how sure drafts are, in stretches of so many tokens


class Mixture(TimedTarget):
    """A pass takes the time of what it reads: a plain one reads 1, others more experts."""

    def __init__(self, skew: float) -> None:
        super().__init__(Clock(), PassTimes((1, 96), (1.0, 1.0)))
        self.draws = np.random.default_rng(0)
        self.popularity = skew * self.draws.standard_normal(EXPERTS)

    def reads(self, rows: int) -> float:
        noise = self.draws.standard_normal((LAYERS, rows, EXPERTS))
        chosen = np.argsort(-(self.popularity + noise), axis=-1)[..., :USED]
        touched = np.mean([len(np.unique(layer)) for layer in chosen])
        return float(DENSE + (1 - DENSE) * touched / USED)

    def forward_all(self, sequences, aux_layers=()):
        self.clock.now += self.reads(sum(each.block.rows for each in sequences))
        return ToyTarget.forward_all(self, sequences, aux_layers)


def of_plain(skew: float, timed_over_words: bool) -> float:
    target = Mixture(skew)
    if timed_over_words:
        target.times = PassTimes(ROWS, tuple(target.reads(rows) for rows in ROWS))
    case = Case(target, Honest(0.15, lambda i: (EASY, HARD)[i // STRETCH % 2]), tokens=400)
    return case.seconds / case.plain_seconds


@pytest.mark.parametrize("skew", [0.0, 0.6])
def test_a_token_reads_less_where_passes_were_timed_over_different_words(skew):
    """The other budget is told what passes over one token take: no longer for more rows."""
    assert of_plain(skew, timed_over_words=True) < 0.9 * of_plain(skew, False)
