"""The arithmetic behind the benchmark's report, and its tables."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dflash_mlx.benchmark.figures import summarise
from dflash_mlx.benchmark.measure import TERMS, Run
from dflash_mlx.benchmark.rounds import Checked, Round
from dflash_mlx.benchmark.tables import format_report, format_table
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.engine.parity import Difference
from dflash_mlx.target.pass_times import PassTimes


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
    return Run(
        prompt="prompt",
        category=category,
        method=method,
        statistics=statistics(100, 100 / rate, rounds, **more),
        seconds=seconds or {},
        rounds=tuple(Round(n, 8, separate_rows, checked) for n in tokens),
        plain=statistics(100, 100 / plain_rate),
        difference=difference,
    )


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
    terms = {term: run.round_ms(term) for term in TERMS}
    assert terms == pytest.approx({"draft": 50, "verify": 100, "commit": 10, "overhead": 40})
    figures = summarise([run, run, made_up(50, 25)])["methods"]["dflash"]
    assert figures["round_ms"]["draft"] == pytest.approx(50)


def test_parity_counts_the_answers_without_a_difference():
    runs = [made_up(1, 1), made_up(1, 1, difference=Difference(3, 0.25)), made_up(1, 1)]
    figures = summarise([*runs, made_up(1, 1)])["methods"]["dflash"]
    assert figures["parity"] == 0.75
    assert figures["first_differences"] == [{"id": "prompt", "position": 3, "margin": 0.25}]


def test_categories_and_methods_are_kept_apart_and_in_order():
    runs = [
        made_up(10, 10, "code", "none"),
        made_up(20, 10, "code", "dflash"),
        made_up(40, 40, "chat", "none"),
        made_up(160, 40, "chat", "dflash"),
    ]
    summary = summarise(runs)
    assert list(summary["categories"]) == ["code", "chat"]
    speedups = {
        category: {name: figures["speedup"] for name, figures in methods.items()}
        for category, methods in summary["categories"].items()
    }
    assert speedups == {
        "code": pytest.approx({"none": 1.0, "dflash": 2.0}),
        "chat": pytest.approx({"none": 1.0, "dflash": 4.0}),
    }
    assert summary["methods"]["dflash"]["speedup"] == pytest.approx(3.0)


def test_the_table_has_a_row_for_every_category_and_method():
    summary = summarise([made_up(20, 10, "code"), made_up(30, 10, "chat")])
    header, rule, *rows = format_table(summary).splitlines()
    assert len(rows) == 3
    assert {line.count("|") for line in (header, rule, *rows)} == {13}
    assert rows[1].startswith("| code | dflash | 20.0 | 2.00 | 10.00 | 8.0 | 0% | 100.0% |")


def report_of(*runs: Run, times: PassTimes | None = None, **more: Any) -> str:
    return format_report({**summarise(runs, times), **more})


def section(text: str, title: str) -> list[list[str]]:
    """The cells of the table behind the line that starts with `title`."""
    body = text.split("\n" + title, 1)[1].split("\n\n")[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()]


def test_the_histogram_counts_rounds_by_tokens_and_sums_to_the_rounds():
    runs = [made_up(10, 5, rounds=40), made_up(10, 5, rounds=30, method="d2sd")]
    figures = summarise(runs)["methods"]
    assert figures["dflash"]["committed"] == {"1": 0, "2": 20, "3": 20}
    assert figures["d2sd"]["committed"] == {"1": 0, "2": 0, "3": 20, "4": 10}
    header, _, dflash, d2sd = section(report_of(*runs), "Rounds by tokens")
    assert header == ["method", "1", "2", "3", "4"]
    assert dflash == ["dflash", "0", "20", "20", "0"]
    assert d2sd == ["d2sd", "0", "0", "20", "10"]


def test_the_reliability_table_has_all_depths_and_the_first_and_names_those_without():
    nodes = (Checked(1, 0.95, True), Checked(2, 0.93, False), Checked(1, 0.31, False))
    runs = [made_up(10, 5, rounds=10, checked=nodes, method="ddtree"), made_up(10, 5)]
    text = report_of(*runs)
    _, _, every, first = section(text, "Accepted after an accepted parent")
    assert every[:2] == ["ddtree", "all"] and first[:2] == ["ddtree", "depth 1"]
    assert (every[5], every[11]) == ("0% (10)", "50% (20)")
    assert (first[5], first[11]) == ("0% (10)", "100% (10)")
    assert [cell for cell in every[2:12] if cell] == [every[5], every[11]]
    assert "no confidences: dflash." in text


def test_merged_rows_stand_beside_separate_ones_with_the_passes_of_that_size():
    times = PassTimes((1, 101), (0.010, 0.110))  # a millisecond a row, and 9
    runs = [made_up(10, 5, separate_rows=16, method="paper"), made_up(10, 5)]
    figures = summarise(runs, times)["methods"]
    assert figures["dflash"]["merging"] is None
    assert figures["paper"]["merging"] == pytest.approx(
        {"merged_rows": 8, "separate_rows": 16, "merged_ms": 17, "separate_ms": 25}
    )
    _, _, *rows = section(report_of(*runs, times=times), "Rows per round")
    assert rows == [["paper", "8.0", "16.0", "50%", "17.0", "25.0"]]
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
    assert [row[:3] for row in rows[:3]] == [
        ["all", "none", ""],
        ["all", "ddtree", "4"],
        ["all", "ddtree", "8"],
    ]
    assert len(rows) == 9 and {row[0] for row in rows} == {"all", "code", "chat"}
    assert rows[2][3:] == ["10.00", "8.0", "20.0", "2.00", "2.00"]


def test_sampling_and_padding_are_said_beside_the_figures():
    plain = report_of(made_up(10, 5), settings={"sampling": {"temperature": 0.0, "seed": 1}})
    assert "Sampled" not in plain and "padded" not in plain
    settings = {
        "sampling": {"temperature": 0.7, "seed": 5},
        "prompt_tokens": {"asked": [64], "longer_than_asked": 2, "shortest": 63, "longest": 90},
    }
    text = report_of(made_up(10, 5), settings=settings)
    assert "temperature 0.7 with seed 5" in text
    assert "63 to 90 tokens, 2 longer than asked" in text


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


def guarded(monkeypatch: pytest.MonkeyPatch, **counts: float) -> None:
    """Every answer's statistics count this of a near-tie guard, and nothing else of one."""
    real = Statistics.as_dict

    def as_dict(self: Statistics) -> dict[str, Any]:
        others = {key: n for key, n in real(self).items() if not key.startswith("guard_")}
        return {**others, **counts}

    monkeypatch.setattr(Statistics, "as_dict", as_dict)


def test_a_guard_that_fired_has_its_counts_added_up(monkeypatch):
    guarded(monkeypatch, guard_checks=2, guard_seconds=0.5)
    runs = [made_up(10, 5), made_up(10, 5)]
    assert summarise(runs)["methods"]["dflash"]["guard"] == {"guard_checks": 4, "guard_seconds": 1}
    header, _, row = section(report_of(*runs), "Near-tie guard")
    assert header == ["method", "tokens", "checks", "seconds"]
    assert row == ["dflash", "200", "4", "1"]


@pytest.mark.parametrize("counts", [{}, {"guard_checks": 0}])
def test_a_guard_that_never_fired_is_not_shown(monkeypatch, counts):
    guarded(monkeypatch, **counts)
    assert "guard" not in report_of(made_up(10, 5))
