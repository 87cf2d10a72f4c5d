"""What the benchmark counts of rounds is what became of their trees."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest

from dflash_mlx.benchmark.rounds import (
    Checked,
    Round,
    checked,
    committed,
    merging,
    reliability,
    separate_rows,
)
from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.core.tree import Tree
from dflash_mlx.session.stream import TextDelta
from dflash_mlx.target.pass_times import PassTimes

#     0
#   1   2      accepted: 0, 2, 4; the children of 1 are never compared
#   3   4 5
CONFIDENCES = (1.0, 0.3, 0.6, 0.9, 0.5, 0.4)
TREE = replace(
    Tree.of([9, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 2, 2]),
    logprobs=tuple(log(confidence) for confidence in CONFIDENCES),
)
ACCEPTED = Accepted(TREE, (0, 2, 4), 7)
PAPER = DecodeConfig(method="d2sd", growth="paper", branches=4)


def test_nodes_are_checked_where_their_parent_was_accepted():
    assert checked(ACCEPTED) == (
        Checked(1, pytest.approx(0.3), False),
        Checked(1, pytest.approx(0.6), True),
        Checked(2, pytest.approx(0.5), True),
        Checked(2, pytest.approx(0.4), False),
    )


def test_trees_without_confidences_have_no_checked_nodes_and_no_diagram():
    bare = Accepted(replace(TREE, logprobs=()), (0, 2, 4), 7)
    assert checked(bare) == ()
    assert reliability([Round(3, 6, None, checked(bare))]) is None


def test_a_round_counts_the_tokens_that_a_stop_left():
    delta = TextDelta("", (2, 4), ACCEPTED, "stop", Statistics("d2sd"), 0)
    found = Round.of(delta, PAPER)
    assert (found.tokens, found.rows, len(found.checked)) == (2, 6, 4)
    assert found.separate_rows == 9  # a block of 3 has two prefixes to continue


def round_of(*nodes: Checked) -> Round:
    return Round(1, 1, None, nodes)


def test_the_diagram_has_mean_confidence_and_share_accepted_by_bin():
    found = reliability(
        [
            round_of(Checked(1, 0.12, False), Checked(1, 0.18, True)),
            round_of(Checked(2, 0.14, False), Checked(3, 1.0, True)),
        ]
    )
    low, high = found["all"]["bins"]
    assert low == {
        "bin": 1,
        "nodes": 3,
        "confidence": pytest.approx(0.44 / 3),
        "accepted": pytest.approx(1 / 3),
    }
    assert high == {"bin": 9, "nodes": 1, "confidence": 1.0, "accepted": 1.0}
    error = 3 / 4 * (1 / 3 - 0.44 / 3)
    assert found["all"]["calibration_error"] == pytest.approx(error)
    assert [each["nodes"] for each in found["depth 1"]["bins"]] == [2]


def test_the_histogram_has_no_gaps():
    rounds = [Round(n, 4, None, ()) for n in (1, 4, 1, 2)]
    assert committed(rounds) == {"1": 2, "2": 1, "3": 0, "4": 1}


@pytest.mark.parametrize(
    ("config", "block", "rows"),
    [
        (PAPER, 8, 40),
        (PAPER, 3, 9),
        (PAPER, 1, 1),
        (replace(PAPER, branches=9), 8, 64),
        (DecodeConfig(method="resample", branches=4), 3, 15),
        (DecodeConfig(method="resample", branches=4), 1, 1),
        (replace(PAPER, growth="joint"), 8, None),
        (DecodeConfig(method="dflash"), 8, None),
    ],
)
def test_separate_rows_are_those_of_the_first_draft_and_every_branch(config, block, rows):
    assert separate_rows(config, block) == rows


def test_merging_is_the_mean_over_rounds_of_rows_and_of_passes():
    times = PassTimes((1, 2, 3, 4), (1.0, 2.0, 2.5, 4.0))
    rounds = [Round(1, 1, 3, ()), Round(1, 2, 4, ())]
    assert merging(rounds, times) == {
        "merged_rows": 1.5,
        "separate_rows": 3.5,
        "merged_ms": 1500,
        "separate_ms": 3250,
    }
    assert merging(rounds, None) == {"merged_rows": 1.5, "separate_rows": 3.5}
    assert merging([Round(1, 1, None, ())], times) is None
