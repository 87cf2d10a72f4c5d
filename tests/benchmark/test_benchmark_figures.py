"""Names become settings; what is counted of rounds becomes figures and tables."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx.benchmark.measure import TERMS, RoundSize, Run, summarise
from dflash_mlx.benchmark.report import format_report
from dflash_mlx.benchmark.selection import BenchmarkPrompt, read_methods, settle_all
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.drafters import paper
from dflash_mlx.engine.exact import Difference
from dflash_mlx.engine.pair import Capabilities
from support.configs import config_with


def methods(names: str, **settings: object) -> dict[str, DecodeConfig]:
    return read_methods(names, config_with(**settings), paper.KNOBS)


def test_settings_behind_a_name_replace_those_of_the_command_line():
    found = methods("dflash:4,ddtree:budget=16,d2sd:6:growth=paper:branches=2", budget=9)
    assert list(found) == ["none", "dflash:4", "ddtree:budget=16", "d2sd:6:growth=paper:branches=2"]
    assert found["dflash:4"].block_size == 4
    assert (found["ddtree:budget=16"].budget, found["dflash:4"].budget) == (16, 9)
    last = found["d2sd:6:growth=paper:branches=2"]
    assert (last.block_size, last.options.growth, last.options.branches) == (6, "paper", 2)
    assert last.budget is None, "nothing cuts the published tree"
    both = methods("d2sd:growth=paper,ddtree", budget=9)
    assert (both["d2sd:growth=paper"].budget, both["ddtree"].budget) == (None, 9)
    (_, masked) = methods("specdiff:8:steps=4:schedule=left-to-right").values()
    options = masked.options
    assert (masked.block_size, options.steps, options.schedule) == (8, 4, "left-to-right")
    assert methods("ddtree:budget=auto", budget=9)["ddtree:budget=auto"].budget is None
    assert not methods("d2sd:lookup=off")["d2sd:lookup=off"].lookup
    assert methods("d2sd:lookup=on", lookup=False)["d2sd:lookup=on"].lookup


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("", "method is ''"),
        ("dflash:²", "'²'"),
        ("d2sd:lookup=no", "'no'"),
        ("dflash:speed=2", "sets 'speed'"),
        ("dflash:branches=2", "sets 'branches', which dflash does not have"),
        ("none:4", "sets 'block', which none does not have"),
        ("dflash:4:5", "'dflash:4:5' sets the block twice"),
        ("dflash:budget=2:budget=3", "'dflash:budget=2"),
        ("ddtree,dflash,ddtree", "'ddtree' comes twice"),
        ("ddtree:budget=999", "budget is 999 in 'ddtree:budget=999'"),
        ("d2sd:growth=paper:budget=8", "never cuts its tree, but the budget is 8"),
        ("d2sd:steps=2", "sets 'steps', which d2sd does not have"),
        ("specdiff:steps=2:schedule=any", "'any'.*'specdiff:steps=2:schedule=any'"),
        ("d2sd:budget=", "budget in 'd2sd:budget=' is ''"),
        ("d2sd:budget=many", "'many'"),
        ("d2sd:block=auto", "'auto'"),
        ("d2sd:budget=1", "budget is 1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(names, message):
    with pytest.raises(DFlashError, match=message) as failure:
        methods(names)
    assert failure.value.next_step


@pytest.mark.parametrize(
    ("capabilities", "names"),
    [
        (Capabilities(), ["none", "ngram", "ngram:exact=on"]),
        (Capabilities(("dflash",)), ["none", "ddtree", "ddtree:exact=on", "ngram"]),
        (Capabilities(("dflash",), trees=False), ["none", "dflash", "dflash:exact=on", "ngram"]),
    ],
)
def test_auto_goes_by_the_name_of_what_it_is_with_the_pair(capabilities, names):
    settled = settle_all(methods("auto,auto:exact=on,ngram"), capabilities)
    assert list(settled) == names
    assert [config.method for config in settled.values()] == [n.partition(":")[0] for n in names]
    chosen = methods("dflash:4,ddtree:budget=16,d2sd:8:growth=paper,resample")
    assert settle_all(chosen, Capabilities(("dflash",) * 2)) == chosen


REPORT = Path(__file__).parents[1] / "data" / "benchmark-report.md"


def made_up(
    rate: float,
    plain_rate: float,
    category: str = "chat",
    method: str = "dflash",
    difference: Difference | None = None,
    rounds: int = 10,
    seconds: dict[str, float] | None = None,
    **more: Any,
) -> Run:
    """A run of 100 tokens behind the first at `rate` tokens/s, and a plain one; 8 rows a round."""
    tokens = [100 // rounds + (i < 100 % rounds) for i in range(rounds)]
    told = tuple(RoundSize(n, 8) for n in tokens)
    own, plain = (
        Statistics("made up", generated_tokens=101, decode_seconds=100 / each, rounds=n, **counts)
        for each, n, counts in ((rate, rounds, more), (plain_rate, 1, {}))
    )
    question = BenchmarkPrompt(f"{rate} to {plain_rate}", category, [])
    return Run(question, method, own, seconds or {}, told, plain, difference)


# Figures


def test_the_speedup_is_the_median_of_ratios_and_counts_are_over_all_rounds_together():
    figures = summarise([made_up(10, 5), made_up(20, 40), made_up(100, 25)])["methods"]["dflash"]
    assert figures["speedup"] == pytest.approx(2.0)  # of 2, 0.5 and 4; the medians give 20 / 25
    assert figures["slowest"] == {"id": "20 to 40", "speedup": pytest.approx(0.5)}
    assert figures["tokens_per_second"] == pytest.approx(20)
    assert figures["ratio_of_medians"] == pytest.approx(20 / 25)
    counts = {"drafted": Counter({1: 8, 2: 2}), "accepted": Counter({1: 4, 2: 1})}
    others = {"drafted": Counter({1: 30}), "accepted": Counter({1: 5}), "modes": Counter(tree=10)}
    modes, apart = Counter(plain=3, tree=7), Difference(3, 0.25)
    runs = [
        made_up(10, 5, rounds=10, modes=modes, **counts),
        made_up(10, 5, rounds=40, difference=apart, **others),
    ]
    figures = summarise(runs)["methods"]["dflash"]
    assert figures["mean_accepted"] == 200 / 50
    assert figures["acceptance_rate"] == 10 / 40
    assert figures["accepted_by_position"] == [9 / 38, 1 / 2]
    assert figures["modes"] == {"plain": 3, "tree": 17}
    assert figures["parity"] == 0.5
    assert figures["first_differences"] == [{"id": "10 to 5", "position": 3, "margin": 0.25}]


def test_intervals_are_of_tokens_over_rounds_and_not_of_each_prompt_s_own():
    """Enumerated, for one answer of 8 tokens in 1 round and three of 9 in 9.

    Four draws have the first 0, 1, 2, 3 or 4 times with chances 0.316, 0.422, 0.211, 0.047
    and 0.004, so the middle 95 % end at 0 and at 3 times: 36 / 36 and 33 / 12 tokens a round. A
    mean of ratios would end at 6.25.
    """
    short, long = (
        replace(run, rounds=(RoundSize(tokens, 8),) * rounds)
        for run, tokens, rounds in ((made_up(10, 5), 8, 1), (made_up(10, 5), 1, 9))
    )
    figures = summarise([short, long, long, long])["methods"]["dflash"]
    assert figures["mean_accepted"] == 35 / 28
    assert figures["intervals"]["mean_accepted"] == [1.0, 2.75]


def test_overhead_is_what_the_other_terms_leave_of_a_round():
    run = made_up(50, 25, rounds=10, seconds={"draft": 0.5, "verify": 1.0, "commit": 0.1})
    terms = {term: run.round_ms(term) for term in TERMS}
    assert terms == pytest.approx({"draft": 50, "verify": 100, "commit": 10, "overhead": 40})
    figures = summarise([run, run, made_up(50, 25)])["methods"]["dflash"]
    assert figures["round_ms"]["draft"] == pytest.approx(50)


# Tables


def everything() -> str:
    """A report with all that is not the usual."""
    runs = []
    for category, faster in (("code", 2), ("chat", 1)):
        runs += [
            made_up(10, 10, category, "none"),
            made_up(15 * faster, 10, category, "ddtree:budget=4", rounds=40),
            made_up(5 * faster, 10, category, "d2sd:growth=paper", seconds={"draft": 0.25}),
        ]
    lengths = {"asked": [64], "longer_than_asked": 2, "shortest": 63, "longest": 90}
    sampling = {"temperature": 0.7, "seed": 5}
    return format_report(
        {
            "pair": {"kv_bits": 8, "drafter_bits": None},
            "settings": {"sampling": sampling, "prompt_tokens": lengths},
            **summarise(runs),
        }
    )


def test_the_tables_are_those_that_users_know():
    """DFLASH_CHAT_SNAPSHOTS=write keeps those of today."""
    if os.environ.get("DFLASH_CHAT_SNAPSHOTS") == "write":
        REPORT.write_text(everything() + "\n", encoding="utf-8")
    assert everything() + "\n" == REPORT.read_text(encoding="utf-8")


def test_an_answer_that_ends_with_its_first_token_has_no_speed_and_spoils_none():
    short = Statistics("made up", generated_tokens=1)
    at_once = replace(made_up(20, 10), statistics=short, plain=short, rounds=())
    alone = summarise([at_once])["methods"]["dflash"]
    assert (alone["speedup"], alone["tokens_per_second"], alone["round_ms"]["verify"]) == (0, 0, 0)
    both = summarise([at_once, made_up(20, 10)])["methods"]["dflash"]
    assert (both["speedup"], both["tokens_per_second"]) == (2.0, 20.0)


def test_a_report_from_before_slowest_prompts_were_kept_leaves_them_out():
    report = {"settings": {}, "pair": {}, **summarise([made_up(10, 5)])}
    for methods in (report["methods"], *report["categories"].values()):
        del methods["dflash"]["slowest"]
    assert "|         | 2.00       |" in format_report(report)
