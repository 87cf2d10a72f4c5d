"""What is counted of rounds, the arithmetic behind the report, and its tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import log
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_mlx.benchmark.figures import committed, merging, reliability, summarise
from dflash_mlx.benchmark.measure import (
    TERMS,
    Checked,
    Measured,
    Round,
    Run,
    checked,
    separate_rows,
)
from dflash_mlx.benchmark.prompts import Question
from dflash_mlx.benchmark.tables import format_report
from dflash_mlx.core.accept import Accepted, NearTies
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.core.tree import Tree
from dflash_mlx.engine.parity import Difference
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


def statistics(tokens: int, seconds: float, rounds: int = 1, **more: Any) -> Statistics:
    return Statistics(
        "made up", generated_tokens=tokens, decode_seconds=seconds, rounds=rounds, **more
    )


def made_up(
    rate: float,
    plain_rate: float,
    category: str = "chat",
    method: str = "dflash",
    difference: Difference | None = None,
    rounds: int = 10,
    seconds: dict[str, float] | None = None,
    checked: tuple[Checked, ...] = (),
    separate_rows: int | None = None,
    **more: Any,
) -> Run:
    """A run of 100 tokens at `rate` tokens per second, beside the plain one; 8 rows a round."""
    tokens = [100 // rounds + (i < 100 % rounds) for i in range(rounds)]
    told = tuple(Round(n, 8, separate_rows, checked) for n in tokens)
    answer = Measured((), statistics(100, 100 / rate, rounds, **more), seconds or {}, told)
    question = Question("prompt", category, [])
    return Run(question, method, answer, statistics(100, 100 / plain_rate), difference)


def report_of(*runs: Run, times: PassTimes | None = None, **more: Any) -> str:
    return format_report({**summarise(runs, times), **more})


def section(text: str, title: str) -> list[list[str]]:
    """The cells of the table behind the line that starts with `title`."""
    body = text.split("\n" + title, 1)[1].split("\n\n")[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()]


# Rounds


def test_a_round_is_what_became_of_its_tree():
    delta = SimpleNamespace(tokens=(2, 4), accepted=ACCEPTED)
    children = (
        Checked(1, pytest.approx(0.3), False),
        Checked(1, pytest.approx(0.6), True),
        Checked(2, pytest.approx(0.5), True),
        Checked(2, pytest.approx(0.4), False),
    )
    assert Round.of(delta, PAPER) == Round(2, 6, 9, children)


def test_trees_without_confidences_have_no_checked_nodes_and_no_diagram():
    bare = Accepted(replace(TREE, logprobs=()), (0, 2, 4), 7)
    assert checked(bare) == ()
    assert reliability([Round(3, 6, None, ())]) is None


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


def test_the_diagram_has_mean_confidence_and_share_accepted_by_bin():
    nodes = (
        [Checked(1, 0.12, False), Checked(1, 0.18, True)],
        [
            Checked(2, 0.14, False),
            Checked(3, 1.0, True),
        ],
    )
    found = reliability([Round(1, 1, None, tuple(each)) for each in nodes])
    low, high = found["all"]["bins"]
    mean, share = 0.44 / 3, 1 / 3
    assert low == pytest.approx({"bin": 1, "nodes": 3, "confidence": mean, "accepted": share})
    assert high == {"bin": 9, "nodes": 1, "confidence": 1.0, "accepted": 1.0}
    assert found["all"]["calibration_error"] == pytest.approx(3 / 4 * (share - mean))
    assert [each["nodes"] for each in found["depth 1"]["bins"]] == [2]


def test_the_histogram_has_no_gaps():
    rounds = [Round(n, 4, None, ()) for n in (1, 4, 1, 2)]
    assert committed(rounds) == {"1": 2, "2": 1, "3": 0, "4": 1}


def test_merging_is_the_mean_over_rounds_of_rows_and_of_passes():
    times = PassTimes((1, 2, 3, 4), (1.0, 2.0, 2.5, 4.0))
    rounds = [Round(1, 1, 3, ()), Round(1, 2, 4, ())]
    rows = {"merged_rows": 1.5, "separate_rows": 3.5}
    assert merging(rounds, times) == {**rows, "merged_ms": 1500, "separate_ms": 3250}
    assert merging(rounds, None) == rows
    assert merging([Round(1, 1, None, ())], times) is None


# Figures


def test_the_speedup_is_the_median_of_ratios_and_not_the_ratio_of_medians():
    figures = summarise([made_up(10, 5), made_up(20, 40), made_up(100, 25)])["methods"]["dflash"]
    assert figures["speedup"] == pytest.approx(2.0)  # of 2, 0.5 and 4; the medians give 20 / 25
    assert figures["tokens_per_second"] == pytest.approx(20)
    assert figures["ratio_of_medians"] == pytest.approx(20 / 25)


def test_tokens_per_round_and_acceptance_are_over_all_rounds_together():
    runs = [
        made_up(10, 5, rounds=10, drafted=Counter({1: 8, 2: 2}), accepted=Counter({1: 4, 2: 1})),
        made_up(10, 5, rounds=40, drafted=Counter({1: 30}), accepted=Counter({1: 5})),
    ]
    figures = summarise(runs)["methods"]["dflash"]
    assert figures["mean_accepted"] == 200 / 50
    assert figures["acceptance_rate"] == 10 / 40
    assert figures["accepted_by_position"] == [9 / 38, 1 / 2]


def test_overhead_is_what_the_other_terms_leave_of_a_round():
    run = made_up(50, 25, rounds=10, seconds={"draft": 0.5, "verify": 1.0, "commit": 0.1})
    terms = {term: run.answer.round_ms(term) for term in TERMS}
    assert terms == pytest.approx({"draft": 50, "verify": 100, "commit": 10, "overhead": 40})
    figures = summarise([run, run, made_up(50, 25)])["methods"]["dflash"]
    assert figures["round_ms"]["draft"] == pytest.approx(50)


def test_parity_counts_the_answers_without_a_difference():
    runs = [made_up(1, 1), made_up(1, 1, difference=Difference(3, 0.25)), made_up(1, 1)]
    figures = summarise([*runs, made_up(1, 1)])["methods"]["dflash"]
    assert figures["parity"] == 0.75
    assert figures["first_differences"] == [{"id": "prompt", "position": 3, "margin": 0.25}]


def test_categories_and_methods_are_kept_apart_and_in_order():
    rates = {"code": {"none": 10, "dflash": 20}, "chat": {"none": 40, "dflash": 160}}
    runs = [
        made_up(rate, methods["none"], category, method)
        for category, methods in rates.items()
        for method, rate in methods.items()
    ]
    summary = summarise(runs)
    speedups = [
        (category, name, pytest.approx(figures["speedup"]))
        for category, methods in summary["categories"].items()
        for name, figures in methods.items()
    ]
    wanted = [
        ("code", "none", 1),
        ("code", "dflash", 2),
        ("chat", "none", 1),
        ("chat", "dflash", 4),
    ]
    assert speedups == wanted
    assert summary["methods"]["dflash"]["speedup"] == pytest.approx(3.0)


# Tables


def test_the_table_has_a_row_for_every_category_and_method():
    text = report_of(made_up(20, 10, "code"), made_up(30, 10, "chat"))
    header, rule, *rows = text.split("\n\n")[0].splitlines()
    assert len(rows) == 3
    assert {line.count("|") for line in (header, rule, *rows)} == {13}
    assert rows[1].startswith("| code | dflash | 20.0 | 2.00 | 10.00 | 8.0 | 0% | 100.0% |")


def test_the_histogram_counts_rounds_by_tokens():
    runs = [made_up(10, 5, rounds=40), made_up(10, 5, rounds=30, method="d2sd")]
    assert section(report_of(*runs), "Rounds by tokens") == [
        ["method", "1", "2", "3", "4"],
        ["---"] * 5,
        ["dflash", "0", "20", "20", "0"],
        ["d2sd", "0", "0", "20", "10"],
    ]


def test_the_reliability_table_has_all_depths_and_the_first():
    nodes = (Checked(1, 0.95, True), Checked(2, 0.93, False), Checked(1, 0.31, False))
    runs = [made_up(10, 5, rounds=10, checked=nodes, method="ddtree"), made_up(10, 5)]
    _, _, every, first = section(report_of(*runs), "Accepted after an accepted parent")
    assert every[:2] == ["ddtree", "all"] and first[:2] == ["ddtree", "depth 1"]
    assert (every[5], every[11]) == ("0% (10)", "50% (20)")
    assert (first[5], first[11]) == ("0% (10)", "100% (10)")
    assert [cell for cell in every[2:12] if cell] == [every[5], every[11]]
    assert "Accepted after" not in report_of(runs[1])


def test_merged_rows_stand_beside_separate_ones_with_the_passes_of_that_size():
    times = PassTimes((1, 101), (0.010, 0.110))  # a millisecond a row, and 9
    runs = [made_up(10, 5, separate_rows=16, method="paper"), made_up(10, 5)]
    _, _, *rows = section(report_of(*runs, times=times), "Rows per round")
    assert rows == [["paper", "8.0", "16.0", "50%", "17.0", "25.0"]]
    assert section(report_of(*runs), "Rows per round")[2][4:] == ["", ""]
    assert "Rows per round" not in report_of(made_up(10, 5))


def test_a_sweep_has_a_row_for_every_value_category_and_reference():
    runs = [
        made_up(rate, 10, category, method)
        for category in ("code", "chat")
        for method, rate in (("none", 10), ("ddtree:budget=4", 15), ("ddtree:budget=8", 20))
    ]
    lines = {"ddtree": {"4": "ddtree:budget=4", "8": "ddtree:budget=8"}}
    text = report_of(*runs, sweep={"setting": "budget", "lines": lines})
    header, _, *rows = section(text, "Sweep over budget")
    assert header[:3] == ["category", "method", "budget"]
    named = [["none", ""], ["ddtree", "4"], ["ddtree", "8"]]
    assert [row[:3] for row in rows[:3]] == [["all", *names] for names in named]
    assert len(rows) == 9 and {row[0] for row in rows} == {"all", "code", "chat"}
    assert rows[2][3:] == ["10.00", "8.0", "20.0", "2.00", "2.00"]


LENGTHS = {"asked": [64], "longer_than_asked": 2, "shortest": 63, "longest": 90}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"settings": {"sampling": {"temperature": 0.0, "seed": 1}}}, ""),
        (
            {"settings": {"sampling": {"temperature": 0.7, "seed": 5}}},
            "temperature 0.7 with seed 5",
        ),
        ({"settings": {"prompt_tokens": LENGTHS}}, "63 to 90 tokens, 2 longer than asked"),
        ({"pair": {"kv_bits": 8, "drafter_bits": None}}, "With kv_bits 8."),
    ],
)
def test_what_is_not_the_usual_is_said_beside_the_figures(more, said):
    text, usual = report_of(made_up(10, 5), **more), report_of(made_up(10, 5))
    assert said in text and (text == usual) == (said == "")


def test_rounds_are_counted_by_mode_where_a_budget_chose():
    runs = [
        made_up(10, 5, modes=Counter(plain=3, tree=7), method="d2sd"),
        made_up(10, 5, modes=Counter(tree=10), method="d2sd"),
        made_up(10, 5),
    ]
    figures = summarise(runs)["methods"]
    assert (figures["d2sd"]["modes"], figures["dflash"]["modes"]) == ({"plain": 3, "tree": 17}, {})
    text = report_of(*runs)
    assert "Rounds of d2sd by mode: plain 3, tree 17." in text
    assert "Rounds of dflash by mode" not in text


def test_a_guard_that_fired_has_its_counts_added_up():
    runs = [made_up(10, 5, near_ties=NearTies(checks=2, seconds=0.5)) for _ in range(2)]
    header, _, row = section(report_of(*runs), "Near-tie guard")
    assert header == ["method", "tokens", "checks", "passes", "replays", "changed", "seconds"]
    assert row == ["dflash", "200", "4", "0", "0", "0", "1"]


@pytest.mark.parametrize("counts", [None, NearTies()])
def test_a_guard_that_never_fired_is_not_shown(counts):
    assert "guard" not in report_of(made_up(10, 5, near_ties=counts))
